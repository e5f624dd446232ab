"""`specrun inspect --memory`: the fit of a model and its drafter into cards of given sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import OutOfMemoryError
from specrun.cli.options.drafting import draft_kind
from specrun.cli.options.group import Section, option_group
from specrun.cli.options.types import LAYER_COUNT, SIZES
from specrun.cli.terminal.screen import print_table
from specrun.cli.terminal.terminal import Terminal
from specrun.runtime.language import quoted
from specrun.runtime.memory import LayerCount, MemoryCounts, MemoryPlan, PlanRequest, WayOut, Wish

_SECTION = Section("Memory")


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """The sizes of cards in bytes; None without --memory."""

    memory: tuple[int, ...] | None
    gpu_layers_draft: LayerCount


memory_options = option_group(
    "memory",
    MemorySettings,
    _SECTION.option(
        "--memory SIZE,...",
        "What fits into cards with so much memory, such as 8G,12G, none of which has to be here; "
        "cards: 8G,12G,16G,24G. -c, -ngl, -fa, -ctk and -ctv are then those of a chat; without -c "
        "and -ngl the most that fits is chosen.",
        SIZES,
    ),
    _SECTION.option(
        "-ngld, --gpu-layers-draft",
        "Layers of the draft model on the card.",
        LAYER_COUNT,
        default="auto",
    ),
)


@dataclass(frozen=True, slots=True)
class FittedCard:
    """The plan for a card, and ways out if it does not fit."""

    n_bytes: int
    plan: MemoryPlan
    ways: Sequence[WayOut]


def fit_cards(
    target: Path,
    draft: Path | None,
    settings: MemorySettings,
    context: ContextOptions,
    layers: LayerCount,
) -> list[FittedCard]:
    """Return a plan for each size of card; a length of 0 and `layers` "auto" are chosen."""
    from specrun.runtime.memory import (
        MemoryCounts,
        PlanRequest,
        Wish,
        card,
        parts_of,
    )

    drafter = "none" if draft is None else f"{draft_kind(draft)}({quoted(str(draft))})"
    parts = tuple(parts_of(target, drafter, context))
    wish = Wish(
        context.n_ctx or None,
        _number(layers),
        _number(settings.gpu_layers_draft),
        parts[0].model.n_ctx_train,  # type: ignore[union-attr]  # the target is a model
    )
    if wish.n_ctx is not None:
        wish = dataclasses.replace(wish, n_ctx=min(wish.n_ctx, wish.most_ctx))
    with MemoryCounts() as counts:
        return [
            _fit_card(n_bytes, PlanRequest(parts, (card(n_bytes),), (0,), (0,)), wish, counts)
            for n_bytes in settings.memory or ()
        ]


def _fit_card(n_bytes: int, request: PlanRequest, wish: Wish, counts: MemoryCounts) -> FittedCard:
    from specrun.runtime.memory import choose_plan, ways_out

    plan = choose_plan(request, wish, counts)
    return FittedCard(n_bytes, plan, () if plan.fits else ways_out(plan, counts))


def _number(layers: LayerCount) -> int | None:
    if layers == "auto":
        return None
    return -1 if layers == "all" else layers


def wished(comparison_ctx: int, comparison_layers: LayerCount) -> tuple[int, LayerCount]:
    """Return the context and the layers that were given with -c and -ngl: 0 and auto without."""
    context = click.get_current_context()

    def is_given(name: str) -> bool:
        return context.get_parameter_source(name) not in (None, ParameterSource.DEFAULT)

    return (
        comparison_ctx if is_given("ctx_size") else 0,
        comparison_layers if is_given("gpu_layers") else "auto",
    )


# -- shown -----------------------------------------------------------------------------------------


def memory_facts(cards: Sequence[FittedCard]) -> list[dict[str, Any]]:
    """Return the plans ready for JSON: bytes on the card and in this machine's memory."""
    return [
        {
            "memory": fitted.n_bytes,
            "margin": fitted.plan.request.devices[0].margin,
            "fits": fitted.plan.fits,
            "n_ctx": fitted.plan.settings.n_ctx,
            "layers_on_card": fitted.plan.layers_on_devices,
            "layers": fitted.plan.n_layers,
            "draft_on_card": fitted.plan.settings.n_gpu_layers_draft != 0,
            "needed": fitted.plan.total(0),
            "needed_elsewhere": fitted.plan.total(-1),
            "rows": [
                {
                    "part": row.part,
                    "kind": row.kind,
                    "card": row.by_place.get(0, 0),
                    "elsewhere": row.by_place.get(-1, 0),
                }
                for row in fitted.plan.rows
            ],
            "ways_out": [
                {"options": way.options, "needed": way.plan.total(0)} for way in fitted.ways
            ],
        }
        for fitted in cards
    ]


