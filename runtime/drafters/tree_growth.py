"""Growing a draft tree of a fixed shape from draft laws: no model here, only who is drawn from what.

Whether a draw is made, from which law and at which rank, is decided before its value is known: the shape is
fixed, the confidence stop reads a law before anything is drawn from it, and a round's limits cut the shape. What
is drawn below a child may depend on the child.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from specrun.runtime.drafters.proposals import Propose
from specrun.runtime.drafters.topology import Topology
from specrun.runtime.law import Law
from specrun.runtime.noise import NoiseSource
from specrun.runtime.tree import ROOT, DraftTree, TreeBuilder

__all__ = ["LawSource", "grow_tree"]


class LawSource(Protocol):
    """Where draft laws come from: a model that is evaluated depth by depth, or a table in tests."""

    def root(self) -> Law:
        """Return the law of the token after the last committed one."""

    def below(self, parents: Sequence[int], tokens: Sequence[int]) -> Sequence[Law]:
        """Evaluate one depth and return the law after each of its tokens.

        Token i follows the evaluated node `parents[i]`: ROOT, or a number counted over all calls of the round
        in the order of their tokens, from 0.
        """


def grow_tree(
    topology: Topology, laws: LawSource, propose: Propose, noise: NoiseSource, start: int, p_min: float = 0.0
) -> DraftTree:
    """Return a tree of this shape, its first tokens standing at position `start`.

    Where draws coincide or a law is exhausted the tree is smaller; the first distinct children take the first
    subtrees. A node gets no children if the most likely one has a probability under `p_min`.
    """
    builder = TreeBuilder()
    children = topology.children
    level = [(ROOT, ROOT)]  # (place in the topology, node) of what was evaluated last
    level_laws: Sequence[Law] = [laws.root()] if len(topology) else []
    first = ROOT  # the evaluated number of level[0]
    evaluated = 0
    for depth in range(topology.max_depth):
        noise.seek(start + depth)
        grown: list[tuple[int, int]] = []
        parents: list[int] = []
        tokens: list[int] = []
        for index, law in enumerate(level_laws):
            if p_min > 0.0 and law.most_likely[1] < p_min:
                continue
            place, node = level[index]
            places = children[place]
            for below, (child, token) in zip(places, propose(builder, node, law, len(places), noise), strict=False):
                if below in children:
                    grown.append((below, child))
                    parents.append(first + index)
                    tokens.append(token)
        if not grown:
            break
        level, level_laws = grown, laws.below(parents, tokens)
        first, evaluated = evaluated, evaluated + len(grown)
    return builder.build()
