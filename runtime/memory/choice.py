"""The choice of layers and context by memory, the ways out if nothing fits, and their texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from specrun.bindings.errors import SpecrunError
from specrun.runtime.memory.count import HEADS, STEP, TARGET, MemoryCounts
from specrun.runtime.memory.plan import MemoryPlan, PlanRequest, PlanSettings, count_plan
from specrun.runtime.memory.shape import HOST

# == The choice of layers and context by memory, and ways out if nothing fits ======================
#
# Layers go before context: all layers on devices with as much context as fits, at least `LEAST_CTX`
# of the trained tokens; otherwise as many layers as fit, and the rest of the memory is context.
# Draft models stay on their devices while a layer of the target can give way.


LEAST_CTX = 4096
"""Tokens of context that come before the last layers, as in llama.cpp's own -fit."""

_MOST_WAYS = 3
_QUANTIZED, _LAYERS = "-ctk q8_0 -ctv q8_0", "-ngl {0.n_gpu_layers}"


@dataclass(frozen=True, slots=True)
class Wish:
    """The user's settings; None is to be chosen, `n_ctx` up to `most_ctx`. -1 layers are all."""

    n_ctx: int | None
    n_gpu_layers: int | None
    n_gpu_layers_draft: int | None
    most_ctx: int


@dataclass(frozen=True, slots=True)
class WayOut:
    """Other settings that fit, with the options that set them."""

    options: str
    plan: MemoryPlan


