"""How wide to look ahead: the paper's model of what it yields, over what this machine charges for it.

Fu et al. (2024), section 4.1. A good speculation of b guesses with g = N - 1 tokens each, accepted with probability a a
token, yields E = (g + 1) - sum_{i=1..g} (1 - a^i)^b tokens with the target's own; one round in f has one. So a round
yields S = (f - 1 + E) / f tokens, where W = G = b. The plan maximises S T(1) / T(n) over W = G, where T is the measured
cost of an evaluation and n its tokens: root, window and guesses. Where nothing exceeds 1, it does not look ahead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from specrun.bindings.errors import OptionError
from specrun.runtime.planning.cost_curves import CostCurve

__all__ = ["LookaheadPlan", "guessed_tokens", "plan_lookahead", "step_compression"]

# Fitted by the paper for LLaMA-2-7B-Chat on MT-Bench (its figure 4).
_ACCEPTANCE = 0.425
_ROUNDS_PER_HIT = 3.106
_WIDEST = 15
_WORTH = 1.02  # a plan must promise more than rounding


@dataclass(frozen=True, slots=True)
class LookaheadPlan:
    """W columns and at most G guesses; `speed_up` is what the model promises, 1 for W = 0 (do not look ahead)."""

    window: int
    guesses: int
    speed_up: float


def guessed_tokens(acceptance: float, n_draft: int, n_guesses: int) -> float:
    """Return E = (g + 1) - sum_{i=1..g} (1 - a^i)^b, the tokens of a round with b guesses of g tokens.

    Fu et al. (2024), equation 4: the longest accepted prefix of independent guesses, and the target's own token. One
    guess gives Leviathan's equation 1.
    """
    if not 0.0 <= acceptance <= 1.0:
        raise OptionError(f"acceptance is {acceptance}: it must be between 0 and 1")
    missed = math.fsum((1.0 - acceptance**length) ** n_guesses for length in range(1, n_draft + 1))
    return n_draft + 1 - missed


def step_compression(acceptance: float, n_draft: int, n_guesses: int, rounds_per_hit: float) -> float:
    """Return S = (f - 1 + E) / f, tokens a round where one round in f has a good speculation (equation 5)."""
    if not rounds_per_hit >= 1.0:
        raise OptionError(f"one good speculation in {rounds_per_hit} rounds: give at least 1")
    return (rounds_per_hit - 1.0 + guessed_tokens(acceptance, n_draft, n_guesses)) / rounds_per_hit


def plan_lookahead(
    curve: CostCurve,
    ngram: int,
    *,
    acceptance: float = _ACCEPTANCE,
    rounds_per_hit: float = _ROUNDS_PER_HIT,
    widest: int = _WIDEST,
) -> LookaheadPlan:
    """Return the W = G of most tokens a second for n-grams of `ngram` tokens; W = 0 where plain decoding wins."""
    best = LookaheadPlan(0, 0, 1.0)
    for width in range(1, widest + 1):
        n_tokens = (ngram - 1) * width + width * (ngram - 1)  # the root is the window's column 0, row 0
        yielded = step_compression(acceptance, ngram - 1, width, rounds_per_hit)
        speed_up = yielded * curve.seconds(1) / curve.seconds(n_tokens)
        if speed_up > max(best.speed_up, _WORTH):
            best = LookaheadPlan(width, width, speed_up)
    return best
