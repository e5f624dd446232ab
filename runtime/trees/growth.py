# cython: annotation_typing=False
"""Static trees and chains from draft distributions: SpecInfer's and Sequoia's draws, top k.

No model is evaluated here, so that the same functions serve every drafter and the tests. Whether a
draw is made, from which distribution and at which rank, is decided before its value is known: the
shape is fixed, the confidence stop reads a distribution before anything is drawn from it, and a
round's limits cut the shape. Draws below a child may depend on the child.

The children of a node are proposed from its draft distribution by one of three schemes:

- with replacement: i.i.d. draws (SpecInfer, Miao et al. 2023, algorithm 2). Equal draws share a
  node, and each stays a draw that acceptance tests.
- without replacement: each draw is from the distribution without its earlier siblings, renormalised
  (Sequoia, Chen et al. 2024, algorithm 2). When nothing is left of the distribution, there are no
  more siblings.
- most likely: the top k as point masses (Medusa, EAGLE-2, greedy trees).

Every draw is stored with the distribution that it was really drawn from: acceptance divides by that
distribution. This file is compiled by Cython if there is a compiler (`growth.pxd` has
the types).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Literal, Protocol, TypeVar

import numpy as np

from specrun.bindings.errors import OptionError
from specrun.runtime.laws.law import Law, RankedLaw
from specrun.runtime.laws.noise import DraftNoise, NoiseSource, choose_in_turn
from specrun.runtime.trees.topology import Topology
from specrun.runtime.trees.tree import ROOT, DraftTree, Draw, Siblings, as_draw, depths_below

_NONE: list[int] = []  # the root's parents and tokens; never changed
_NO_ENDS: frozenset[int] = frozenset()
TreeSampling = Literal["with", "without", "argmax"]
Child = tuple[int, int]
"""A child's node and its token."""

DrawnT = TypeVar("DrawnT")


