"""The memory plan: what each part of a runtime takes of each device, row by row.

`count_plan` is a pure function of headers, settings and counts (`Counts`). Weights and cells are
exact; compute buffers are those of the whole model in one place, taken for every device that layers
lie on; where a card also computes with this machine's weights, it needs room for the largest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from specrun.runtime.memory.count import (
    TARGET,
    Counts,
    HeadPart,
    ModelPart,
    Part,
    cells_by_place,
    widened_cells,
)
from specrun.runtime.memory.shape import (
    HOST,
    MemoryDevice,
    PlacedTensor,
    largest_weight,
    layer_places,
    place_tensors,
)

Kind = Literal["weights", "keys and values", "compute", "output rows"]
_ROWS_TO_OFFLOAD = 32  # ggml's CUDA backend takes weights over for so many tokens at once


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """What a plan is for: context and layers on devices (-1: all), of target and of drafts."""

    n_ctx: int
    n_gpu_layers: int
    n_gpu_layers_draft: int = -1


@dataclass(frozen=True, slots=True)
class PlanRow:
    """Bytes of one kind of one part, by place: `HOST` or the number of a device."""

    part: str
    kind: Kind
    by_place: dict[int, int]


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Parts and where they may lie: devices by number, for the target and for what drafts.

    `shares` are the devices' of the target; none: by their free memory. `overrides` are pairs of a
    pattern and a place. `host` is this machine's memory, None where it does not matter.
    """

    parts: tuple[Part, ...]
    devices: tuple[MemoryDevice, ...]
    target_places: tuple[int, ...]
    draft_places: tuple[int, ...]
    shares: tuple[float, ...] = ()
    overrides: tuple[tuple[str, int], ...] = ()
    host: MemoryDevice | None = None

    @property
    def target(self) -> ModelPart:
        """The target's part."""
        part = self.parts[0]
        assert isinstance(part, ModelPart)
        return part

    @property
    def has_drafts(self) -> bool:
        """Whether a draft model has layers of its own to place."""
        return any(isinstance(part, ModelPart) and part.drafts for part in self.parts)

    def with_cache(self, cache_type: str) -> PlanRequest:
        """Return the same with keys and values of another type."""
        parts = tuple(
            part
            if isinstance(part, HeadPart)
            else replace(
                part,
                context=replace(part.context, cache_type_k=cache_type, cache_type_v=cache_type),
            )
            for part in self.parts
        )
        return replace(self, parts=parts)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What was counted, and for which settings."""

    request: PlanRequest
    settings: PlanSettings
    rows: tuple[PlanRow, ...]
    n_layers: int = field(default=0)
    """Layers of the target, the output matrix counted as one: as many as can go to devices."""

    def total(self, place: int) -> int:
        """Return the bytes at a place."""
        return sum(row.by_place.get(place, 0) for row in self.rows)

    @property
    def on_devices(self) -> int:
        """The bytes on all devices."""
        return sum(self.total(place) for place in range(len(self.request.devices)))

    @property
    def excess(self) -> int:
        """The most bytes by which a budget is overdrawn; 0 where everything fits."""
        host = self.request.host
        here = 0 if host is None else self.total(HOST) - host.budget
        return max(0, here, self.excess_on_devices)

    @property
    def excess_on_devices(self) -> int:
        """The same of devices alone."""
        devices = enumerate(self.request.devices)
        return max(0, 0, *(self.total(place) - device.budget for place, device in devices))

    @property
    def fits(self) -> bool:
        """Whether every device keeps its margin."""
        return self.excess == 0

    @property
    def layers_on_devices(self) -> int:
        """How many of `n_layers` lie on devices."""
        wanted = self.settings.n_gpu_layers
        if not self.request.target_places:
            return 0
        return self.n_layers if wanted < 0 else min(wanted, self.n_layers)


def count_plan(request: PlanRequest, settings: PlanSettings, counts: Counts) -> MemoryPlan:
    """Count what all parts take with these settings."""
    rows: list[PlanRow] = []
    output_place = HOST
    for part in request.parts:
        if isinstance(part, HeadPart):
            rows += _head_rows(request, part, settings.n_ctx, output_place)
            continue
        counted, places = _model_rows(request, part, settings, counts, rows)
        rows += counted
        if part.title == TARGET:
            output_place = places[-1]
    return MemoryPlan(request, settings, tuple(rows), request.target.model.n_layers + 1)


def _model_rows(
    request: PlanRequest,
    part: ModelPart,
    settings: PlanSettings,
    counts: Counts,
    before: Sequence[PlanRow],
) -> tuple[list[PlanRow], tuple[int, ...]]:
    n_ctx, model = part.n_ctx(settings.n_ctx), part.model
    places = _places(request, part, settings, before)
    rules = [device.rules for device in request.devices]
    overrides = () if part.drafts else request.overrides
    tensors = place_tensors(model, places, rules, overrides, load_nextn=part.nextn)
    alone = _is_alone(part)
    cells: dict[int, int] = {}
    whole = 0
    for nextn in [*([] if alone else [False]), *([True] if part.nextn else [])]:
        of_layers = counts.cells(part, nextn=nextn).of_layers(n_ctx)
        own = cells_by_place(of_layers, places, offload=part.context.offload_kv)
        cells = {place: cells.get(place, 0) + own.get(place, 0) for place in {*cells, *own}}
        whole += counts.compute(part, n_ctx, nextn=nextn)
    rows = [
        PlanRow(part.title, "weights", _sums(tensors)),
        PlanRow(part.title, "keys and values", cells),
        PlanRow(part.title, "compute", _compute(request, part, places, tensors, whole, n_ctx)),
        PlanRow(part.title, "output rows", {HOST: _output_bytes(part)}),
    ]
    return rows, places


def _is_alone(part: ModelPart) -> bool:
    """Whether a file holds NextN blocks without a trunk."""
    return not any(tensor.name == "blk.0.attn_norm.weight" for tensor in part.model.tensors) and (
        part.nextn
    )


def _places(
    request: PlanRequest, part: ModelPart, settings: PlanSettings, before: Sequence[PlanRow]
) -> tuple[int, ...]:
    """Return where layers and output lie, in the plan's numbers of devices."""
    mine = request.draft_places if part.drafts else request.target_places
    wanted = settings.n_gpu_layers_draft if part.drafts else settings.n_gpu_layers
    shares = () if part.drafts else request.shares

    def left(place: int) -> float:
        used = sum(row.by_place.get(place, 0) for row in before)
        return float(max(0, request.devices[place].free - used))

    shares = shares or tuple(left(place) for place in mine)
    if shares and not any(shares):
        shares = (1.0,) * len(mine)
    found = layer_places(part.model.n_layers, wanted, shares)
    return tuple(HOST if place == HOST else mine[place] for place in found)


