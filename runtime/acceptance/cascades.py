"""Rules that mix the drafter's and the target's distributions: cascades, BiLD. NOT exact."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np

from specrun.bindings.errors import OptionError
from specrun.runtime.acceptance.law_pair import (
    Bar,
    LawPair,
    PairAt,
    PairRule,
    among_best,
    at_least,
    at_least_of_best,
    entropy,
    largest,
    total_variation,
)
from specrun.runtime.acceptance.rule import Acceptance
from specrun.runtime.laws.law import FloatArray, Law, side_by_side
from specrun.runtime.laws.noise import NoiseSource
from specrun.runtime.trees.tree import ROOT, DraftTree

# == Speculative cascades ==========================================================================
#
# Narasimhan et al. 2024 (arXiv 2405.19261, algorithm 5). A cascade lets the large model decide
# where the small one is not good enough. With q and p the raw distributions of drafter and target,
# S(q) and S(p) those of which tokens are drawn, and a rule delta(q, p) in {0, 1} that defers
# (appendix C.1),
#
#     pi = (1 - delta) S(q) + delta S(p)
#
# With m(L) the largest probability of a distribution, H its entropy in nats, TV = TV(S(p), S(q)):
#
#     cascade-chow      delta = 1 where m(q) < 1 - alpha                      (section 3.1)
#     cascade-diff      delta = 1 where m(q) < m(p) - alpha                   (section 4.2)
#     cascade-opt       delta = 1 where m(q) < m(p) - alpha TV                (equation of r_OPT)
#     cascade-diff-log  delta = 1 where H(q) > H(p) + alpha                   (appendix D, log loss)
#     cascade-opt-log   delta = 1 where H(q) > H(p) + alpha TV                (appendix D, log loss)
#
# and token by token (section 5, equations 13 to 15), with r(v) in {0, 1} for every token,
#
#     pi(v) = S(q)(v) (1 - r(v)) + S(p)(v) sum_u r(u) S(q)(u)
#
#     cascade-token-v1  r(v) = 1 where q(v) < m(p) - alpha
#     cascade-token-v2  r(v) = 1 where p(v) < m(p) - alpha
#     cascade-token-v3  r(v) = 1 where p(v) < (1 - alpha) m(p)
#     top-beta          r(v) = 1 unless v is one of the beta likeliest tokens of p and
#                       log m(p) - log p(v) <= tau      (SpecDec, Xia et al. 2022, section 3.2)
#
# At temperature 0, S(q) and S(p) are sure of one token each. V3 then accepts v exactly where p(v)
# >= (1 - alpha) m(p), and else takes the likeliest: Leviathan et al.'s lossy variant for greedy
# decoding (lemma 7). r of V2, V3 and top-beta needs no q: at temperature 0 the drafted token may
# stand for S(q), whoever drafted it, and the token after a whole draft is the target's.


Defers = Callable[[LawPair, float], bool]
"""delta of a pair and alpha."""

DEFERRALS: dict[str, Defers] = {
    "cascade-chow": lambda pair, alpha: largest(pair.raw_draft) < 1.0 - alpha,
    "cascade-diff": lambda pair, alpha: _is_surer(pair, alpha),
    "cascade-opt": lambda pair, alpha: _is_surer(pair, alpha * _distance(pair)),
    "cascade-diff-log": lambda pair, alpha: _is_vaguer(pair, alpha),
    "cascade-opt-log": lambda pair, alpha: _is_vaguer(pair, alpha * _distance(pair)),
}
"""The rules that decide for all tokens of a place, by the name they have in `--accept`."""

Bars = Callable[[LawPair, float], Bar]
"""From a pair and alpha to the bar that the tokens with r(v) = 0 reach."""

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
        """Return S(p) if the rule defers, else S(q)."""
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
    """Return pi(v) = S(q)(v) (1 - r(v)) + S(p)(v) sum_u r(u) S(q)(u); r = 0 if v reaches bar."""
    draft, target = pair.draft, pair.target
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


def _is_surer(pair: LawPair, margin: float) -> bool:
    """Whether m(q) < m(p) - margin."""
    return largest(pair.raw_draft) < largest(pair.raw_target) - margin


def _is_vaguer(pair: LawPair, margin: float) -> bool:
    """Whether H(q) > H(p) + margin."""
    return entropy(pair.raw_draft) > entropy(pair.raw_target) + margin


def _below_best(pair: LawPair, law: Law, alpha: float) -> Bar:
    """Return the bar of tokens with a probability of at least m(p) - alpha in `law`."""
    return at_least(law, largest(pair.raw_target) - alpha)


def _distance(pair: LawPair) -> float:
    return total_variation(pair.target, pair.draft)


# == Lossy speculative sampling: accepts up to 1 / (1 - alpha) times too often. NOT exact ==========
#
# Tran-Thien 2023, and Narasimhan et al. 2024, section 2 and lemma 2; Leviathan et al.'s lenience
# (2023, appendix A.5) is beta = 1 - alpha there. With q and p the distributions that tokens are
# drawn from (appendix C.2: this rule compares the transformed ones), a draft v is accepted with
# probability
#
#     min(1, p(v) / ((1 - alpha) q(v)))
#
# and else replaced by a draw from norm(max(0, p / beta - q)), for a beta >= 1 - alpha. With a =
# min(q, p / (1 - alpha)), the accepted part of the drafts, the output's distribution is
#
#     beta a number:  pi = a + c max(0, p / beta - q),   c such that it sums to 1
#     beta = solve:   pi = max(a, p / beta), of the smallest beta for which that sums to 1
#
# which is the distribution of lemma 2: of all betas the one that makes c = 1. If a sums to 1
# nothing is rejected, and pi = q (beta is infinite). If max(0, p / beta - q) is zero although a
# draft was rejected, the draw is from p: pi = a + (1 - sum a) p.
#
# Drafts are verified against pi (algorithm 4), which accepts and replaces as above, and in the last
# case accepts more often, with the same distribution. At temperature 0 all of that is the target's
# own token.


Beta = float | Literal["solve"]


class LossyRule(PairRule):
    """Accepts drafts with min(1, p / ((1 - alpha) q)); `alpha` 0 with beta 1 is exact."""

    reads_raw_draft = False

    def __init__(self, alpha: float = 0.1, beta: Beta = 1.0) -> None:
        if not 0.0 <= alpha < 1.0:
            raise OptionError(f"lossy: alpha is {alpha:g}: give 0 or more, less than 1")
        # Rounding: 1 - 0.9 is a little more than 0.1.
        if beta != "solve" and not 1.0 - alpha - 1e-12 <= beta < math.inf:
            lowest = f"1 - alpha = {1.0 - alpha:g}"
            raise OptionError(f"lossy: beta is {beta:g}: give {lowest} or more, or solve")
        self.alpha, self.beta = alpha, beta
        shown = beta if beta == "solve" else f"{beta:g}"
        self.name = f"lossy(alpha={alpha:g}, beta={shown})"

    def law(self, pair: LawPair) -> Law:
        """Return pi of the module's formula."""
        q, p, ids = side_by_side(pair.draft, pair.target)
        kept = np.minimum(q, p / (1.0 - self.alpha))
        # Nothing is rejected: rounding aside, all of q is kept.
        if not (q > kept).any():
            return pair.draft
        if self.beta == "solve":
            return Law.normalised(np.maximum(kept, p * solved_share(kept, p)), ids)
        left = np.maximum(0.0, p / self.beta - q)
        total = float(left.sum())
        missing = 1.0 - float(kept.sum())
        rest = left * (missing / total) if total > 0.0 else missing * p
        return Law.normalised(kept + rest, ids)