class TreeBuilder:
    """Grows a draft tree node by node, parents before children."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._hidden: set[int] = set()  # nodes that are no candidates
        self._draws: dict[int, list[tuple[int, Law | None]]] = {}  # of `Draw`
        self._siblings: dict[int, Siblings] = {}
        self._is_of_points = True  # nothing but different point masses

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, parent: int, token: int, law: Law | None = None) -> int:
        """Record a draw of `token` below `parent`; return its node, that of an equal sibling."""
        if parent in self._siblings:
            self._part(parent)
        node, draws = ROOT, self._draws.get(parent)
        if draws is None:
            draws = self._draws[parent] = []
        # Equal siblings stand for one text: one row of the target decides below both.
        for drawn, _ in draws:
            if self._tokens[drawn] == token:
                node, self._is_of_points = drawn, False
                break
        if node == ROOT:
            node = self._append(parent, token, True)
        if law is not None:
            self._is_of_points = False
        draws.append((node, law))
        return node

    def add_siblings(self, parent: int, tokens: Sequence[int], law: Law) -> int:
        """Record draws without replacement (see `Siblings`) below a parent; return the first node.

        It has no children yet.
        """
        first, n = len(self._tokens), len(tokens)
        if not ROOT <= parent < first or parent in self._hidden:
            self._require_parent(parent, first, True)
        self._is_of_points = False
        self._tokens.extend(tokens)
        self._parents.extend([parent] * n)
        self._siblings[parent] = Siblings(first, tokens, law)
        return first

    def _part(self, parent: int) -> None:
        """Let siblings be single draws, to which others are added."""
        siblings = self._siblings.pop(parent)
        self._draws[parent] = [(draw.node, draw.law) for draw in siblings]

    def add_hidden(self, parent: int, token: int) -> int:
        """Add a node that is evaluated and reported back, but never accepted."""
        # Not among the children: a drafted sibling with the same token needs a node of its own.
        return self._append(parent, token, False)

    def build(self) -> DraftTree:
        """Return the finished tree."""
        if self._is_of_points:
            return DraftTree.of_points(self._tokens, (*self._parents,))
        parents, depths, candidates = depths_below((*self._parents,))
        if self._hidden:
            candidates = tuple([node not in self._hidden for node in range(len(parents))])
        draws: dict[int, Sequence[Draw]] = dict(self._siblings)
        for parent, drawn in self._draws.items():
            draws[parent] = (*map(as_draw, drawn),)
        return DraftTree(tuple(self._tokens), parents, depths, candidates, draws)

    def _append(self, parent: int, token: int, candidate: bool) -> int:
        node = len(self._tokens)
        if parent != ROOT:
            self._require_parent(parent, node, candidate)
        if not candidate:
            self._hidden.add(node)
            self._is_of_points = False
        self._tokens.append(token)
        self._parents.append(parent)
        return node

    def _require_parent(self, parent: int, node: int, candidate: bool) -> None:
        if not ROOT < parent < node:
            raise OptionError(f"a tree of {node} nodes has no node {parent} to grow from")
        if candidate and parent in self._hidden:
            problem = f"node {parent} cannot be accepted"
            raise OptionError(f"{problem}, so nothing below it can be a candidate")


Propose = Callable[[TreeBuilder, int, Law, int, NoiseSource], list[Child]]
"""Adds draws from a distribution below a parent; returns the distinct children in order."""


def propose_with_replacement(
    builder: TreeBuilder, parent: int, law: Law, count: int, noise: NoiseSource
) -> list[Child]:
    """Draw `count` times from the same distribution."""
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
    """Draw up to `count` different tokens, each from the distribution without the earlier ones."""
    # All siblings at once, because none of their distributions depends on anything but the earlier
    # tokens.
    if isinstance(noise, DraftNoise):
        tokens = noise.choose_distinct(law, count)
    else:
        tokens = choose_in_turn(noise, law, count)
    return [*enumerate(tokens, builder.add_siblings(parent, tokens, law))]


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


def most_likely(law: Law, count: int) -> list[tuple[int, float]]:
    """Return the `count` most likely tokens with their probabilities, none of zero.

    Among equals the lower ids come first.
    """
    if isinstance(law, RankedLaw):
        return law.best(count)
    if count == 1:
        return [law.most_likely]
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
    """Ends a chain by facts known before a token is drawn: its distribution, earlier rounds."""

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
    topology: Topology,
    propose: Propose,
    noise: NoiseSource,
    start: int,
    stop: Stop | None = None,
    end_tokens: frozenset[int] = _NO_ENDS,
) -> Steps[DraftTree]:
    """Grow a tree as `grow_tree` does; a chain is a tree of width 1.

    A chain has nothing below one of `end_tokens`. In a tree that would change the draws of other
    nodes.
    """
    builder, children = TreeBuilder(), topology.children
    level, parents, tokens = [(ROOT, ROOT)], _NONE, _NONE
    first, evaluated = ROOT, 0  # evaluated nodes are numbered in turn: that of level[0], of all
    for depth in range(topology.max_depth):
        if stop is not None and not stop.goes_on():
            break
        laws = yield parents, tokens
        noise.seek(start + depth)  # all draws of a depth are for one position
        above, level, parents, tokens = level, [], [], []
        for index, (place, node) in enumerate(above):
            law = laws[index]
            # Read from the distribution before anything is drawn from it, so that exactness holds.
            if stop is not None and not stop.takes(law.most_likely[1]):
                continue
            places = children[place]
            for rank, (child, token) in enumerate(propose(builder, node, law, len(places), noise)):
                below = places[rank]
                if below in children and token not in end_tokens:  # leaves are not evaluated
                    level.append((below, child))
                    parents.append(first + index)
                    tokens.append(token)
        if not tokens:
            break
        first, evaluated = evaluated, evaluated + len(tokens)
    return builder.build()