def choose_plan(request: PlanRequest, wish: Wish, counts: MemoryCounts) -> MemoryPlan:
    """Return the plan with the most layers on devices, then the most context, that fits.

    If none fits, the nearest one, which does not `fit`.
    """
    least = wish.n_ctx or min(LEAST_CTX, wish.most_ctx)
    n_layers = request.target.model.n_layers + 1

    def count(n_ctx: int, layers: int, drafts: int) -> MemoryPlan:
        wanted = -1 if layers >= n_layers else layers
        return count_plan(request, PlanSettings(n_ctx, wanted, drafts), counts)

    def most_layers(drafts: int) -> int:
        def fits(layers: int) -> bool:
            return not count(least, layers, drafts).excess_on_devices

        # A card with every layer needs no room to take weights over: the last step may be free.
        return n_layers if fits(n_layers) else max(0, _largest(0, n_layers - 1, fits))

    best: MemoryPlan | None = None
    given = wish.n_gpu_layers_draft
    for drafts in ([-1, 0] if request.has_drafts else [-1]) if given is None else [given]:
        if wish.n_gpu_layers is None:
            layers = most_layers(drafts)
        else:
            layers = n_layers if wish.n_gpu_layers < 0 else wish.n_gpu_layers
        best = count(least, layers, drafts)
        if not best.excess_on_devices:
            break
    assert best is not None
    if wish.n_ctx is None and best.fits:
        layers, drafts = best.layers_on_devices, best.settings.n_gpu_layers_draft
        longest = wish.most_ctx
        if not count(longest, layers, drafts).fits:
            steps = _largest(
                -(-least // STEP), longest // STEP, lambda n: count(n * STEP, layers, drafts).fits
            )
            longest = max(least, steps * STEP)
        best = count(longest, layers, drafts)
    return best


def _largest(first: int, last: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number of a range that fits, first - 1 if none does.

    The numbers that fit are taken to be a beginning of the range.
    """
    low, high = first - 1, last
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def ways_out(plan: MemoryPlan, counts: MemoryCounts) -> list[WayOut]:
    """Return up to three ways to make a plan fit, each counted anew: it fits.

    A smaller context; keys and values of q8_0, with less context if that is needed; fewer layers on
    devices.
    """
    request, settings = plan.request, plan.settings
    found: list[WayOut] = []

    def shorter(request: PlanRequest) -> MemoryPlan | None:
        steps = _largest(
            1,
            max(1, settings.n_ctx // STEP),
            lambda n: count_plan(request, replace(settings, n_ctx=n * STEP), counts).fits,
        )
        n_ctx = min(steps * STEP, settings.n_ctx)
        return count_plan(request, replace(settings, n_ctx=n_ctx), counts) if steps else None

    def add(options: str, fitting: MemoryPlan | None) -> None:
        if fitting is not None and len(found) < _MOST_WAYS:
            found.append(WayOut(options.format(fitting.settings), fitting))

    add("-c {0.n_ctx}", shorter(request))
    small = request.with_cache("q8_0") if can_quantize(request, counts) else None
    if small is not None:
        whole = count_plan(small, settings, counts)
        if whole.fits:
            add(_QUANTIZED, whole)
        else:
            add(f"{_QUANTIZED} -c {{0.n_ctx}}", shorter(small))
    add(_LAYERS, _fewer_layers(plan, counts))
    if len(found) == _MOST_WAYS:
        return found
    # Fewer layers together with less cache, which leaves more of them on devices.
    n_ctx = min(LEAST_CTX, settings.n_ctx)
    if n_ctx < settings.n_ctx:
        less = replace(plan, settings=replace(settings, n_ctx=n_ctx))
        add(f"-c {n_ctx} {_LAYERS}", _fewer_layers(less, counts))
    if small is not None:
        add(f"{_QUANTIZED} {_LAYERS}", _fewer_layers(replace(plan, request=small), counts))
    return found


def can_quantize(request: PlanRequest, counts: MemoryCounts) -> bool:
    """Whether q8_0 would make keys and values smaller, and llama.cpp accepts it for them."""
    context = request.target.context
    wide = {"f32", "f16", "bf16"} & {context.cache_type_k, context.cache_type_v}
    if not wide or context.flash_attention == "off":
        return False
    try:
        counts.cells(request.target.with_cache("q8_0", "q8_0"), STEP)
    except SpecrunError:
        return False
    return True


def _fewer_layers(plan: MemoryPlan, counts: MemoryCounts) -> MemoryPlan | None:
    request, settings = plan.request, plan.settings
    layers = plan.layers_on_devices
    most = _largest(
        0,
        layers - 1,
        lambda n: count_plan(request, replace(settings, n_gpu_layers=n), counts).fits,
    )
    if most < 0 or not request.target_places:
        return None
    return count_plan(request, replace(settings, n_gpu_layers=most), counts)


# == Texts of memory plans: the chosen plan, refusals, and smaller choices =========================


def size_text(n_bytes: int) -> str:
    """Return a size in binary units with the digits that a plan is good for."""
    if n_bytes < 1 << 20:
        return f"{n_bytes / 1024:.0f} KiB"
    if n_bytes < 1 << 30:
        return f"{n_bytes / 2**20:.0f} MiB"
    return f"{n_bytes / 2**30:.2f} GiB"


def plan_line(plan: MemoryPlan, *, chose_context: bool, chose_layers: bool) -> str:
    """Return the chosen settings and the reason, in a line."""
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
    on_devices = plan.settings.drafts_on_devices or HEADS in names
    there = "" if on_devices else " (in this machine's memory)"
    return f" and the {' and the '.join(dict.fromkeys(names))}{there}"


def _trained(plan: MemoryPlan) -> int:
    return plan.request.target.model.n_ctx_train


def refusal(plan: MemoryPlan, place: int, ways: Sequence[WayOut]) -> str:
    """Return why a plan does not fit on a device, with both numbers and the ways out."""
    needed, context = size_text(plan.total(place)), f"{plan.settings.n_ctx:,} tokens of context"
    if place == HOST:
        free = 0 if plan.request.host is None else plan.request.host.free
        problem = f"{context} and the weights need {needed} of this machine's memory"
        problem += f", and {size_text(free)} are free"
    else:
        device = plan.request.devices[place]
        problem = (
            f"{plan.layers_on_devices} of {plan.n_layers} layers with {context} "
            f"need {needed} on {device.name}, and {size_text(device.free)} are there, of "
            f"which {size_text(device.margin)} are to be left alone"
        )
    if not ways:
        return f"{problem}: use a smaller model"
    shown = "; ".join(f"{way.options} ({size_text(way.plan.total(place))})" for way in ways)
    return f"{problem}. What fits: {shown}"


def alternatives(plan: MemoryPlan, counts: MemoryCounts) -> str:
    """Return the bytes of a plan by place and part, and those of halved settings."""
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
    if can_quantize(request, counts):
        small = count_plan(request.with_cache("q8_0"), settings, counts)
        ways.append((_QUANTIZED, small))
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
