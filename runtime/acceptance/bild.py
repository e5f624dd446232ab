"""The Big Little Decoder (BiLD, Kim et al. 2023): the large model corrects the small one's text.

NOT exact. Narasimhan et al. 2024 (arXiv 2405.19261), appendix B and table 1, set it beside
speculative cascades; q and p are raw laws, S(q) and S(p) what tokens are drawn from.

`bild`, the original: the small model goes on while max q >= fallback, for at most as many tokens as
its drafter is given. The large one then reads all of them at once and rolls back to the first token
v whose distance exceeds `rollback`; in its place, or after the last, comes a token of its own. The
distance of a token is D(v) = -log p(v) in nats: the cross-entropy of what the small model said, as
in the authors' program. So where the small model spoke the law is

    pi(v) = S(q)(v) [D(v) <= rollback] + S(p)(v) sum_u S(q)(u) [D(u) > rollback]

and S(p) elsewhere: where it was not sure, after a whole draft, and for an answer's last token.

`bild-star`, the variant of table 1 that rejects by chance, so that it can be compared as a law:

    pi = S(p) where D(q, p) > rollback, else S(q)

The appendix that names D is not among our sources. Taken here is D(q, p) = -log p(argmax q), the
distance of the original for the token that the small model would say at temperature 0: it depends
on both laws and on nothing that is drawn, as a deferral has to.
"""

from __future__ import annotations

import math

from specrun.bindings.errors import OptionError
from specrun.runtime.acceptance.law_pair import LawPair, PairAt, PairRule, at_least
from specrun.runtime.acceptance.rule import Acceptance
from specrun.runtime.acceptance.spec_cascade import interleaved
from specrun.runtime.law import Law
from specrun.runtime.noise import NoiseSource
from specrun.runtime.tree import ROOT, DraftTree


class BildRule(PairRule):
    """Rolls back to the first token that the target finds less likely than exp(-rollback).

    `fallback` in [0, 1] ends drafts: see `PairRule.fallback`. `rollback` is in nats. Chains only:
    of siblings nobody says which the small model said.
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
        """Return S(p) where D(q, p) exceeds the threshold, else S(q)."""
        favourite, _ = pair.raw_draft.most_likely
        near = at_least(pair.raw_target, math.exp(-self.rollback)).is_reached_by(favourite)
        return pair.draft if near else pair.target


def _require_distance(kind: str, rollback: float) -> None:
    if not 0.0 <= rollback < math.inf:
        raise OptionError(f"{kind}: rollback is {rollback:g}: give 0 nats or more")