def solved_share(kept: FloatArray, target: FloatArray) -> float:
    """Return t = 1 / beta with sum max(kept, t p) = 1: exactly, in one sort.

    The sum is piecewise linear in t, with corners where t p(v) = kept(v).
    """
    some = target > 0.0
    a, p = kept[some], target[some]
    corners = a / p
    order = corners.argsort()
    a, p, corners = a[order], p[order], corners[order]
    # With the first n tokens at t p, and the others as they are kept.
    below = p.cumsum()
    others = a.sum() - a.cumsum()
    shares = (1.0 - others) / below
    # The sum grows with t: n is right where t lies between its corner and the next one.
    upper = np.append(corners[1:], math.inf)
    fits = np.flatnonzero(shares <= upper)
    return float(shares[fits[0]])


# == The Big Little Decoder (BiLD, Kim et al. 2023) ================================================
#
# NOT exact. Narasimhan et al. 2024 (arXiv 2405.19261), appendix B and table 1, set it beside
# speculative cascades; q and p are raw distributions, S(q) and S(p) those of which tokens are
# drawn.
#
# `bild`, the original: the small model goes on while max q >= fallback, for at most as many tokens
# as its drafter is given. The large one then reads all of them at once and rolls back to the first
# token v whose distance exceeds `rollback`; in its place, or after the last, comes a token of its
# own. The distance of a token is D(v) = -log p(v) in nats: the cross-entropy of the small model's
# tokens, as in the authors' program. So where the small model spoke the distribution is
#
#     pi(v) = S(q)(v) [D(v) <= rollback] + S(p)(v) sum_u S(q)(u) [D(u) > rollback]
#
# and S(p) elsewhere: where it was not sure, after a whole draft, and for an answer's last token.
#
# `bild-star`, the variant of table 1 that rejects by chance, so that it can be compared as a
# distribution:
#
#     pi = S(p) where D(q, p) > rollback, else S(q)
#
# The appendix that names D is not among our sources. Taken here is D(q, p) = -log p(argmax q), the
# distance of the original for the small model's token at temperature 0: it depends
# on both distributions and on nothing that is drawn, as a deferral has to.


