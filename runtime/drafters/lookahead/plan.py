"""The window of lookahead decoding: how wide it is planned, and when it is closed.

The plan is the paper's model of the yield over this machine's costs:

Fu et al. (2024), section 4.1. A good speculation of b guesses with g = N - 1 tokens each, accepted
with probability a a token, yields E = (g + 1) - sum_{i=1..g} (1 - a^i)^b tokens with the target's
own; one round in f has one. So a round yields S = (f - 1 + E) / f tokens, where W = G = b. The plan
maximises S T(1) / T(n) over W = G, where T is the measured cost of an evaluation and n its tokens:
root, window and guesses. Where nothing exceeds 1, it does not look ahead.

While decoding, a `WindowGuard` lets the window borrow only so much time before it has to pay. The
window's cost in a round is what the curve charges for its nodes beside the guesses; its gain is the
accepted tokens that no other source of n-grams knew. Both are counted in tokens of plain decoding.
The window is closed where the debt exceeds a credit that grows with the text, and opened again when
the grown credit covers twice the debt; so the whole loss is bounded by `_CREDIT` tokens and
`_SHARE` of the text. Nothing is timed: the same text closes it at the same place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from specrun.bindings.errors import OptionError
from specrun.runtime.costs import CostCurve

# Fitted by the paper for LLaMA-2-7B-Chat on MT-Bench (its figure 4).
_ACCEPTANCE = 0.425
_ROUNDS_PER_HIT = 3.106
_WIDEST = 15
_WORTH = 1.02  # a plan must promise more than rounding


@dataclass(frozen=True, slots=True)
class LookaheadPlan:
    """W columns, at most G guesses and the promised speed-up; W = 0 does not look ahead."""

    window: int
    guesses: int
    speed_up: float


def guessed_tokens(acceptance: float, n_draft: int, n_guesses: int) -> float:
    """Return E = (g + 1) - sum_{i=1..g} (1 - a^i)^b: tokens of a round with b guesses of g tokens.

    Fu et al. (2024), equation 4: the longest accepted prefix of independent guesses, and the
    target's own token. One guess gives Leviathan's equation 1.
    """
    if not 0.0 <= acceptance <= 1.0:
        raise OptionError(f"acceptance is {acceptance}: it must be between 0 and 1")
    # For small a the terms are near 1, and their sum is subtracted from g + 1: hence fsum.
    missed = math.fsum((1.0 - acceptance**length) ** n_guesses for length in range(1, n_draft + 1))
    return n_draft + 1 - missed


def step_compression(
    acceptance: float, n_draft: int, n_guesses: int, rounds_per_hit: float
) -> float:
    """Return S = (f - 1 + E) / f: tokens a round if one in f guesses well (equation 5)."""
    # Written so that NaN is refused too.
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
    """Return the W = G of most tokens a second; W = 0 where plain decoding wins."""
    best = LookaheadPlan(0, 0, 1.0)
    for width in range(1, widest + 1):
        # Window and guesses; the root is the window's column 0 of row 0.
        n_tokens = 2 * width * (ngram - 1)
        yielded = step_compression(acceptance, ngram - 1, width, rounds_per_hit)
        speed_up = yielded * curve.seconds(1) / curve.seconds(n_tokens)
        # Strictly more, so that of equal plans the narrowest is kept.
        if speed_up > max(best.speed_up, _WORTH):
            best = LookaheadPlan(width, width, speed_up)
    return best


_CREDIT = 8.0  # tokens of plain decoding that a window may cost at first
_SHARE = 0.02  # of all tokens, which it may cost beside them


class WindowGuard:
    """Opens and closes a window by its debt."""

    def __init__(self, curve: CostCurve) -> None:
        self._curve = curve
        self.forget()

    def forget(self) -> None:
        """Return to the first credit."""
        self.debt = 0.0
        self.is_open = True
        self._n_tokens = 0

    def count(self, n_guessed: int, n_window: int, gained: int, n_tokens: int) -> None:
        """Count a round of so many nodes and `n_tokens`, `gained` of them thanks to the window."""
        curve, without = self._curve, 1 + n_guessed
        self._n_tokens += n_tokens
        cost = curve.seconds(without + n_window) - curve.seconds(without) if n_window else 0.0
        # What was earned long ago does not pay for a window that earns no more.
        self.debt = max(self.debt + cost / curve.seconds(1) - gained, -_CREDIT)
        credit = _CREDIT + _SHARE * self._n_tokens
        # Half the credit to open again: else the window would flap at the limit.
        self.is_open = self.debt <= (credit if self.is_open else credit / 2.0)
