"""Layers and context that fit the devices of this machine: -ngl auto and -c 0."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from specrun.bindings.contexts import ContextOptions
from specrun.bindings.errors import (
    DecodeMemoryError,
    ModelLoadError,
    OptionError,
    OutOfMemoryError,
    SpecrunError,
)
from specrun.bindings.gguf import read_header
from specrun.bindings.library import quiet_log
from specrun.bindings.machine import (
    Device,
    Placement,
    available_memory,
    current_placement,
    resolve_placement,
)
from specrun.bindings.memory_breakdown import HOST as HOST_NAME
from specrun.bindings.models import ROLLBACK_ARCHITECTURES
from specrun.runtime.memory.choice import (
    LEAST_CTX,
    Wish,
    alternatives,
    choose_plan,
    plan_line,
    refusal,
    size_text,
    ways_out,
)
from specrun.runtime.memory.count import (
    USUAL_KEPT,
    MemoryCounts,
    ModelPart,
    Part,
    count_on_devices,
    parts_of,
    state_bytes,
)
from specrun.runtime.memory.plan import MemoryPlan, PlanRequest, PlanRow, PlanSettings, count_plan
from specrun.runtime.memory.shape import HOST, memory_device, this_machine

# == GPU offload (-ngl): layers on the GPU, as given or as many as its free memory holds ===========


LayerCount = int | Literal["auto", "all"]
# Of the free memory: the rest is for the KV cache, compute buffers and the display.
_SHARE_FOR_WEIGHTS = 0.75


def parse_layer_count(text: str) -> LayerCount:
    """Return the value of -ngl: a number, "auto" or "all"."""
    if text == "auto":
        return "auto"
    if text == "all":
        return "all"
    try:
        return int(text)
    except ValueError:
        raise OptionError(f"GPU layers is {text!r}: give a number, auto or all") from None


def layer_number(wanted: LayerCount) -> int | None:
    """Return llama.cpp's n_gpu_layers (-1: all) of a setting, None for "auto"."""
    if wanted == "auto":
        return None
    return -1 if wanted == "all" else wanted


def resolve_gpu_layers(wanted: LayerCount, path: Path, *, drafts: bool = False) -> int:
    """Return llama.cpp's n_gpu_layers (-1: all) for a file of a target, or of a drafting model.

    "auto" gives every layer if the weights fit into three quarters of the free memory of the
    devices that are to be used (`placing`), otherwise the share that fits. 0 without a device,
    for any setting.
    """
    placed, given = resolve_placement(current_placement(drafts=drafts)), layer_number(wanted)
    if given is not None:
        if given < -1:
            raise OptionError(f"GPU layers is {given}: give -1 (all), 0 (none) or a count")
        return placed.layers_offloaded(given)
    free = placed.memory_free
    if not free:
        return 0
    header = read_header(path)
    weights = sum(tensor.n_bytes for tensor in header.tensors)
    budget = int(free * _SHARE_FOR_WEIGHTS)
    if weights <= budget:
        return -1
    layers = header.metadata.get(f"{header.architecture}.block_count")
    return budget * layers // weights if isinstance(layers, int) else 0


# == The devices of this machine: -ngl auto and -c 0 ===============================================
#
# The plan is chosen with graphs counted on the CPU. Then llama.cpp counts its devices; if that is
# more, the next plan gets as much less.


logger = logging.getLogger("specrun.memory")

