"""Speculative cascades: the drafter's law where it is good enough, else the target's. NOT exact.

Narasimhan et al. 2024 (arXiv 2405.19261, algorithm 5). A cascade lets the large model decide where
the small one is not good enough. With Q the drafter's law at a place, P the target's, and a rule
delta(Q, P) in {0, 1} that defers,

    pi = (1 - delta) Q + delta P

and drafts are verified by rejection sampling against pi instead of P (algorithm 4): accepted with
min(1, pi(x) / Q(x)), else replaced by a draw from norm(max(0, pi - Q)). What comes out is exactly
pi, so that more is accepted the more pi is Q. The rules, with m(L) the largest probability of a law
and TV the total variation:

    chow   delta = 1 where m(Q) < 1 - alpha                     (section 3.1)
    diff   delta = 1 where m(Q) < m(P) - alpha                  (section 4.2)
    opt    delta = 1 where m(Q) < m(P) - alpha TV(P, Q)         (section 4.3, equation of r_OPT)
    token  pi(v) = Q(v) (1 - r(v)) + P(v) sum_u r(u) Q(u),      (section 5, V3)
           r(v) = 1 where P(v) < (1 - alpha) m(P)

Where this differs from the paper: the laws are those that tokens are drawn from, temperature,
truncations and penalties included, where the authors compare the laws of temperature 1. At
temperature 0 nothing is to be traded, and the loop asks the exact rule instead
(`DecodeSettings.rule_in_force`): a law alone does not tell whether temperature or a truncation
left it one token. Where nothing was drawn there is no Q: point masses (trees of favourites, text
that was looked up) are verified exactly, and the token after a whole draft is the target's.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from specrun.bindings.errors import OptionError
from specrun.runtime.acceptance.exact import ExactRule
from specrun.runtime.acceptance.rule import Acceptance, LawAt
from specrun.runtime.law import IdArray, Law
from specrun.runtime.noise import NoiseSource
from specrun.runtime.tree import DraftTree

TargetLaw = Callable[[Law, Law, float], Law]
"""From the drafter's law Q, the target's P and alpha to the law pi that drafts face."""


def chow(draft: Law, target: Law, alpha: float) -> Law:
    """Return P where Q is sure of nothing, m(Q) < 1 - alpha; else Q."""
    return target if _largest(draft) < 1.0 - alpha else draft


def diff(draft: Law, target: Law, alpha: float) -> Law:
    """Return P where it is surer than Q by more than alpha; else Q."""
    return target if _largest(draft) < _largest(target) - alpha else draft


def opt(draft: Law, target: Law, alpha: float) -> Law:
    """Return P where m(Q) < m(P) - alpha TV(P, Q), else Q."""
    # P's support is enough: elsewhere P - Q is not positive.
    distance = float(np.maximum(0.0, target.probs - draft.aligned_to(target)).sum())  # TV(P, Q)
    return target if _largest(draft) < _largest(target) - alpha * distance else draft


def token_specific(draft: Law, target: Law, alpha: float) -> Law:
    """Return Q on the tokens that P finds nearly best, plus P times the rest of Q's mass."""
    # pi has mass wherever Q or P has: the support of one of them would lose some.
    ids = _joint_support(draft, target)
    support = Law(np.zeros(len(ids)), ids)
    q, p = draft.aligned_to(support), target.aligned_to(support)
    # r(v) of the paper; the sum of Q over it is the mass that P replaces.
    deferred = p < (1.0 - alpha) * p.max()
    return Law.normalised(np.where(deferred, 0.0, q) + p * q[deferred].sum(), ids)


CASCADES: dict[str, TargetLaw] = {
    "cascade-chow": chow,
    "cascade-diff": diff,
    "cascade-opt": opt,
    "cascade-token": token_specific,
}
"""The rules by the name they have in `--accept`."""


class SpecCascadeRule:
    """Tests drafts against the cascade's law, not `exact`. The larger `alpha`, the fewer defer.

    `kind` is a name of CASCADES.
    """

    exact = False

    def __init__(self, kind: str, alpha: float = 0.1) -> None:
        if not 0.0 <= alpha <= 1.0:
            raise OptionError(f"{kind}: alpha is {alpha:g}: give 0 to 1")
        self.alpha = alpha
        self.name = f"{kind}(alpha={alpha:g})"
        self._target_law = CASCADES[kind]

    def accept(
        self, tree: DraftTree, law_at: LawAt, noise: NoiseSource, position: int
    ) -> Acceptance:
        """Walk down as the exact rule does, with pi for the target's law."""

        def mixed(node: int) -> Law:
            return self._law(tree, node, law_at(node))

        return ExactRule().accept(tree, mixed, noise, position)

    def _law(self, tree: DraftTree, node: int, target: Law) -> Law:
        """Return pi below a node. Of several draws, the first is from Q itself."""
        # Later siblings without replacement come from what the first left of Q.
        draft = next((draw.law for draw in tree.draws.get(node, ()) if draw.law is not None), None)
        return target if draft is None else self._target_law(draft, target, self.alpha)


def _largest(law: Law) -> float:
    return float(law.probs.max())


def _joint_support(law: Law, other: Law) -> IdArray:
    """Return the ids of all tokens of either law, rising."""
    first, second = (
        np.arange(len(law.probs)) if law.ids is None else law.ids for law in (law, other)
    )
    return np.union1d(first, second)
