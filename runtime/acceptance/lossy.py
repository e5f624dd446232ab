"""Lossy speculative sampling: drafts are accepted up to 1 / (1 - alpha) times too often. NOT exact.

Tran-Thien 2023, and Narasimhan et al. 2024, section 2 and lemma 2; Leviathan et al.'s lenience
(2023, appendix A.5) is beta = 1 - alpha there. With q and p the laws that tokens are drawn from
(appendix C.2: this rule compares the transformed ones), a draft v is accepted with probability

    min(1, p(v) / ((1 - alpha) q(v)))

and else replaced by a draw from norm(max(0, p / beta - q)), for a beta >= 1 - alpha. With
a = min(q, p / (1 - alpha)), what is kept of the drafts, the law of what comes out is

    beta a number:  pi = a + c max(0, p / beta - q),   c such that it sums to 1
    beta = solve:   pi = max(a, p / beta), of the smallest beta for which that sums to 1

which is the law of lemma 2: of all betas the one that makes c = 1. Where a sums to 1 nothing is
rejected, and pi = q (beta is infinite). Where max(0, p / beta - q) is zero although a draft was
rejected, the draw is from p: pi = a + (1 - sum a) p.

Drafts are verified against pi (algorithm 4), which accepts and replaces as above, and in the last
case accepts more often, with the same law. At temperature 0 all of that is the target's own token.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from specrun.bindings.errors import OptionError
from specrun.runtime.acceptance.law_pair import LawPair, PairRule
from specrun.runtime.law import FloatArray, Law, side_by_side

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