_MOST_CORRECTIONS = 4


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How models are loaded: the cost of evaluations depends on it, and the memory that they take.

    `context` has the settings of contexts, the target's and the draft model's. Layers on the GPU
    are a count, "all" or "auto": as many as fit. `placement` holds where it is put in force
    (`placing`).
    """

    context: ContextOptions = field(default_factory=ContextOptions)
    placement: Placement = field(default_factory=Placement)
    n_gpu_layers: LayerCount = "auto"
    n_gpu_layers_draft: LayerCount = "auto"
    use_mmap: bool = True


@dataclass(frozen=True, slots=True)
class Loading:
    """The files of a runtime and how they are loaded: a plan depends on it. `files` are the demo's.

    Several conversations share a context that is given; one that is chosen is for each of them.
    `n_kept` recurrent states of each are kept for drafts whose length is not given.
    """

    target: Path
    drafter: str
    options: LoadOptions
    files: Mapping[str, Path] = field(default_factory=dict)
    n_texts: int = 1
    n_kept: int = USUAL_KEPT

    @property
    def parts(self) -> list[Part]:
        """The parts that take memory; raises as `parts_of`."""
        context = self.options.context
        return parts_of(self.target, self.drafter, context, self.files, self.n_texts, self.n_kept)

    @property
    def leaves_context(self) -> bool:
        """Whether the context is to be chosen."""
        return self.options.context.n_ctx == 0


@dataclass(frozen=True, slots=True)
class Fitted:
    """A plan that was chosen, and a line about it for users."""

    plan: MemoryPlan
    line: str

    def applied_to(self, loading: Loading) -> Loading:
        """Return how to load by this plan."""
        settings, request = self.plan.settings, self.plan.request
        draft = settings.n_gpu_layers_draft if request.draft_places else 0
        options = replace(
            loading.options,
            context=replace(loading.options.context, n_ctx=settings.n_ctx),
            n_gpu_layers=settings.n_gpu_layers if request.target_places else 0,
            n_gpu_layers_draft=draft,
        )
        return replace(loading, options=options)


def fit_here(loading: Loading) -> Fitted | None:
    """Choose layers and context for the devices in force (`placing`); None: nothing to choose.

    Raises `OutOfMemoryError`, with the numbers and ways out, if the given layers need more than is
    free on a device, or recurrent states more than there is anywhere; `ModelLoadError` for a file
    that llama.cpp cannot load. Returns None for others that cannot be read (opening them fails
    later), and if llama.cpp does not export its counts.
    """
    places = _devices_in_force()
    devices = places[0]
    try:
        _require_states(loading, devices)
        if not devices and not loading.leaves_context:
            return None
        with quiet_log(), MemoryCounts() as counts:
            request = _request(loading, *places)
            wish = _wish(loading, request)
            plan = _confirmed(choose_plan(request, wish, counts), wish, counts)
            _require_room(plan, devices, counts)
    except (ModelLoadError, OutOfMemoryError):
        raise
    except SpecrunError as error:
        logger.info("no memory plan: %s", error)
        return None
    context, layers = wish.n_ctx is None, bool(devices) and wish.n_gpu_layers is None
    if not (context or layers):
        return Fitted(plan, "")
    line = plan_line(plan, chose_context=context, chose_layers=layers)
    logger.info("%s", line)
    # A plan without devices in which everything fits is the expected case.
    expected = not devices and plan.fits and plan.settings.n_ctx >= wish.most_ctx
    return Fitted(plan, "" if expected else line)


@dataclass(frozen=True, slots=True)
class Room:
    """The bytes that a runtime takes by device, and whether it `fits` beside others.

    `refusal` is the reason if it does not even fit alone, with both numbers and the ways out; "":
    it does.
    """

    held: Mapping[str, int]
    fits: bool
    refusal: str = ""


def room_here(loading: Loading, held: Mapping[str, int], free_before: int) -> Room | None:
    """Plan a runtime beside others, which hold so many bytes by device; None: nothing is known.

    It has the layers on devices that it would have alone, and of a context that is to be chosen the
    least. `free_before` is this machine's free memory before the others: their weights are mapped
    files, which count as free.
    """
    places = _devices_in_force()
    try:
        with quiet_log(), MemoryCounts() as counts:
            request = _request(loading, *places)
            here = this_machine()
            beside = held.get(HOST_NAME, 0)
            here = replace(here, free=max(0, min(here.free, free_before - beside)))
            now = replace(request, host=here)
            alone = replace(
                request,
                devices=tuple(
                    replace(each, free=each.free + held.get(each.name, 0))
                    for each in request.devices
                ),
                host=replace(here, free=here.free + beside),
            )
            wish = _wish(loading, alone)
            least = wish.n_ctx or min(LEAST_CTX, wish.most_ctx)
            plan = choose_plan(alone, replace(wish, n_ctx=least), counts)
            own = {HOST_NAME: plan.total(HOST)}
            own |= {each.name: plan.total(place) for place, each in enumerate(request.devices)}
            return Room(own, replace(plan, request=now).fits, _lack(plan, counts))
    except SpecrunError as error:
        logger.info("no memory plan: %s", error)
        return None


def _lack(plan: MemoryPlan, counts: MemoryCounts) -> str:
    """Return the refusal of a plan that needs more than is free somewhere, "" for others."""
    places = [(HOST, plan.request.host), *enumerate(plan.request.devices)]
    for place, device in places:
        if device is not None and device.free and plan.total(place) > device.free:
            return refusal(plan, place, ways_out(plan, counts))
    return ""


def layers_of(path: Path, options: LoadOptions, *, drafts: bool = False) -> int:
    """Return n_gpu_layers (-1: all) of a file with these options, as a target or to draft."""
    wanted = options.n_gpu_layers_draft if drafts else options.n_gpu_layers
    return resolve_gpu_layers(wanted, path, drafts=drafts)


def fitted_here(target: Path, options: LoadOptions, drafter: str = "none") -> LoadOptions:
    """Return the options as a `Runtime` with these files chooses them, its context included.

    For measurements of models that a runtime will use. Without a plan they are the given ones.
    Raises as `fit_here`.
    """
    loading = Loading(target, drafter, options)
    found = fit_here(loading)
    return options if found is None else found.applied_to(loading).options


def layers_here(target: Path, options: LoadOptions, drafter: str = "none") -> int:
    """Return n_gpu_layers (-1: all) of a target, as a `Runtime` chooses them."""
    return layers_of(target, fitted_here(target, options, drafter))


def plan_in_use(loading: Loading) -> str:
    """Return the bytes of a runtime and of smaller settings; "" if they cannot be counted.

    For errors of memory: the free memory of the device is not known then.
    """
    try:
        with quiet_log(), MemoryCounts() as counts:
            request = _request(loading, *_devices_in_force())
            wish = _wish(loading, request)
            settings = PlanSettings(
                wish.n_ctx or wish.most_ctx,
                -1 if wish.n_gpu_layers is None else wish.n_gpu_layers,
                -1 if wish.n_gpu_layers_draft is None else wish.n_gpu_layers_draft,
            )
            return alternatives(count_plan(request, settings, counts), counts)
    except SpecrunError as error:
        logger.info("no memory plan: %s", error)
        return ""


@contextmanager
def noting_plan(loading: Loading) -> Iterator[None]:
    """Note the plan on errors of memory that leave this block."""
    try:
        yield
    except (OutOfMemoryError, DecodeMemoryError) as error:
        note = plan_in_use(loading)
        if note:
            error.add_note(note)
        raise


def _devices_in_force() -> tuple[list[Device], tuple[int, ...], tuple[int, ...]]:
    """Return all devices that layers may go to, and the numbers of the target's and the drafts'."""
    placement = current_placement()
    known: list[Device] = []

    def numbers(chosen: Sequence[Device]) -> tuple[int, ...]:
        for device in chosen:
            if all(device.handle != other.handle for other in known):
                known.append(device)
        handles = [device.handle for device in known]
        return tuple(handles.index(device.handle) for device in chosen)

    target = numbers(resolve_placement(placement).offload)
    draft = numbers(resolve_placement(placement.for_drafts).offload)
    return known, target, draft


def _request(
    loading: Loading, devices: Sequence[Device], target: tuple[int, ...], draft: tuple[int, ...]
) -> PlanRequest:
    placement = current_placement()
    numbers = {device.name.lower(): number for number, device in enumerate(devices)}
    return PlanRequest(
        tuple(loading.parts),
        tuple(memory_device(device) for device in devices),
        target,
        draft,
        placement.tensor_split,
        tuple(
            (pattern, numbers.get(name.strip().lower(), HOST))
            for pattern, name in placement.override_tensors
        ),
        this_machine() if loading.leaves_context else None,
    )


def _wish(loading: Loading, request: PlanRequest) -> Wish:
    options, model = loading.options, request.target.model
    context = options.context

    sizes = [
        context.rope.context_size(wanted, model.n_ctx_train, model.rope_factor)
        for wanted in (context.n_ctx, 0)
    ]
    given = context.n_ctx if request.target.shared else sizes[0]
    return Wish(
        None if loading.leaves_context else given,
        layer_number(options.n_gpu_layers) if request.target_places else 0,
        layer_number(options.n_gpu_layers_draft) if request.draft_places else 0,
        sizes[1],
    )


def _confirmed(plan: MemoryPlan, wish: Wish, counts: MemoryCounts) -> MemoryPlan:
    """Return a plan with llama.cpp's counts on its devices in place of the estimates.

    If they do not fit, and a setting is left to choose, another plan.
    """
    request = plan.request
    for _ in range(_MOST_CORRECTIONS):
        if not request.devices:
            return plan
        counted = _counted(plan)
        if not counted.excess_on_devices or not plan.fits:
            return counted
        devices = tuple(
            replace(device, kept=device.kept + max(0, counted.total(place) - device.budget))
            for place, device in enumerate(counted.request.devices)
        )
        request = replace(request, devices=devices)
        plan = choose_plan(request, wish, counts)
    return _counted(plan)


def _counted(plan: MemoryPlan) -> MemoryPlan:
    request, settings = plan.request, plan.settings
    names = {device.name: place for place, device in enumerate(request.devices)}
    rows = [row for row in plan.rows if row.kind in ("output rows", "checkpoints")]
    known = {part.title for part in request.parts if isinstance(part, ModelPart)}
    rows += [row for row in plan.rows if row.part not in known]
    for part in request.parts:
        if not isinstance(part, ModelPart):
            continue
        layers = settings.layers_of(part)
        found = count_on_devices(part, part.n_ctx(settings.n_ctx), layers)
        for kind, name in (
            ("weights", "weights"),
            ("keys and values", "cells"),
            ("compute", "compute"),
        ):
            places = {
                HOST if device == HOST_NAME else names[device]: getattr(counts, name)
                for device, counts in found.items()
                if device == HOST_NAME or device in names
            }
            rows.append(PlanRow(part.title, kind, places))  # type: ignore[arg-type]
    order = [part.title for part in request.parts]
    rows.sort(key=lambda row: order.index(row.part))
    return replace(plan, rows=tuple(rows))


def state_room(devices: Sequence[Device]) -> int:
    """Return the bytes that are free where recurrent states are to lie."""
    return sum(device.memory_free for device in devices) or available_memory()


def _require_states(loading: Loading, devices: Sequence[Device]) -> None:
    """Raise if there is less memory than the recurrent states that drafts need."""
    target = loading.parts[0]
    if not isinstance(target, ModelPart) or not target.n_rollback:
        return
    if target.model.architecture not in ROLLBACK_ARCHITECTURES:  # it holds one state more
        return
    drafted, n_texts = target.n_rollback, loading.n_texts
    here = devices if loading.options.context.offload_kv else ()
    state, free = state_bytes(loading.target), state_room(here)
    needed = state * n_texts * (1 + drafted)
    if needed <= free:
        return
    whose = f" for each of {n_texts} conversations" if n_texts > 1 else ""
    most = free // max(1, state)
    fewer = [
        f"drafts of at most {most // n_texts - 1} tokens (n={most // n_texts - 1})"
        if most // n_texts > 1
        else "plain decoding (--drafter none)",
        f"{most // (1 + drafted)} conversations (--parallel)"
        if 1 <= most // (1 + drafted) < n_texts
        else "a smaller model",
        "states in this machine's memory (--no-kv-offload)" if here else "fewer programs beside it",
    ]
    raise OutOfMemoryError(
        f"drafts of {drafted} tokens need {1 + drafted} recurrent states{whose}, "
        f"{size_text(needed)} together, and {size_text(free)} are free. "
        f"What helps: {'; '.join(fewer)}"
    )


def _require_room(plan: MemoryPlan, devices: Sequence[Device], counts: MemoryCounts) -> None:
    """Raise if a card of this machine has less memory than a plan needs there."""
    for place, device in enumerate(plan.request.devices):
        needed = plan.total(place)
        # A device that shares this machine's memory may get more than it reports as free.
        if devices[place].kind == "gpu" and device.free and needed > device.free:
            raise OutOfMemoryError(refusal(plan, place, ways_out(plan, counts)))
