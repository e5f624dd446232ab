"""`specrun inspect --memory`: the fit of a model and its drafter into cards of given sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from specrun.bindings.contexts.context_options import ContextOptions
from specrun.cli.options.drafting import draft_kind
from specrun.cli.terminal.screen import print_table
from specrun.cli.terminal.terminal import Terminal
from specrun.runtime.language import quoted
from specrun.runtime.memory import (
    LayerCount,
    MemoryCounts,
    MemoryPlan,
    PlanRequest,
    WayOut,
    Wish,
    card,
    choose_plan,
    layer_number,
    parts_of,
    refusal,
    size_text,
    ways_out,
)

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class FittedCard:
    """The plan for a card, and ways out if it does not fit."""

    n_bytes: int
    plan: MemoryPlan
    ways: Sequence[WayOut]

    @property
    def name(self) -> str:
        """The memory of the card."""
        gib = self.n_bytes / 2**30
        return f"{gib:g} GiB" if gib >= 1 else f"{self.n_bytes / 2**20:g} MiB"

    @property
    def refusal(self) -> str:
        """Why the plan does not fit, with the numbers and ways out."""
        return refusal(self.plan, 0, self.ways)


def fit_cards(
    target: Path,
    draft: Path | None,
    sizes: Sequence[int],
    context: ContextOptions,
    layers: LayerCount,
    layers_draft: LayerCount,
) -> list[FittedCard]:
    """Return a plan for each size of card; a length of 0 and `layers` "auto" are chosen."""
    drafter = "none" if draft is None else f"{draft_kind(draft)}({quoted(str(draft))})"
    parts = tuple(parts_of(target, drafter, context))
    wish = Wish(
        context.n_ctx or None,
        layer_number(layers),
        layer_number(layers_draft),
        parts[0].model.n_ctx_train,  # type: ignore[union-attr]  # the target is a model
    )
    if wish.n_ctx is not None:
        wish = dataclasses.replace(wish, n_ctx=min(wish.n_ctx, wish.most_ctx))
    cards = []
    with MemoryCounts() as counts:
        for n_bytes in sizes:
            plan = choose_plan(PlanRequest(parts, (card(n_bytes),), (0,), (0,)), wish, counts)
            ways = () if plan.fits else ways_out(plan, counts)
            cards.append(FittedCard(n_bytes, plan, ways))
    return cards


def asked_or(default: Value, name: str, value: Value) -> Value:
    """Return the value of the option `name` if it was given, otherwise `default`."""
    source = click.get_current_context().get_parameter_source(name)
    return default if source in (None, ParameterSource.DEFAULT) else value


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
            "draft_on_card": fitted.plan.settings.drafts_on_devices,
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
    head = ("", *(fitted.name for fitted in cards))
    print_table(terminal, "parts that fit, by the card's memory", head, _rows(cards))
    for fitted in cards:
        if not fitted.plan.fits and len(cards) > 1:
            terminal.answer(f"{fitted.name}: {fitted.refusal}\n")


def _rows(cards: Sequence[FittedCard]) -> list[list[str]]:
    plans = [fitted.plan for fitted in cards]
    trained = plans[0].request.target.model.n_ctx_train
    layers = [(plan.layers_on_devices, plan.n_layers) for plan in plans]
    lengths = [plan.settings.n_ctx for plan in plans]
    rows = [
        ["layers on the card", *(f"all {n}" if n == of else f"{n} of {of}" for n, of in layers)],
        ["context", *(f"{n:,}{' (all)' * (n >= trained)}" for n in lengths)],
    ]
    if plans[0].request.has_drafts:
        drafts = ("yes" if plan.settings.drafts_on_devices else "no" for plan in plans)
        rows.append(["draft model on the card", *drafts])
    for number, row in enumerate(plans[0].rows):
        on_card = [plan.rows[number].by_place.get(0, 0) for plan in plans]
        if any(on_card):
            rows.append([f"{row.part}: {row.kind}", *map(size_text, on_card)])
    devices = [plan.request.devices[0] for plan in plans]
    left = [device.budget - plan.total(0) for device, plan in zip(devices, plans, strict=True)]
    rows += [
        ["on the card", *(size_text(plan.total(0)) for plan in plans)],
        ["left free (margin)", *(size_text(device.margin) for device in devices)],
        ["free", *(size_text(free) if free >= 0 else "does not fit" for free in left)],
        ["in this machine's memory", *(size_text(plan.total(-1)) for plan in plans)],
    ]
    return rows
