"""The choice of layers and context by memory: -ngl auto and -c 0, and ways out where nothing fits.

Layers go before context: all layers on devices with as much context as fits, at least `LEAST_CTX`
of the trained tokens; where they do not fit so, as many layers as do, and then what is left is
context. Draft models stay on their devices while a layer of the target can give way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from specrun.runtime.memory.cells import STEP
from specrun.runtime.memory.counts import Counts
from specrun.runtime.memory.memory_plan import MemoryPlan, PlanRequest, PlanSettings, count_plan

LEAST_CTX = 4096
"""Tokens of context that come before the last layers, as in llama.cpp's own -fit."""

_MOST_WAYS = 3

_Count = Callable[[int, int, int], MemoryPlan]
"""Counts a plan of so much context, layers of the target on devices, and of drafts."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What was asked for; None is to be chosen, `n_ctx` up to `most_ctx`. -1 layers are all."""

    n_ctx: int | None
    n_gpu_layers: int | None
    n_gpu_layers_draft: int | None
    most_ctx: int


@dataclass(frozen=True, slots=True)
class WayOut:
    """Other settings that fit, with what to write for them."""

    options: str
    plan: MemoryPlan


def choose_plan(request: PlanRequest, wish: Wish, counts: Counts) -> MemoryPlan:
    """Return the plan with the most layers on devices, then the most context, that fits.

    Where nothing fits, the plan that comes nearest, which does not `fit`.
    """
    least = wish.n_ctx or min(LEAST_CTX, wish.most_ctx)
    n_layers = request.target.model.n_layers + 1

    def count(n_ctx: int, layers: int, drafts: int) -> MemoryPlan:
        wanted = -1 if layers >= n_layers else layers
        return count_plan(request, PlanSettings(n_ctx, wanted, drafts), counts)

    best: MemoryPlan | None = None
    for drafts in _draft_choices(request, wish):
        if wish.n_gpu_layers is None:
            layers = _most_layers(least, n_layers, drafts, count)
        else:
            layers = n_layers if wish.n_gpu_layers < 0 else wish.n_gpu_layers
        best = count(least, layers, drafts)
        if not best.excess_on_devices:
            break
    assert best is not None
    if wish.n_ctx is None and best.fits:
        layers, drafts = best.layers_on_devices, best.settings.n_gpu_layers_draft
        best = count(_longest(least, wish.most_ctx, count, layers, drafts), layers, drafts)
    return best


def _most_layers(n_ctx: int, n_layers: int, drafts: int, count: _Count) -> int:
    def fits(layers: int) -> bool:
        return not count(n_ctx, layers, drafts).excess_on_devices

    # A card that has every layer needs no room to take weights over, so the last step may be free.
    return n_layers if fits(n_layers) else max(0, _largest(0, n_layers - 1, fits))


def _draft_choices(request: PlanRequest, wish: Wish) -> list[int]:
    if wish.n_gpu_layers_draft is not None:
        return [wish.n_gpu_layers_draft]
    return [-1, 0] if request.has_drafts else [-1]


def _longest(least: int, most: int, count: _Count, layers: int, drafts: int) -> int:
    """Return the longest context that fits, where the least does."""
    if count(most, layers, drafts).fits:
        return most
    steps = _largest(
        -(-least // STEP), most // STEP, lambda n: count(n * STEP, layers, drafts).fits
    )
    return max(least, steps * STEP)


def _largest(first: int, last: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number of a range that fits, first - 1 where none does.

    What fits is taken to be a beginning of the range.
    """
    low, high = first - 1, last
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def ways_out(plan: MemoryPlan, counts: Counts) -> list[WayOut]:
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

    less = shorter(request)
    if less is not None:
        found.append(WayOut(f"-c {less.settings.n_ctx}", less))
    if can_quantize(request):
        small = request.with_cache("q8_0")
        whole = count_plan(small, settings, counts)
        option = "-ctk q8_0 -ctv q8_0"
        if whole.fits:
            found.append(WayOut(option, whole))
        else:
            quantized = shorter(small)
            if quantized is not None:
                found.append(WayOut(f"{option} -c {quantized.settings.n_ctx}", quantized))
    fewer = _fewer_layers(plan, counts)
    if fewer is not None:
        found.append(WayOut(f"-ngl {fewer.settings.n_gpu_layers}", fewer))
    if len(found) < _MOST_WAYS:
        found += _combined(plan, counts)[: _MOST_WAYS - len(found)]
    return found


def _combined(plan: MemoryPlan, counts: Counts) -> list[WayOut]:
    """Return fewer layers together with less cache, which leaves more of them on devices."""
    variants: list[tuple[str, MemoryPlan]] = []
    n_ctx = min(LEAST_CTX, plan.settings.n_ctx)
    if n_ctx < plan.settings.n_ctx:
        settings = replace(plan.settings, n_ctx=n_ctx)
        variants.append((f"-c {n_ctx}", replace(plan, settings=settings)))
    if can_quantize(plan.request):
        small = plan.request.with_cache("q8_0")
        variants.append(("-ctk q8_0 -ctv q8_0", replace(plan, request=small)))
    found = []
    for options, variant in variants:
        fewer = _fewer_layers(variant, counts)
        if fewer is not None:
            found.append(WayOut(f"{options} -ngl {fewer.settings.n_gpu_layers}", fewer))
    return found


def can_quantize(request: PlanRequest) -> bool:
    """Whether q8_0 would make keys and values smaller, and llama.cpp takes it for them."""
    context, layers = request.target.context, request.target.model.layers
    types = context.cache_type_k, context.cache_type_v
    wide = any(kind in ("f32", "f16", "bf16") for kind in types)
    blocks = all(layer.keys % 32 == 0 and layer.values % 32 == 0 for layer in layers)
    return wide and blocks and context.flash_attention != "off"


def _fewer_layers(plan: MemoryPlan, counts: Counts) -> MemoryPlan | None:
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
