"""The memory plan: bytes of each part of a runtime on each device, row by row.

Weights are summed by layer from the header; llama.cpp counts cells and compute buffers of the whole
model on one device (`MemoryCounts`). Every device with layers gets the whole compute buffer. A card
that also computes with this machine's weights needs room for the largest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from specrun.runtime.memory.count import TARGET, HeadPart, MemoryCounts, ModelPart, Part
from specrun.runtime.memory.shape import (
    HOST,
    MemoryDevice,
    layer_places,
    weights_by_place,
)

Kind = Literal["weights", "keys and values", "compute", "output rows", "checkpoints"]
_ROWS_TO_OFFLOAD = 32  # ggml's CUDA backend takes weights over for so many tokens at once


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """Settings of a plan: context and layers on devices (-1: all), of target and of drafts."""

    n_ctx: int
    n_gpu_layers: int
    n_gpu_layers_draft: int = -1

    @property
    def drafts_on_devices(self) -> bool:
        """Whether any layer of a draft model is on a device."""
        return self.n_gpu_layers_draft != 0

    def layers_of(self, part: ModelPart) -> int:
        """Return how many layers of a part are on devices (-1: all)."""
        return self.n_gpu_layers_draft if part.drafts else self.n_gpu_layers


@dataclass(frozen=True, slots=True)
class PlanRow:
    """Bytes of one kind of one part, by place: `HOST` or the number of a device."""

    part: str
    kind: Kind
    by_place: dict[int, int]


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Parts and their possible places: devices by number, for the target and for drafts.

    `shares` are the devices' of the target; none: by their free memory. `overrides` are pairs of a
    pattern and a place. `host` is this machine's memory, None if it does not matter.
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
        parts = (
            part if isinstance(part, HeadPart) else part.with_cache(cache_type, cache_type)
            for part in self.parts
        )
        return replace(self, parts=tuple(parts))


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The counted rows, with their settings."""

    request: PlanRequest
    settings: PlanSettings
    rows: tuple[PlanRow, ...]
    n_layers: int
    """Layers of the target, the output matrix counted as one: as many as can go to devices."""

    def total(self, place: int) -> int:
        """Return the bytes at a place."""
        return sum(row.by_place.get(place, 0) for row in self.rows)

    @property
    def excess(self) -> int:
        """The most bytes by which a budget is overdrawn; 0 if everything fits."""
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


def count_plan(request: PlanRequest, settings: PlanSettings, counts: MemoryCounts) -> MemoryPlan:
    """Count the bytes of all parts with these settings."""
    rows: list[PlanRow] = []
    output_place = HOST
    for part in request.parts:
        if isinstance(part, HeadPart):
            rows += _head_rows(request, part, settings.n_ctx, output_place)
            continue
        places = _places(request, part, settings, rows)
        rows += _model_rows(request, part, places, part.n_ctx(settings.n_ctx), counts)
        if part.title == TARGET:
            output_place = places[-1]
    return MemoryPlan(request, settings, tuple(rows), request.target.model.n_layers + 1)


def _model_rows(
    request: PlanRequest, part: ModelPart, places: Sequence[int], n_ctx: int, counts: MemoryCounts
) -> list[PlanRow]:
    overrides = () if part.drafts else request.overrides
    weights = weights_by_place(part.model, places, overrides, load_nextn=part.nextn)
    cells: dict[int, int] = {}
    whole = 0
    for nextn in part.contexts:
        of_layers = counts.cells(part, n_ctx, nextn=nextn)
        for place, n_bytes in zip(places, of_layers, strict=False):
            own = place if part.context.offload_kv else HOST
            cells[own] = cells.get(own, 0) + n_bytes
        whole += counts.compute(part, n_ctx, nextn=nextn)
    lent = counts.lent(part)
    cells[HOST] = cells.get(HOST, 0) + lent.cells
    whole += lent.compute
    by_place = weights.by_place
    if places[-1] == HOST:  # some models have a second copy of their embeddings there
        here = (HOST,) * len(places)
        listed = weights_by_place(part.model, here, load_nextn=part.nextn).by_place[HOST]
        by_place[HOST] = by_place.get(HOST, 0) + counts.weights(part) - listed
    # Graphs, their inputs, and weights that are copied to a card.
    context = part.context
    tokens = min(context.n_ubatch, context.n_batch, n_ctx)
    mask = 2 if context.flash_attention != "off" else 4
    inputs = tokens * (n_ctx * mask + 2 * 4 * part.model.n_embd)
    compute = {HOST: whole if weights.computes_here else inputs}
    mine = request.draft_places if part.drafts else request.target_places
    for place in mine:
        device = request.devices[place]
        copied = 0
        if device.takes_weights and place == mine[0]:
            with_output = context.n_outputs >= _ROWS_TO_OFFLOAD
            copied = weights.largest if with_output else weights.largest_layer
        if place in places or copied:
            widened = _widened_cells(part, n_ctx, counts) if device.widens_cells else 0
            compute[place] = whole + copied + widened
    width = part.model.n_vocab + (part.model.n_embd if context.hidden_states else 0)
    n_rows = max(context.n_outputs, context.n_sequences)
    rows = [
        PlanRow(part.title, "weights", by_place),
        PlanRow(part.title, "keys and values", cells),
        PlanRow(part.title, "compute", compute),
        # Logits and states that are read after an evaluation.
        PlanRow(part.title, "output rows", {HOST: 4 * width * n_rows}),
    ]
    if any(part.model.states):  # as much as they may take
        rows.append(PlanRow(part.title, "checkpoints", {HOST: part.context.checkpoint_memory}))
    return rows


def _places(
    request: PlanRequest, part: ModelPart, settings: PlanSettings, before: Sequence[PlanRow]
) -> tuple[int, ...]:
    """Return the places of layers and output, in the plan's numbers of devices."""
    mine = request.draft_places if part.drafts else request.target_places
    wanted = settings.layers_of(part)
    shares = () if part.drafts else request.shares

    def left(place: int) -> float:
        used = sum(row.by_place.get(place, 0) for row in before)
        return float(max(0, request.devices[place].free - used))

    shares = shares or tuple(left(place) for place in mine)
    if shares and not any(shares):
        shares = (1.0,) * len(mine)
    found = layer_places(part.model.n_layers, wanted, shares)
    return tuple(HOST if place == HOST else mine[place] for place in found)


def _widened_cells(part: ModelPart, n_ctx: int, counts: MemoryCounts) -> int:
    """Return the bytes of F16 copies of one layer's keys and values that are of another type.

    The largest layer's: a copy lives no longer than its layer is computed.
    """
    types = part.context.cache_type_k, part.context.cache_type_v
    if part.context.flash_attention == "off" or types == ("f16", "f16"):
        return 0
    f16 = part.with_cache("f16", "f16")
    # F32 takes as much more than F16 as a copy in F16.
    wider = part.with_cache(*("f16" if kind == "f16" else "f32" for kind in types))
    pairs = zip(counts.cells(wider, n_ctx), counts.cells(f16, n_ctx), strict=True)
    return max(more - less for more, less in pairs)


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