def _sums(tensors: Sequence[PlacedTensor]) -> dict[int, int]:
    found: dict[int, int] = {}
    for tensor in tensors:
        found[tensor.place] = found.get(tensor.place, 0) + tensor.n_bytes
    return found


def _compute(
    request: PlanRequest,
    part: ModelPart,
    places: Sequence[int],
    tensors: Sequence[PlacedTensor],
    whole: int,
    n_ctx: int,
) -> dict[int, int]:
    """Return compute buffers by place: graphs, what passes to them, weights that are taken over."""
    context = part.context
    tokens = min(context.n_ubatch, context.n_batch, n_ctx)
    mask = 2 if context.flash_attention != "off" else 4
    inputs = tokens * (n_ctx * mask + 2 * 4 * part.model.n_embd)
    used = {place for place in places if place != HOST}
    rest = {tensor.place for tensor in tensors if not tensor.name.startswith("token_embd.")}
    found = {HOST: whole if HOST in rest else inputs}
    mine = request.draft_places if part.drafts else request.target_places
    for place in mine:
        rules = request.devices[place].rules
        takes = rules.takes_weights and place == mine[0]
        with_output = context.n_outputs >= _ROWS_TO_OFFLOAD
        copied = largest_weight(tensors, with_output=with_output) if takes else 0
        if place in used or copied:
            widened = widened_cells(part.model, context, n_ctx) if rules.widens_cells else 0
            found[place] = whole + copied + widened
    return found


def _output_bytes(part: ModelPart) -> int:
    """Return the buffer of logits and states that is read after an evaluation."""
    context = part.context
    width = part.model.n_vocab + (part.model.n_embd if context.hidden_states else 0)
    return 4 * width * max(context.n_outputs, context.n_sequences)


def _head_rows(
    request: PlanRequest, part: HeadPart, n_ctx: int, output_place: int
) -> list[PlanRow]:
    apart = request.draft_places != request.target_places
    place = output_place
    if apart:
        place = request.draft_places[0] if request.draft_places else HOST
    copy = part.output if place != output_place else 0
    return [
        PlanRow(part.title, "weights", {place: part.weights + copy}),
        PlanRow(part.title, "keys and values", {place: part.cells(n_ctx)}),
        PlanRow(part.title, "compute", {place: part.compute(n_ctx)}),
    ]
