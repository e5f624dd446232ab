"""The draft tree: the tokens that are evaluated, and the draws that acceptance has to test."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from types import MappingProxyType
from typing import NamedTuple, Protocol, overload

import numpy as np
import numpy.typing as npt

from specrun.runtime.laws.law import Law

ROOT = -1
"""The last committed token, parent of the first drafted ones."""


class DraftRows(Protocol):
    """A drafter's own rows at the places of its tree, for rules that weigh its distributions."""

    def logits(self, node: int) -> npt.NDArray[np.float32] | None:
        """Return its row after a node (or ROOT), [n_vocab or fewer]; None if there is none.

        It may be evaluated only now: that of the last token of a whole draft.
        """


class Draw(NamedTuple):
    """One drafted child: its node and the distribution it was drawn from, None for a point mass.

    The distribution is that of the draw given everything before it, including its earlier siblings.
    """

    node: int
    law: Law | None = None


as_draw: Callable[[tuple[int, Law | None]], Draw] = functools.partial(tuple.__new__, Draw)
"""Return a draw of its fields: a named tuple's own constructor takes longer."""


# Not frozen: that costs a call for every field, in every round. Trees share their parts.
@dataclass(slots=True)
class DraftTree:
    """The target evaluates nodes; acceptance tests draws. Nothing changes one.

    `tokens[i]` hangs below `parents[i]` (ROOT or an earlier node) at `depths[i]` (1 below the
    root). `draws[parent]` lists the draws made at a parent in the order they were made: equal
    tokens share a node, but each keeps its draw, because dropping one biases the output. Nodes with
    `is_candidate[i]` False are evaluated and reported back, never accepted. `rows` are the
    drafter's own, if the request needs them and the drafter has any. `is_of_points`: all draws
    are known to be point masses.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    depths: tuple[int, ...] = ()
    is_candidate: tuple[bool, ...] = ()
    draws: Mapping[int, Sequence[Draw]] = field(default_factory=dict)
    rows: DraftRows | None = field(default=None, compare=False, repr=False)
    is_of_points: bool = field(default=False, compare=False, repr=False)

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
        """Whether the nodes of `other` come first in this tree: called before its rows are read."""
        n = len(other)
        if self is other:
            return True
        # Rows depend on tokens and parents alone: draws do not change the evaluated nodes.
        return self.tokens[:n] == other.tokens and self.parents[:n] == other.parents

    @staticmethod
    def of_points(tokens: Sequence[int], parents: tuple[int, ...]) -> DraftTree:
        """Return a tree of point masses below `parents`: no two siblings may be equal."""
        return DraftTree(tuple(tokens), parents, *_structure(parents), None, True)

    @staticmethod
    def chain(tokens: list[int], laws: list[Law] | None = None) -> DraftTree:
        """Return a chain of tokens, drawn from `laws` in turn or, without them, point masses."""
        n = len(tokens)
        parents, depths, candidates, draws = _CHAINS.get(n) or _chain_structure(n)
        if laws:
            # Node i hangs below i - 1, and ROOT is -1.
            draws = {i - 1: (as_draw((i, laws[i])),) for i in range(len(tokens))}
        return DraftTree(tuple(tokens), parents, depths, candidates, draws, None, not laws)

    @staticmethod
    def of_siblings(
        tokens: tuple[int, ...], parents: tuple[int, ...], siblings: Mapping[int, Siblings]
    ) -> DraftTree:
        """Return a tree all of which was drawn without replacement: siblings by their parents."""
        return DraftTree(tokens, *depths_below(parents), siblings)


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
    _, depths, candidates = depths_below(parents)
    return depths, candidates, shared


@functools.lru_cache(maxsize=256)
def depths_below(
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

    The first was drawn from `law`, each other from the rest after the earlier ones. These
    distributions are made in turn, as draws are read: acceptance reads few of them.
    """

    __slots__ = ("first", "law", "tokens")

    def __init__(self, first: int, tokens: Sequence[int], law: Law) -> None:
        self.first, self.tokens, self.law = first, tokens, law

    def __iter__(self) -> Iterator[Draw]:
        law = self.law
        for node, token in enumerate(self.tokens, self.first):
            yield as_draw((node, law))
            law = law.without(token)

    def __len__(self) -> int:
        return len(self.tokens)

    @overload
    def __getitem__(self, index: int) -> Draw: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Draw, ...]: ...
    def __getitem__(self, index: int | slice) -> Draw | tuple[Draw, ...]:
        return (*self,)[index]
