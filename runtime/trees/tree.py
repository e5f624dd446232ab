"""The draft tree: the tokens that are evaluated, and the draws that acceptance has to test."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from types import MappingProxyType
from typing import NamedTuple, Protocol, overload

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import OptionError
from specrun.runtime.laws.law import Law

ROOT = -1
"""The last committed token, parent of the first drafted ones."""


class DraftRows(Protocol):
    """What a drafter itself said at the places of its tree, for rules that weigh its laws."""

    def logits(self, node: int) -> npt.NDArray[np.float32] | None:
        """Return its row after a node (or ROOT), [n_vocab or fewer]; None if there is none.

        It may be evaluated only now: that of the last token of a whole draft.
        """


class Draw(NamedTuple):
    """One drafted child: its node and the law it was drawn from, None for a point mass.

    The law is that of the draw given everything before it, including its earlier siblings.
    """

    node: int
    law: Law | None = None


# Not frozen: that costs a call for every field, in every round. Trees share what they are made of.
@dataclass(slots=True)
class DraftTree:
    """Nodes are what the target evaluates; draws are what acceptance tests. Nothing changes one.

    `tokens[i]` hangs below `parents[i]` (ROOT or an earlier node) at `depths[i]` (1 below the
    root). `draws[parent]` lists the draws made at a parent in the order they were made: equal
    tokens share a node, but each keeps its draw, because dropping one biases the output. Nodes with
    `is_candidate[i]` False are evaluated and reported back, never accepted. `rows` is what the
    drafter said there itself, where the request asked for it and the drafter knows.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    depths: tuple[int, ...] = ()
    is_candidate: tuple[bool, ...] = ()
    draws: Mapping[int, Sequence[Draw]] = field(default_factory=dict)
    rows: DraftRows | None = field(default=None, compare=False, repr=False)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def max_depth(self) -> int:
        """The depth of the deepest node, 0 for an empty tree."""
        return max(self.depths, default=0)

    @property
    def n_candidates(self) -> int:
        """How many nodes can be accepted."""
        return count_candidates(self.depths, self.is_candidate)[0]

    @property
    def candidate_depth(self) -> int:
        """The depth of the deepest node that can be accepted, 0 without any."""
        return count_candidates(self.depths, self.is_candidate)[1]

    def path_to(self, node: int) -> list[int]:
        """Return the nodes from the first below the root down to `node`; empty for ROOT."""
        path: list[int] = []
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        path.reverse()
        return path

    def extends(self, other: DraftTree) -> bool:
        """Whether the nodes of `other` come first in this tree: asked before its rows are read."""
        n = len(other)
        if self is other:
            return True
        # Rows depend on tokens and parents alone: draws do not change what is evaluated.
        return self.tokens[:n] == other.tokens and self.parents[:n] == other.parents

    @staticmethod
    def of_points(tokens: Sequence[int], parents: tuple[int, ...]) -> DraftTree:
        """Return a tree of point masses below `parents`: no two siblings may be equal."""
        return DraftTree(tuple(tokens), parents, *_structure(parents))

    @staticmethod
    def chain(tokens: list[int], laws: list[Law] | None = None) -> DraftTree:
        """Return a chain of tokens, drawn from `laws` in turn or, without them, point masses."""
        n = len(tokens)
        parents, depths, candidates, draws = _CHAINS.get(n) or _chain_structure(n)
        tree = DraftTree(tuple(tokens), parents, depths, candidates, draws)
        if laws:
            # Node i hangs below i - 1, and ROOT is -1.
            tree.draws = {i - 1: (Draw(i, laws[i]),) for i in range(len(tokens))}
        return tree

    @staticmethod
    def of_siblings(
        tokens: tuple[int, ...], parents: tuple[int, ...], siblings: Mapping[int, Siblings]
    ) -> DraftTree:
        """Return a tree all of which was drawn without replacement: siblings by their parents."""
        return DraftTree(tokens, *_depths_below(parents), siblings)


@functools.lru_cache(maxsize=256)
def count_candidates(depths: tuple[int, ...], is_candidate: tuple[bool, ...]) -> tuple[int, int]:
    """Return how many nodes can be accepted, and the depth of the deepest of them."""
    return sum(is_candidate), max(compress(depths, is_candidate), default=0)


_Structure = tuple[tuple[int, ...], tuple[bool, ...], Mapping[int, Sequence[Draw]]]


# Rounds repeat a few shapes: each is worked out once and shared, hence read-only.
@functools.lru_cache(maxsize=256)
def _structure(parents: tuple[int, ...]) -> _Structure:
    """Return the depths, candidates and draws of a tree of point masses."""
    draws: dict[int, list[Draw]] = {}
    for node, parent in enumerate(parents):
        draws.setdefault(parent, []).append(Draw(node))
    shared = MappingProxyType({parent: tuple(drawn) for parent, drawn in draws.items()})
    _, depths, candidates = _depths_below(parents)
    return depths, candidates, shared