class BildRule(PairRule):
    """Rolls back to the first token that the target finds less likely than exp(-rollback).

    `fallback` in [0, 1] ends drafts: see `PairRule.fallback`. `rollback` is in nats. Chains only:
    of siblings it is not known which the small model chose.
    """

    reads_draft = False
    takes_points = True
    chains_only = True

    def __init__(self, fallback: float = 0.6, rollback: float = 3.0) -> None:
        if not 0.0 <= fallback <= 1.0:
            raise OptionError(f"bild: fallback is {fallback:g}: give a probability, 0 to 1")
        _require_distance("bild", rollback)
        self.fallback, self.rollback = fallback, rollback
        self.name = f"bild(fallback={fallback:g}, rollback={rollback:g})"

    def law(self, pair: LawPair) -> Law:
        """Return pi where the small model spoke."""
        least = math.exp(-self.rollback)
        return interleaved(pair, at_least(pair.raw_target, least))

    def accept(
        self, tree: DraftTree, pair_at: PairAt, noise: NoiseSource, position: int
    ) -> Acceptance:
        """Keep the chain up to the first token that is too far off; the next is the target's."""
        path: list[int] = []
        laws: list[tuple[Law, Law]] = []
        node, rejected = ROOT, False
        while True:
            pair, draws = pair_at(node), tree.draws.get(node, ())
            laws.append((self.law(pair) if draws else pair.target, pair.target))
            if draws:
                child = draws[0].node
                bar = at_least(pair.raw_target, math.exp(-self.rollback))
                rejected = not bar.is_reached_by(tree.tokens[child])
            if rejected or not draws:
                noise.seek(position + len(path))
                next_token = noise.choose(pair.target)
                return Acceptance(tuple(path), next_token, rejected, tuple(laws))
            path.append(child)
            node = child


class BildStarRule(PairRule):
    """Defers where the target finds the drafter's favourite less likely than exp(-rollback)."""

    def __init__(self, rollback: float = 3.0) -> None:
        _require_distance("bild-star", rollback)
        self.rollback = rollback
        self.name = f"bild-star(rollback={rollback:g})"

    def law(self, pair: LawPair) -> Law:
        """Return S(p) if D(q, p) exceeds the threshold, else S(q)."""
        favourite, _ = pair.raw_draft.most_likely
        near = at_least(pair.raw_target, math.exp(-self.rollback)).is_reached_by(favourite)
        return pair.draft if near else pair.target


def _require_distance(kind: str, rollback: float) -> None:
    if not 0.0 <= rollback < math.inf:
        raise OptionError(f"{kind}: rollback is {rollback:g}: give 0 nats or more")


# == Rules of the user's own: functions from the two distributions to the distribution pi ==========


LawFunction = Callable[[FloatArray, FloatArray], FloatArray]
"""From S(q) and S(p), of which tokens are drawn, to pi: all [n_vocab], each sums to 1."""

_ROUNDING = 1e-6  # float32 functions are welcome


class UserRule(PairRule):
    """Emits a function of both distributions; `raw` ones are for subclasses of `PairRule`."""

    reads_raw_draft = False

    def __init__(self, name: str, function: LawFunction) -> None:
        self.name, self._function = name, function

    def law(self, pair: LawPair) -> Law:
        """Return the function's distribution; raises `OptionError` if it is none."""
        size = max(_size(pair.draft), _size(pair.target))
        dense = Law(np.zeros(size))
        probs = self._function(pair.draft.aligned_to(dense), pair.target.aligned_to(dense))
        return Law.normalised(self._checked(probs, size))

    def _checked(self, returned: object, size: int) -> FloatArray:
        probs = _numbers(returned)
        if probs is None:
            raise self._no_law(f"{type(returned).__name__} is no array of numbers")
        if probs.shape != (size,):
            raise self._no_law(f"an array of shape {probs.shape}, not ({size},)")
        total = float(probs.sum())
        if not np.isfinite(total):
            raise self._no_law("numbers that are not finite")
        lowest = float(probs.min())
        if lowest < 0.0:
            raise self._no_law(f"a probability of {lowest:g}")
        if abs(total - 1.0) > _ROUNDING:
            raise self._no_law(f"probabilities that sum to {total:g}")
        return probs

    def _no_law(self, what: str) -> OptionError:
        advice = "give probabilities of all tokens that sum to 1"
        return OptionError(f"the rule {self.name!r} returned no distribution, but {what}: {advice}")


def _numbers(returned: object) -> FloatArray | None:
    """Return the result of a function as an array, None if it is none."""
    try:
        probs = np.asarray(returned, dtype=np.float64)
    except (TypeError, ValueError):
        return None
    return probs if probs.ndim else None


def _size(law: Law) -> int:
    return len(law.probs) if law.ids is None else int(law.ids[-1]) + 1
