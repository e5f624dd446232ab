"""Words of memory plans: the line that says what was chosen, refusals, and what takes less."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specrun.runtime.memory.choice import WayOut, can_quantize
from specrun.runtime.memory.counts import Counts
from specrun.runtime.memory.memory_plan import MemoryPlan, count_plan
from specrun.runtime.memory.parts import HEADS, TARGET
from specrun.runtime.memory.tensor_places import HOST


def size_text(n_bytes: int) -> str:
    """Return a size in binary units with the digits that a plan is good for."""
    if n_bytes < 1 << 20:
        return f"{n_bytes / 1024:.0f} KiB"
    if n_bytes < 1 << 30:
        return f"{n_bytes / 2**20:.0f} MiB"
    return f"{n_bytes / 2**30:.2f} GiB"


def plan_line(plan: MemoryPlan, *, chose_context: bool, chose_layers: bool) -> str:
    """Return what was chosen and why, in a line."""
    request, settings = plan.request, plan.settings
    context = f"{settings.n_ctx:,} tokens of context"
    target = request.target
    if target.n_texts > 1:
        whole = target.n_ctx(settings.n_ctx)
        each = "together" if target.shared else f"each, {whole:,} together"
        context += f" for {target.n_texts} conversations {each}"
    if not request.devices:
        here = request.host
        there = "" if here is None else f" of {size_text(here.free)} free"
        why = "all it was trained for" if settings.n_ctx >= _trained(plan) else "what fits"
        used = size_text(plan.total(HOST))
        if plan.excess:
            why = (
                "the least, and not even that fits: weights are read from the disk again and again"
            )
        return f"memory: {context}, {why}: {used}{there} (-c N chooses another)"
    on_devices = plan.layers_on_devices
    layers = f"all {plan.n_layers} layers"
    if on_devices < plan.n_layers:
        why = ", as many as fit," if chose_layers else ""
        layers = f"{on_devices} of {plan.n_layers} layers{why}"
    names = ", ".join(
        f"{size_text(plan.total(place))} of {size_text(device.free)} free on {device.name}"
        for place, device in enumerate(request.devices)
    )
    if chose_context:
        all_of_it = settings.n_ctx >= _trained(plan)
        context += ", all it was trained for" if all_of_it else ", as much as fits"
    margins = " and ".join(size_text(device.margin) for device in request.devices)
    chosen = [*(["-ngl"] if chose_layers else []), *(["-c"] if chose_context else [])]
    return (
        f"memory: {layers} of the target{_drafts_text(plan)} with {context}: {names}, with a "
        f"margin of {margins} ({', '.join(chosen)} N to choose otherwise)"
    )


def _drafts_text(plan: MemoryPlan) -> str:
    names = [part.title for part in plan.request.parts if part.title != TARGET]
    if not names:
        return ""
    on_devices = plan.settings.n_gpu_layers_draft != 0 or HEADS in names
    there = "" if on_devices else " (in this machine's memory)"
    return f" and the {' and the '.join(dict.fromkeys(names))}{there}"


def _trained(plan: MemoryPlan) -> int:
    return plan.request.target.model.n_ctx_train


def refusal(plan: MemoryPlan, place: int, ways: Sequence[WayOut]) -> str:
    """Return why a plan cannot be had on a device, with both numbers and what could be."""
    device = plan.request.devices[place]
    needed, settings = size_text(plan.total(place)), plan.settings
    problem = (
        f"{plan.layers_on_devices} of {plan.n_layers} layers with {settings.n_ctx:,} tokens of "
        f"context need {needed} on {device.name}, and {size_text(device.free)} are there, of "
        f"which {size_text(device.margin)} are to be left alone"
    )
    if not ways:
        return f"{problem}: use a smaller model"
    return f"{problem}. What fits: {ways_text(ways, place)}"


def ways_text(ways: Sequence[WayOut], place: int) -> str:
    """Return the options that fit, with what each takes."""
    return "; ".join(f"{way.options} ({size_text(way.plan.total(place))})" for way in ways)


def alternatives(plan: MemoryPlan, counts: Counts) -> str:
    """Return what a plan takes by place and part, and what half of each would."""
    request, settings = plan.request, plan.settings
    places = [(HOST, "this machine"), *((n, d.name) for n, d in enumerate(request.devices))]
    lines = []
    for place, name in places:
        rows = [(row, row.by_place.get(place, 0)) for row in plan.rows]
        parts = [f"{row.part} {row.kind} {size_text(n)}" for row, n in rows if n >= 1 << 14]
        if parts:
            lines.append(f"  {name}: {size_text(plan.total(place))} ({', '.join(parts)})")
    scarce = max(range(len(request.devices)), key=lambda place: plan.total(place), default=HOST)
    ways: list[tuple[str, MemoryPlan]] = []
    half = max(256, settings.n_ctx // 512 * 256)
    if half < settings.n_ctx:
        ways.append((f"-c {half}", count_plan(request, replace(settings, n_ctx=half), counts)))
    if can_quantize(request):
        small = count_plan(request.with_cache("q8_0"), settings, counts)
        ways.append(("-ctk q8_0 -ctv q8_0", small))
    if request.devices and plan.layers_on_devices > 0:
        layers = plan.layers_on_devices // 2
        fewer = count_plan(request, replace(settings, n_gpu_layers=layers), counts)
        ways.append((f"-ngl {layers}", fewer))
    head = f"the plan, with {settings.n_ctx:,} tokens of context:"
    less = [(text, other.total(scarce)) for text, other in ways]
    shown = "; ".join(f"{text} takes {size_text(n)}" for text, n in less)
    where = dict(places)[scarce]
    tail = [f"  less on {where}: {shown}"] if shown else []
    return "\n".join([head, *lines, *tail])