def print_memory(terminal: Terminal, cards: Sequence[FittedCard]) -> None:
    """Print a column for each card, and below it the ways out for cards that are too small."""
    head = ("", *(_card_name(fitted) for fitted in cards))
    print_table(terminal, "what fits, by the card's memory", head, _rows(cards))
    for fitted in cards:
        if not fitted.plan.fits and len(cards) > 1:
            terminal.answer(f"{_card_name(fitted)}: {_refusal(fitted)}\n")


def hint_text(n_ctx: int, layers: LayerCount) -> str:
    """Return how a chat comes to the chosen values, "" if none was chosen."""
    chosen = (["these layers by itself"] if layers == "auto" else []) + (
        [] if n_ctx else ["this context with -c 0"]
    )
    return f"A chat takes {' and '.join(chosen)}." if chosen else ""


def require_fitting(cards: Sequence[FittedCard]) -> None:
    """Raise OutOfMemoryError, with the numbers and ways out, if nothing fits anywhere."""
    if not any(fitted.plan.fits for fitted in cards):
        raise OutOfMemoryError(_refusal(cards[-1]))


def _refusal(fitted: FittedCard) -> str:
    from specrun.runtime.memory import refusal

    return refusal(fitted.plan, 0, fitted.ways)


def _card_name(fitted: FittedCard) -> str:
    gib = fitted.n_bytes / 2**30
    return f"{gib:g} GiB" if gib >= 1 else f"{fitted.n_bytes / 2**20:g} MiB"


def _rows(cards: Sequence[FittedCard]) -> list[list[str]]:
    from specrun.runtime.memory import size_text

    plans = [fitted.plan for fitted in cards]
    rows = [
        ["layers on the card", *map(_layers_text, plans)],
        ["context", *map(_context_text, plans)],
    ]
    if plans[0].request.has_drafts:
        rows.append(
            [
                "draft model on the card",
                *("no" if plan.settings.n_gpu_layers_draft == 0 else "yes" for plan in plans),
            ]
        )
    for number, row in enumerate(plans[0].rows):
        on_card = [plan.rows[number].by_place.get(0, 0) for plan in plans]
        if any(on_card):
            rows.append([f"{row.part}: {row.kind}", *map(size_text, on_card)])
    devices = [plan.request.devices[0] for plan in plans]
    left = [device.budget - plan.total(0) for device, plan in zip(devices, plans, strict=True)]
    rows += [
        ["on the card", *(size_text(plan.total(0)) for plan in plans)],
        ["left alone (margin)", *(size_text(device.margin) for device in devices)],
        ["free", *(size_text(free) if free >= 0 else "does not fit" for free in left)],
        ["in this machine's memory", *(size_text(plan.total(-1)) for plan in plans)],
    ]
    return rows


def _layers_text(plan: MemoryPlan) -> str:
    number = plan.layers_on_devices
    return f"all {number}" if number == plan.n_layers else f"{number} of {plan.n_layers}"


def _context_text(plan: MemoryPlan) -> str:
    n_ctx = plan.settings.n_ctx
    whole = n_ctx >= plan.request.target.model.n_ctx_train
    return f"{n_ctx:,}" + (" (all)" if whole else "")
