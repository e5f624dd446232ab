"""Speculative cascades: the drafter's law where it is good enough, else the target's. NOT exact.

Narasimhan et al. 2024 (arXiv 2405.19261, algorithm 5). A cascade lets the large model decide where
the small one is not good enough. With q and p the raw laws of drafter and target, S(q) and S(p)
what tokens are drawn from, and a rule delta(q, p) in {0, 1} that defers (appendix C.1),

    pi = (1 - delta) S(q) + delta S(p)

With m(L) the largest probability of a law, H its entropy in nats, TV = TV(S(p), S(q)):

    cascade-chow      delta = 1 where m(q) < 1 - alpha                      (section 3.1)
    cascade-diff      delta = 1 where m(q) < m(p) - alpha                   (section 4.2)
    cascade-opt       delta = 1 where m(q) < m(p) - alpha TV                (equation of r_OPT)
    cascade-diff-log  delta = 1 where H(q) > H(p) + alpha                   (appendix D, log loss)
    cascade-opt-log   delta = 1 where H(q) > H(p) + alpha TV                (appendix D, log loss)

and token by token (section 5, equations 13 to 15), with r(v) in {0, 1} for every token,

    pi(v) = S(q)(v) (1 - r(v)) + S(p)(v) sum_u r(u) S(q)(u)

    cascade-token-v1  r(v) = 1 where q(v) < m(p) - alpha
    cascade-token-v2  r(v) = 1 where p(v) < m(p) - alpha
    cascade-token-v3  r(v) = 1 where p(v) < (1 - alpha) m(p)
    top-beta          r(v) = 1 unless v is one of the beta likeliest tokens of p and
                      log m(p) - log p(v) <= tau      (SpecDec, Xia et al. 2022, section 3.2)

At temperature 0, S(q) and S(p) are sure of one token each. V3 then accepts v exactly where
p(v) >= (1 - alpha) m(p), and else takes the likeliest: Leviathan et al.'s lossy variant for greedy
decoding (lemma 7). r of V2, V3 and top-beta needs no q: at temperature 0 the drafted token may
stand for S(q), whoever drafted it, and the token after a whole draft is the target's.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from specrun.bindings.errors import OptionError
from specrun.runtime.acceptance.law_pair import (
    Bar,
    LawPair,
    PairRule,
    RawLaw,
    among_best,
    at_least,
    at_least_of_best,
    entropy,
    entropy_between,
    largest,
    largest_between,
    total_variation,
)
from specrun.runtime.compiled import LOOPS
from specrun.runtime.law import Law, side_by_side

Defers = Callable[[LawPair, float], bool]
"""delta of a pair and alpha."""

DEFERRALS: dict[str, Defers] = {
    "cascade-chow": lambda pair, alpha: _is_unsure(pair, 1.0 - alpha),
    "cascade-diff": lambda pair, alpha: _is_surer(pair, alpha),
    "cascade-opt": lambda pair, alpha: _is_surer(pair, alpha * _distance(pair)),
    "cascade-diff-log": lambda pair, alpha: _is_vaguer(pair, alpha),
    "cascade-opt-log": lambda pair, alpha: _is_vaguer(pair, alpha * _distance(pair)),
}
"""The rules that decide for all tokens of a place, by the name they have in `--accept`."""

Bars = Callable[[LawPair, float], Bar]
"""From a pair and alpha to what the tokens with r(v) = 0 reach."""

TOKEN_RULES: dict[str, Bars] = {
    "cascade-token-v1": lambda pair, alpha: _below_best(pair, pair.raw_draft, alpha),
    "cascade-token-v2": lambda pair, alpha: _below_best(pair, pair.raw_target, alpha),
    "cascade-token-v3": lambda pair, alpha: at_least_of_best(pair.raw_target, 1.0 - alpha),
}
"""The rules that decide for each token, by the name they have in `--accept`."""

_ANY_ALPHA = ("cascade-opt", "cascade-diff-log", "cascade-opt-log")
"""Where alpha weighs a distance, or is in nats: it may exceed 1."""


class SpecCascadeRule(PairRule):
    """Defers to the target for a whole place; the larger `alpha`, the fewer places.

    `kind` is a name of DEFERRALS.
    """

    def __init__(self, kind: str, alpha: float = 0.1) -> None:
        check_alpha(kind, alpha)
        self.alpha = alpha
        self.name = f"{kind}(alpha={alpha:g})"
        self._defers = DEFERRALS[kind]

    def law(self, pair: LawPair) -> Law:
        """Return S(p) where the rule defers, else S(q)."""
        return pair.target if self._defers(pair, self.alpha) else pair.draft


class TokenCascadeRule(PairRule):
    """Defers to the target for single tokens; the larger `alpha`, the fewer tokens.

    `kind` is a name of TOKEN_RULES.
    """

    def __init__(self, kind: str, alpha: float = 0.1) -> None:
        check_alpha(kind, alpha)
        self.alpha = alpha
        self.name = f"{kind}(alpha={alpha:g})"
        self.reads_raw_draft = kind == "cascade-token-v1"
        self.takes_points = not self.reads_raw_draft
        self._bar = TOKEN_RULES[kind]

    def law(self, pair: LawPair) -> Law:
        """Return S(q) on the tokens that the rule accepts, plus S(p) times the rest of its mass."""
        return interleaved(pair, self._bar(pair, self.alpha))


class TopBetaRule(PairRule):
    """SpecDec's test: among the `beta` likeliest, and within `tau` nats of the likeliest token."""

    reads_raw_draft = False
    takes_points = True

    def __init__(self, beta: int = 3, tau: float = 1.0) -> None:
        if beta < 1:
            raise OptionError(f"top-beta: beta is {beta}: give 1 or more tokens")
        if not tau >= 0.0:
            raise OptionError(f"top-beta: tau is {tau:g}: give 0 nats or more")
        self.beta, self.tau = beta, tau
        self.name = f"top-beta(beta={beta}, tau={tau:g})"

    def law(self, pair: LawPair) -> Law:
        """Return S(q) on the tokens that pass, plus S(p) times the rest of its mass."""
        near = at_least_of_best(pair.raw_target, math.exp(-self.tau))
        best = among_best(pair.raw_target, self.beta)
        return interleaved(pair, max(near, best, key=lambda bar: bar.lowest))


