"""Medusa's typical acceptance: longer drafts for another distribution than the target's. NOT exact.

Cai et al. 2024, section 2.3.1. With P the target's distribution after a node, a drafted token x
below that node is typical if

    P(x) >= min(eps, delta exp(-H(P))),   H(P) = -sum_y P(y) log P(y)

Of all paths of typical tokens the longest is kept, of several the one the target finds most likely.
The token after it is a draw from the target's distribution there.

Where this differs from the authors' program (FasterDecoding/Medusa, medusa/model/utils.py,
evaluate_posterior): P is the distribution that tokens are drawn from, with its truncations and
penalties, not the softmax alone; the token after the path is a draw, where their `fast` mode takes
the likeliest; and the logarithm of H has no 1e-5 in it.

The output does not have the target's distribution: a typical draft is kept for certain, whatever
its probability, so the text leans towards the drafts, and their length changes the text. At
temperature 0 P is sure of one token, only that one is typical, and the text is plain decoding's
own.
"""

from __future__ import annotations

import math

import numpy as np

from specrun.bindings.errors import OptionError
from specrun.runtime.acceptance.rule import Acceptance, LawAt
from specrun.runtime.laws.law import Law
from specrun.runtime.laws.noise import NoiseSource
from specrun.runtime.trees.tree import ROOT, DraftTree


class TypicalRule:
    """Keeps the longest path of tokens that the target finds typical; `exact` is False.

    `eps` is the hard threshold and `delta` the one that falls with the entropy; both in (0, 1].
    With a delta of at most 1 the likeliest token is always typical.
    """

    exact = False

    def __init__(self, eps: float = 0.09, delta: float = 0.3) -> None:
        for name, value in (("eps", eps), ("delta", delta)):
            if not 0.0 < value <= 1.0:
                raise OptionError(f"typical: {name} is {value:g}: give more than 0 and at most 1")
        self.eps = eps
        self.delta = delta
        self.name = f"typical(eps={eps:g}, delta={delta:g})"

    def accept(
        self, tree: DraftTree, law_at: LawAt, noise: NoiseSource, position: int
    ) -> Acceptance:
        """Keep the longest typical path, whether its tokens were drawn or chosen."""
        laws = {ROOT: law_at(ROOT)}
        reached = {ROOT: (0, 0.0)}  # depth and log-likelihood of the typical nodes
        level = [ROOT]
        while level:
            # Only typical nodes are descended from: every token of a path has to be typical.
            below: list[int] = []
            for parent in level:
                below += self._typical_children(tree, parent, law_at, laws, reached)
            level = below
        # Of equals the first in the tree, which the drafter ranks highest.
        last = max(reached, key=lambda node: (*reached[node], -node))
        path = tuple(tree.path_to(last))
        noise.seek(position + len(path))
        # Nothing was looked for below a leaf: its distribution is needed only if the path ends
        # there.
        law = laws[last] if last in laws else law_at(last)
        # A typical draft is kept for certain, whatever its probability.
        decided = [(Law.point(tree.tokens[node]), laws[tree.parents[node]]) for node in path]
        rejected = bool(tree.draws.get(last))
        return Acceptance(path, noise.choose(law), rejected, (*decided, (law, law)))

    def _typical_children(
        self,
        tree: DraftTree,
        parent: int,
        law_at: LawAt,
        laws: dict[int, Law],
        reached: dict[int, tuple[int, float]],
    ) -> list[int]:
        """Return the typical children of a typical node, and note their depth and likelihood."""
        draws = tree.draws.get(parent)
        if not draws:
            return []
        if parent not in laws:
            laws[parent] = law_at(parent)
        law = laws[parent]
        threshold = typical_threshold(law, self.eps, self.delta)
        depth, likelihood = reached[parent]
        children: list[int] = []
        for draw in draws:
            probability = law.probability(tree.tokens[draw.node])
            if probability >= threshold and draw.node not in reached:  # equal draws share a node
                reached[draw.node] = depth + 1, likelihood + math.log(probability)
                children.append(draw.node)
        return children


def typical_threshold(law: Law, eps: float, delta: float) -> float:
    """Return min(eps, delta exp(-H)) of a distribution; entropy in nats."""
    # exp(-H) = 1 for a distribution that is sure.
    if len(law.probs) == 1:
        return min(eps, delta)
    # 0 log 0 counts as 0, where numpy would make NaN of it.
    probs = law.probs[law.probs > 0.0]
    entropy = -float(probs @ np.log(probs))
    return min(eps, delta * math.exp(-entropy))
