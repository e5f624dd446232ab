"""What the literature reports for the methods, to stand beside what is measured."""

from __future__ import annotations

from collections.abc import Iterable

from specrun.runtime.drafters.expression import Expression, parse_expression

__all__ = ["literature_note"]

# Spec-Bench's leaderboard, RTX 3090, Vicuna-7B, F16, greedy: mean tokens a target evaluation over all six tasks.
_SPEC_BENCH = {
    "prompt-lookup": ("prompt lookup", 1.73),
    "rest": ("REST", 1.63),
    "draft": ("a 68M draft model", 2.28),
    "lookahead": ("lookahead", 1.64),
    "medusa": ("Medusa", 2.32),
    "hydra": ("Hydra", 3.26),
}


def literature_note(drafters: Iterable[str]) -> str | None:
    """Return a sentence with the published mean accepted lengths of the drafters' methods; None if there are none."""
    names = dict.fromkeys(name for one in drafters for name in _names(parse_expression(one)) if name in _SPEC_BENCH)
    if not names:
        return None
    known = ", ".join(f"{method} {length:.2f}" for method, length in map(_SPEC_BENCH.__getitem__, names))
    return f"tok/round in the literature (Spec-Bench, Vicuna-7B, temperature 0, other texts than these): {known}."


def _names(expression: Expression) -> list[str]:
    return [expression.atom, *(name for one in expression.arguments for name in _names(one))]