def interleaved(pair: LawPair, bar: Bar) -> Law:
    """Return pi(v) = S(q)(v) (1 - r(v)) + S(p)(v) sum_u r(u) S(q)(u); r = 0 of what reaches bar."""
    draft, target = pair.draft, pair.target
    if LOOPS is not None and draft.ids is not None and target.ids is not None:
        row = bar.law.row if isinstance(bar.law, RawLaw) else None
        if row is not None and row.dtype == np.float32:
            room = len(draft.ids) + len(target.ids)
            probs, ids = np.empty(room), np.empty(room, np.intp)
            n = LOOPS.interleave(
                row, bar.lowest, draft.probs, draft.ids, target.probs, target.ids, probs, ids
            )
            return Law(probs[:n], ids[:n]) if n > 0 else target if n == 0 else draft
    own = bar.reached_by(draft.ids)[: len(draft.probs)]
    if own.all():
        return draft
    kept = draft.probs * own
    mass = float(np.add.reduce(kept))
    if mass <= 0.0:
        return target
    # pi has mass wherever S(q) or S(p) has: the support of one of them would lose some. Both parts
    # together have all the mass: nothing is to be scaled.
    drafts, targets, support = side_by_side(Law(kept, draft.ids), target)
    return Law(drafts + (1.0 - mass) * targets, support)


def check_alpha(kind: str, alpha: float) -> None:
    """Raise `OptionError` for an alpha outside the range of a rule."""
    if kind in _ANY_ALPHA:
        if not 0.0 <= alpha < math.inf:
            raise OptionError(f"{kind}: alpha is {alpha:g}: give 0 or more")
    elif not 0.0 <= alpha <= 1.0:
        raise OptionError(f"{kind}: alpha is {alpha:g}: give 0 to 1")


# A sum of exponentials over the vocabulary is the most that these cost: where rough sums settle
# what is asked, with bounds of their error, the others are not made. The answer is the same.


def _is_unsure(pair: LawPair, least: float) -> bool:
    """Whether m(q) < least."""
    low, high = largest_between(pair.raw_draft)
    return high < least or (low < least and largest(pair.raw_draft) < least)


def _is_surer(pair: LawPair, margin: float) -> bool:
    """Whether m(q) < m(p) - margin."""
    low, high = largest_between(pair.raw_target)
    if high - margin <= 0.0:
        return False
    least, most = largest_between(pair.raw_draft)
    if most < low - margin:
        return True
    if least >= high - margin:
        return False
    return largest(pair.raw_draft) < largest(pair.raw_target) - margin


def _is_vaguer(pair: LawPair, margin: float) -> bool:
    """Whether H(q) > H(p) + margin."""
    low, high = entropy_between(pair.raw_target)
    least, most = entropy_between(pair.raw_draft)
    if least > high + margin:
        return True
    if most <= low + margin:
        return False
    return entropy(pair.raw_draft) > entropy(pair.raw_target) + margin


def _below_best(pair: LawPair, law: Law, alpha: float) -> Bar:
    """Return what tokens of a probability of at least m(p) - alpha in `law` reach."""
    if largest_between(pair.raw_target)[1] <= alpha:
        return at_least(law, 0.0)
    return at_least(law, largest(pair.raw_target) - alpha)


def _distance(pair: LawPair) -> float:
    return total_variation(pair.target, pair.draft)
