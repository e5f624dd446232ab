"""Growing static trees and chains from draft laws: SpecInfer's and Sequoia's draws, Medusa's top k.

No model is evaluated here, so that the same functions serve every drafter and the tests. Whether a
draw is made, from which law and at which rank, is decided before its value is known: the shape is
fixed, the confidence stop reads a law before anything is drawn from it, and a round's limits cut
the shape. What is drawn below a child may depend on the child.

The children of a node are proposed from its draft law by one of three schemes:

- with replacement: i.i.d. draws (SpecInfer, Miao et al. 2023, algorithm 2). Equal draws share a
  node, and each stays a draw that acceptance tests.
- without replacement: each draw is from the law without its earlier siblings, renormalised
  (Sequoia, Chen et al. 2024, algorithm 2). When nothing is left of the law, there are no more
  siblings.
- most likely: the top k as point masses (Medusa, EAGLE-2, greedy trees).

Every draw is stored with the law that it was really drawn from: that law is what acceptance
divides by.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Literal, Protocol, TypeVar

import numpy as np

from specrun.runtime.laws.law import Law, RankedLaw
from specrun.runtime.laws.noise import DraftNoise, NoiseSource, choose_in_turn
from specrun.runtime.trees.topology import Topology
from specrun.runtime.trees.tree import ROOT, DraftTree, TreeBuilder

_NONE: list[int] = []  # the root's parents and tokens; never changed
TreeSampling = Literal["with", "without", "argmax"]
Child = tuple[int, int]
"""A child's node and its token."""

DrawnT = TypeVar("DrawnT")

Propose = Callable[[TreeBuilder, int, Law, int, NoiseSource], list[Child]]
"""Adds up to so many draws from a law below a parent; returns the distinct children in order."""


def propose_with_replacement(
    builder: TreeBuilder, parent: int, law: Law, count: int, noise: NoiseSource
) -> list[Child]:
    """Draw `count` times from the same law."""
    if count == 1:
        token = noise.choose(law)
        return [(builder.add(parent, token, law), token)]
    children: list[Child] = []
    for _ in range(count):
        token = noise.choose(law)
        # Every draw is recorded, equal ones too: dropping one would bias the text.
        child = builder.add(parent, token, law), token
        if child not in children:
            children.append(child)
    return children


def propose_without_replacement(
    builder: TreeBuilder, parent: int, law: Law, count: int, noise: NoiseSource
) -> list[Child]:
    """Draw up to `count` different tokens, each from what the earlier ones left of the law."""
    # All siblings at once, because none of their laws depends on anything but the earlier tokens.
    if isinstance(noise, DraftNoise):
        tokens = noise.choose_distinct(law, count)
    else:
        tokens = choose_in_turn(noise, law, count)
    return list(zip(builder.add_siblings(parent, tokens, law), tokens, strict=True))


def propose_most_likely(
    builder: TreeBuilder, parent: int, law: Law, count: int, noise: NoiseSource
) -> list[Child]:
    """Take the `count` most likely tokens as point masses."""
    return [(builder.add(parent, token), token) for token, _ in most_likely(law, count)]


_SCHEMES: dict[TreeSampling, Propose] = {
    "with": propose_with_replacement,
    "without": propose_without_replacement,
    "argmax": propose_most_likely,
}


def proposal_scheme(sampling: TreeSampling) -> Propose:
    """Return the scheme of a name."""
    return _SCHEMES[sampling]


def ending_at(end_tokens: frozenset[int], propose: Propose) -> Propose:
    """Return a scheme of chains that drafts nothing below `end_tokens`.

    In a tree that would change the draws of other nodes.
    """

    def proposed(
        builder: TreeBuilder, parent: int, law: Law, count: int, noise: NoiseSource
    ) -> list[Child]:
        made = propose(builder, parent, law, count, noise)
        return [child for child in made if child[1] not in end_tokens]

    return proposed


