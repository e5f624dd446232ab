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
                      log m(p) - log p(v) <= tau      (SpecDec, Xia et al. 2023, section 3.2)

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
    LawPair,
    Mask,
    PairRule,
    among_best,
    at_least,
    at_least_of_best,
    entropy,
    joint_support,
    largest,
    total_variation,
)
from specrun.runtime.law import IdArray, Law

Defers = Callable[[LawPair, float], bool]
"""delta of a pair and alpha."""

DEFERRALS: dict[str, Defers] = {
    "cascade-chow": lambda pair, alpha: largest(pair.raw_draft) < 1.0 - alpha,
    "cascade-diff": lambda pair, alpha: _is_surer(pair, alpha),
    "cascade-opt": lambda pair, alpha: _is_surer(pair, alpha * _distance(pair)),
    "cascade-diff-log": lambda pair, alpha: (
        entropy(pair.raw_draft) > entropy(pair.raw_target) + alpha
    ),
    "cascade-opt-log": lambda pair, alpha: (
        entropy(pair.raw_draft) > entropy(pair.raw_target) + alpha * _distance(pair)
    ),
}
"""The rules that decide for all tokens of a place, by the name they have in `--accept`."""

Accepts = Callable[[LawPair, float, IdArray | None], Mask]
"""1 - r of a pair and alpha, for these tokens (None: all)."""

TOKEN_RULES: dict[str, Accepts] = {
    "cascade-token-v1": lambda pair, alpha, ids: at_least(
        pair.raw_draft, largest(pair.raw_target) - alpha, ids
    ),
    "cascade-token-v2": lambda pair, alpha, ids: at_least(
        pair.raw_target, largest(pair.raw_target) - alpha, ids
    ),
    "cascade-token-v3": lambda pair, alpha, ids: at_least_of_best(
        pair.raw_target, 1.0 - alpha, ids
    ),
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
        self._accepts = TOKEN_RULES[kind]

    def law(self, pair: LawPair) -> Law:
        """Return S(q) on the tokens that the rule accepts, plus S(p) times the rest of its mass."""
        return interleaved(pair, lambda ids: self._accepts(pair, self.alpha, ids))


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
        raw = pair.raw_target

        def passes(ids: IdArray | None) -> Mask:
            near = at_least_of_best(raw, math.exp(-self.tau), ids)
            return near & among_best(raw, self.beta, ids)

        return interleaved(pair, passes)


def interleaved(pair: LawPair, accepts: Callable[[IdArray | None], Mask]) -> Law:
    """Return pi(v) = S(q)(v) (1 - r(v)) + S(p)(v) sum_u r(u) S(q)(u), with `accepts` for 1 - r."""
    draft, target = pair.draft, pair.target
    own = accepts(draft.ids)[: len(draft.probs)]
    if own.all():
        return draft
    kept = draft.probs * own
    mass = float(np.add.reduce(kept))
    if mass <= 0.0:
        return target
    # pi has mass wherever S(q) or S(p) has: the support of one of them would lose some.
    ids = joint_support(draft, target)
    # Both parts together have all the mass: nothing is to be scaled.
    if ids is None:
        return Law(kept + (1.0 - mass) * target.probs)
    probs = np.zeros(len(ids))
    probs[_places(draft, ids)] = kept
    probs[_places(target, ids)] += (1.0 - mass) * target.probs
    return Law(probs, ids)


def _places(law: Law, ids: IdArray) -> IdArray | slice:
    """Return where the tokens of a law stand among ids that hold them all."""
    return slice(len(law.probs)) if law.ids is None else ids.searchsorted(law.ids)


def check_alpha(kind: str, alpha: float) -> None:
    """Raise `OptionError` for an alpha outside the range of a rule."""
    if kind in _ANY_ALPHA:
        if not 0.0 <= alpha < math.inf:
            raise OptionError(f"{kind}: alpha is {alpha:g}: give 0 or more")
    elif not 0.0 <= alpha <= 1.0:
        raise OptionError(f"{kind}: alpha is {alpha:g}: give 0 to 1")


def _is_surer(pair: LawPair, margin: float) -> bool:
    """Whether m(q) < m(p) - margin."""
    sure = largest(pair.raw_draft)
    # m(p) is at most 1: where that is not enough, nobody has to work it out.
    return sure < 1.0 - margin and sure < largest(pair.raw_target) - margin


def _distance(pair: LawPair) -> float:
    return total_variation(pair.target, pair.draft)
