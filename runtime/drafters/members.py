"""What combinators do with all their members."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specrun.runtime.drafters.drafter import Drafter
from specrun.runtime.target import EvaluatedRows

__all__ = ["all_layer_inputs", "close_all", "learn_prompts", "part_reports"]


def close_all(members: Sequence[Drafter]) -> None:
    """Close all members, whatever one of them raises; raises the first error afterwards."""
    error: Exception | None = None
    for member in members:
        try:
            member.close()
        except Exception as one:
            error = error or one
    if error is not None:
        raise error


def all_layer_inputs(members: Sequence[Drafter]) -> tuple[int, ...]:
    """Return the layers whose inputs any of them reads, ascending."""
    return tuple(sorted({layer for member in members for layer in member.layer_inputs}))


def learn_prompts(members: Sequence[Drafter], start: int, rows: EvaluatedRows, count: int) -> None:
    """Show the target's states over a prompt to the members that read them."""
    for member in members:
        if member.reads_target:
            member.learn_prompt(start, rows, count)


def part_reports(members: Sequence[Drafter]) -> dict[str, Any]:
    """Return the reports of the members that have something to say, as {"parts": [{"drafter": name, ...}]}."""
    parts = [{"drafter": member.name, **report} for member in members if (report := member.report())]
    return {"parts": parts} if parts else {}