def most_likely(law: Law, count: int) -> list[tuple[int, float]]:
    """Return the `count` most likely tokens with their probabilities, none of zero.

    Among equals the lower ids come first.
    """
    if isinstance(law, RankedLaw):
        return law.best(count)
    probs = law.probs
    if len(probs) > 8 * count + 64:
        # Sorting a whole vocabulary costs more than the rest of a round: sort only the best, and
        # all that tie with the last of them, so that ties fall to the lower ids.
        near = np.argpartition(probs, len(probs) - count)[len(probs) - count :]
        near = np.flatnonzero(probs >= probs[near].min())
        order = near[np.argsort(-probs[near], kind="stable")[:count]]
    else:
        order = np.argsort(-probs, kind="stable")[:count]
    tokens = order if law.ids is None else law.ids[order]
    ranked = zip(tokens.tolist(), probs[order].tolist(), strict=True)
    return [(token, prob) for token, prob in ranked if prob > 0.0]


class LawSource(Protocol):
    """A source of draft distributions: a model, evaluated depth by depth, or a table in tests."""

    def root(self) -> Law:
        """Return the distribution of the token after the last committed one."""

    def below(self, parents: Sequence[int], tokens: Sequence[int]) -> Sequence[Law]:
        """Evaluate one depth and return the distribution after each of its tokens.

        Token i follows the evaluated node `parents[i]`: ROOT, or a number counted over all calls of
        the round in the order of their tokens, from 0.
        """


class Stop(Protocol):
    """Ends a chain by facts that are known before a token is drawn: its law, and earlier rounds."""

    def goes_on(self) -> bool:
        """Return whether to evaluate the distribution of another token."""

    def takes(self, certainty: float) -> bool:
        """Return whether to draft from a distribution whose greatest probability this is."""


class Threshold:
    """Drafts nothing from a distribution in which no token has probability `p_min`.

    Nor if another stop does not.
    """

    def __init__(self, p_min: float, stop: Stop | None = None) -> None:
        self._p_min, self._stop = p_min, stop

    def goes_on(self) -> bool:
        """Return whether the other stop does."""
        return self._stop is None or self._stop.goes_on()

    def takes(self, certainty: float) -> bool:
        """Return whether it is certain enough, and the other stop takes it."""
        return certainty >= self._p_min and (self._stop is None or self._stop.takes(certainty))


def grow_tree(
    topology: Topology,
    laws: LawSource,
    propose: Propose,
    noise: NoiseSource,
    start: int,
    stop: Stop | None = None,
) -> DraftTree:
    """Return a tree of this shape, its first tokens at position `start`.

    The tree is smaller if draws coincide or a distribution is exhausted; the first distinct
    children take the first subtrees. A node gets no children if `stop` ends there.
    """
    return drive(tree_steps(topology, propose, noise, start, stop), laws)


Steps = Generator[tuple[Sequence[int], Sequence[int]], Sequence[Law], DrawnT]
"""A tree that grows: yields the parents and tokens of the depth to evaluate, as in
`LawSource.below` (none for the root), and receives the distributions after them."""


def drive(steps: Steps[DrawnT], laws: LawSource) -> DrawnT:
    """Take all steps with the distributions of a source; return their result."""
    try:
        parents, tokens = next(steps)
        while True:
            parents, tokens = steps.send(laws.below(parents, tokens) if tokens else [laws.root()])
    except StopIteration as ended:
        drawn: DrawnT = ended.value
        return drawn


def tree_steps(
    topology: Topology, propose: Propose, noise: NoiseSource, start: int, stop: Stop | None = None
) -> Steps[DraftTree]:
    """Grow a tree as `grow_tree` does; a chain is a tree of width 1."""
    builder, children = TreeBuilder(), topology.children
    level, parents, tokens = [(ROOT, ROOT)], _NONE, _NONE
    first, evaluated = ROOT, 0  # evaluated nodes are numbered in turn: that of level[0], of all
    for depth in range(topology.max_depth):
        if stop is not None and not stop.goes_on():
            break
        laws = yield parents, tokens
        noise.seek(start + depth)  # all draws of a depth are for one position
        above, level, parents, tokens = level, [], [], []
        for index, (law, (place, node)) in enumerate(zip(laws, above, strict=True)):
            # Read from the law before anything is drawn from it, so that exactness holds.
            if stop is not None and not stop.takes(law.most_likely[1]):
                continue
            made = propose(builder, node, law, len(children[place]), noise)
            for below, (child, token) in zip(children[place], made, strict=False):
                if below in children:  # leaves are not evaluated
                    level.append((below, child))
                    parents.append(first + index)
                    tokens.append(token)
        if not tokens:
            break
        first, evaluated = evaluated, evaluated + len(tokens)
    return builder.build()
