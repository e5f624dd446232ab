"""What combinators do with all their members."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specrun.runtime.drafters.drafter import Drafter
from specrun.runtime.target import EvaluatedRows

__all__ = ["close_all", "learn_prompts", "part_reports"]


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


def learn_prompts(members: Sequence[Drafter], start: int, rows: EvaluatedRows, count: int) -> None:
    """Show a prompt's hidden states to the members that read them."""
    for member in members:
        if member.needs_hidden_states or member.needs_nextn_states:
            member.learn_prompt(start, rows, count)


def part_reports(members: Sequence[Drafter]) -> dict[str, Any]:
    """Return the reports of the members that have something to say, as {"parts": [{"drafter": name, ...}]}."""
    parts = [{"drafter": member.name, **report} for member in members if (report := member.report())]
    return {"parts": parts} if parts else {}
