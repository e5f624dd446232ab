"""Fitting a runtime to the devices that are here: -ngl auto and -c 0 by a memory plan.

The plan is chosen with graphs counted on the CPU, then llama.cpp is asked what its devices would
allocate; where that is more, the plan is made anew with as much less.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import DecodeMemoryError, OutOfMemoryError, SpecrunError
from specrun.bindings.library import quiet_log
from specrun.bindings.machine.devices import Device
from specrun.bindings.machine.placement import Placement, current_placement, resolve_placement
from specrun.bindings.memory_breakdown import HOST as HOST_NAME
from specrun.runtime.memory.choice import Wish, choose_plan, ways_out
from specrun.runtime.memory.counts import AskedCounts, Counts, asked_on_devices
from specrun.runtime.memory.memory_device import memory_device, this_machine
from specrun.runtime.memory.memory_plan import (
    MemoryPlan,
    PlanRequest,
    PlanRow,
    PlanSettings,
    count_plan,
)
from specrun.runtime.memory.parts import ModelPart, parts_of
from specrun.runtime.memory.tensor_places import HOST
from specrun.runtime.memory.wording import alternatives, plan_line, refusal
from specrun.runtime.offload import LayerCount, resolve_gpu_layers

logger = logging.getLogger("specrun.memory")

_MOST_CORRECTIONS = 4


@dataclass(frozen=True, slots=True)
class Loading:
    """How a runtime is to be loaded: what a plan needs to know. `files` are the demo's.

    Several conversations share a context that is given; one that is chosen is for each of them.
    """

    target: Path
    drafter: str
    context: ContextOptions
    n_gpu_layers: LayerCount
    n_gpu_layers_draft: LayerCount
    files: Mapping[str, Path]
    n_texts: int = 1

    @property
    def leaves_context(self) -> bool:
        """Whether the context is to be chosen."""
        return self.context.n_ctx == 0


@dataclass(frozen=True, slots=True)
class Fitted:
    """A plan that was chosen, and what it says for users in a line."""

    plan: MemoryPlan
    line: str

    def applied_to(self, loading: Loading) -> Loading:
        """Return how to load by this plan."""
        settings, request = self.plan.settings, self.plan.request
        draft = settings.n_gpu_layers_draft if request.draft_places else 0
        return replace(
            loading,
            context=replace(loading.context, n_ctx=settings.n_ctx),
            n_gpu_layers=settings.n_gpu_layers if request.target_places else 0,
            n_gpu_layers_draft=draft,
        )


def fit_here(loading: Loading) -> Fitted | None:
    """Choose layers and context for the devices in force (`placing`); None: nothing to choose.

    Raises `OutOfMemoryError`, with the numbers and ways out, where layers that were asked for need
    more than is free on a device. Files that cannot be read, and a llama.cpp that does not tell
    what it allocates, are left to those who open them: None.
    """
    devices, target, draft = _devices_in_force()
    if not devices and not loading.leaves_context:
        return None
    try:
        with quiet_log(), AskedCounts() as counts:
            request = _request(loading, devices, target, draft)
            wish = _wish(loading, request)
            plan = _confirmed(choose_plan(request, wish, counts), wish, counts)
            _require_room(plan, devices, counts)
    except OutOfMemoryError:
        raise
    except SpecrunError as error:
        logger.info("no memory plan: %s", error)
        return None
    context, layers = wish.n_ctx is None, bool(devices) and wish.n_gpu_layers is None
    if not (context or layers):
        return Fitted(plan, "")
    line = plan_line(plan, chose_context=context, chose_layers=layers)
    logger.info("%s", line)
    # That all of it fits without a device is what anybody expects.
    expected = not devices and plan.fits and plan.settings.n_ctx >= wish.most_ctx
    return Fitted(plan, "" if expected else line)


def layers_here(
    target: Path,
    context: ContextOptions,
    n_gpu_layers: LayerCount,
    *,
    drafter: str = "none",
    n_gpu_layers_draft: LayerCount = "auto",
) -> tuple[int, LayerCount]:
    """Return n_gpu_layers (-1: all) of a target and of what drafts, as a `Runtime` takes them.

    For what measures models that a runtime will use. Without a plan, the latter is what was asked
    for. Raises as `fit_here`.
    """
    loading = Loading(target, drafter, context, n_gpu_layers, n_gpu_layers_draft, {})
    found = fit_here(loading)
    if found is not None:
        loading = found.applied_to(loading)
    return resolve_gpu_layers(loading.n_gpu_layers, target), loading.n_gpu_layers_draft


def plan_in_use(loading: Loading) -> str:
    """Return what a runtime takes, with what else would take less; "" where it cannot be counted.

    For what ran out of memory: how much a device would have given is not known then.
    """
    try:
        devices, target, draft = _devices_in_force()
        with quiet_log(), AskedCounts() as counts:
            request = _request(loading, devices, target, draft)
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
    parts = parts_of(
        loading.target, loading.drafter, loading.context, loading.files, loading.n_texts
    )
    return PlanRequest(
        tuple(parts),
        tuple(memory_device(device) for device in devices),
        target,
        draft,
        placement.tensor_split,
        _overrides(placement, devices),
        this_machine() if loading.leaves_context else None,
    )


def _overrides(placement: Placement, devices: Sequence[Device]) -> tuple[tuple[str, int], ...]:
    places = {device.name.lower(): number for number, device in enumerate(devices)}
    return tuple(
        (pattern, places.get(name.strip().lower(), HOST))
        for pattern, name in placement.override_tensors
    )


def _wish(loading: Loading, request: PlanRequest) -> Wish:
    context, model = loading.context, request.target.model

    def layers(wanted: LayerCount, places: tuple[int, ...]) -> int | None:
        if not places:
            return 0
        if wanted == "auto":
            return None
        return -1 if wanted == "all" else wanted

    sizes = [
        context.rope.context_size(asked, model.n_ctx_train, model.rope_factor)
        for asked in (context.n_ctx, 0)
    ]
    given = context.n_ctx if request.target.shared else sizes[0]
    return Wish(
        None if loading.leaves_context else given,
        layers(loading.n_gpu_layers, request.target_places),
        layers(loading.n_gpu_layers_draft, request.draft_places),
        sizes[1],
    )


def _confirmed(plan: MemoryPlan, wish: Wish, counts: Counts) -> MemoryPlan:
    """Return a plan with what llama.cpp counts on its devices in place of what was estimated.

    Where that is more than fits, and something is left to choose, another plan.
    """
    request = plan.request
    for _ in range(_MOST_CORRECTIONS):
        if not request.devices:
            return plan
        asked = _asked(plan)
        if not asked.excess_on_devices or not plan.fits:
            return asked
        devices = tuple(
            replace(device, kept=device.kept + max(0, asked.total(place) - device.budget))
            for place, device in enumerate(asked.request.devices)
        )
        request = replace(request, devices=devices)
        plan = choose_plan(request, wish, counts)
    return _asked(plan)


def _asked(plan: MemoryPlan) -> MemoryPlan:
    request, settings = plan.request, plan.settings
    names = {device.name: place for place, device in enumerate(request.devices)}
    rows = [row for row in plan.rows if row.kind == "output rows"]
    known = {part.title for part in request.parts if isinstance(part, ModelPart)}
    rows += [row for row in plan.rows if row.part not in known]
    for part in request.parts:
        if not isinstance(part, ModelPart):
            continue
        layers = settings.n_gpu_layers_draft if part.drafts else settings.n_gpu_layers
        found = asked_on_devices(part, part.n_ctx(settings.n_ctx), layers)
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


def _require_room(plan: MemoryPlan, devices: Sequence[Device], counts: Counts) -> None:
    """Raise where a card of this machine has less than what would lie on it."""
    for place, device in enumerate(plan.request.devices):
        needed = plan.total(place)
        # What shares this machine's memory may get more than it says is free.
        if devices[place].kind == "gpu" and device.free and needed > device.free:
            raise OutOfMemoryError(refusal(plan, place, ways_out(plan, counts)))