@functools.lru_cache(maxsize=256)
def _depths_below(
    parents: tuple[int, ...],
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[bool, ...]]:
    """Return the shape, one tuple for all that are equal, its depths, and all as candidates."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent == ROOT else depths[parent] + 1)
    return parents, tuple(depths), (True,) * len(parents)


# By their lengths, of which there are few: a cache with a limit would note every look.
_CHAINS: dict[int, tuple[tuple[int, ...], *_Structure]] = {}


def _chain_structure(n: int) -> tuple[tuple[int, ...], *_Structure]:
    """Return the parents, depths, candidates and draws of a chain of n point masses."""
    parents = (*range(ROOT, n - 1),)
    return _CHAINS.setdefault(n, (parents, *_structure(parents)))


class Siblings(Sequence[Draw]):
    """Draws without replacement below one parent: different tokens of consecutive nodes.

    The first was drawn from `law`, each other from what the earlier ones left of it. These laws are
    made in turn, as draws are read: acceptance reads few of them.
    """

    __slots__ = ("first", "law", "tokens")

    def __init__(self, first: int, tokens: Sequence[int], law: Law) -> None:
        self.first, self.tokens, self.law = first, tokens, law

    def __iter__(self) -> Iterator[Draw]:
        law = self.law
        for node, token in enumerate(self.tokens, self.first):
            yield Draw(node, law)
            law = law.without(token)

    def __len__(self) -> int:
        return len(self.tokens)

    @overload
    def __getitem__(self, index: int) -> Draw: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Draw, ...]: ...
    def __getitem__(self, index: int | slice) -> Draw | tuple[Draw, ...]:
        return (*self,)[index]


class TreeBuilder:
    """Grows a draft tree node by node, parents before children."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._hidden: set[int] = set()  # nodes that are no candidates
        self._draws: dict[int, list[Draw]] = {}
        self._children: dict[tuple[int, int], int] = {}
        self._siblings: dict[int, Siblings] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, parent: int, token: int, law: Law | None = None) -> int:
        """Record a draw of `token` below `parent`; return its node, that of an equal sibling."""
        if parent in self._siblings:
            self._part(parent)
        # Equal siblings stand for one text: one row of the target decides below both.
        node = self._children.get((parent, token))
        if node is None:
            node = self._children[parent, token] = self._append(parent, token)
        draws = self._draws.get(parent)
        if draws is None:
            draws = self._draws[parent] = []
        draws.append(Draw(node, law))
        return node

    def add_siblings(self, parent: int, tokens: Sequence[int], law: Law) -> range:
        """Record draws without replacement (see `Siblings`) below a parent; return their nodes.

        It has no children yet.
        """
        first, n = len(self._tokens), len(tokens)
        if not ROOT <= parent < first or parent in self._hidden:
            self._require_parent(parent, first, True)
        self._tokens.extend(tokens)
        self._parents.extend([parent] * n)
        self._siblings[parent] = Siblings(first, tokens, law)
        return range(first, first + n)

    def _part(self, parent: int) -> None:
        """Let siblings be single draws, to which others are added."""
        siblings = self._siblings.pop(parent)
        self._draws[parent] = list(siblings)
        for node, token in enumerate(siblings.tokens, siblings.first):
            self._children[parent, token] = node

    def add_hidden(self, parent: int, token: int) -> int:
        """Add a node that is evaluated and reported back, but never accepted."""
        # Not among the children: a drafted sibling with the same token needs a node of its own.
        return self._append(parent, token, candidate=False)

    def build(self) -> DraftTree:
        """Return the finished tree."""
        parents, depths, candidates = _depths_below((*self._parents,))
        if self._hidden:
            candidates = tuple([node not in self._hidden for node in range(len(parents))])
        return DraftTree(tuple(self._tokens), parents, depths, candidates, self._all_draws())

    def _all_draws(self) -> Mapping[int, Sequence[Draw]]:
        return self._siblings | {parent: tuple(draws) for parent, draws in self._draws.items()}

    def _append(self, parent: int, token: int, *, candidate: bool = True) -> int:
        node = len(self._tokens)
        if parent != ROOT:
            self._require_parent(parent, node, candidate)
        if not candidate:
            self._hidden.add(node)
        self._tokens.append(token)
        self._parents.append(parent)
        return node

    def _require_parent(self, parent: int, node: int, candidate: bool) -> None:
        if not ROOT < parent < node:
            raise OptionError(f"a tree of {node} nodes has no node {parent} to grow from")
        if candidate and parent in self._hidden:
            problem = f"node {parent} cannot be accepted"
            raise OptionError(f"{problem}, so nothing below it can be a candidate")
