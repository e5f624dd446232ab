"""Hydra drafts a tree with heads that know the tokens before their own (Ankner et al. 2024).

The tree is verified as point masses, so the text is plain decoding's own. As a head's law depends on the path, it is
evaluated for every path of a depth at once; static trees take its best words by rank, dynamic ones those of
highest path probability. A chain is one evaluation of all heads, where they have a graph for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from specrun.runtime.drafters.drafter import Drafter, DraftRequest, RoundOutcome
from specrun.runtime.drafters.hydra_state import HydraState, ReadsStates
from specrun.runtime.drafters.path_probability import DynamicShape
from specrun.runtime.drafters.pending_rows import copied_rows
from specrun.runtime.drafters.topology import Topology
from specrun.runtime.drafters.tree_laws import EvaluatedDepth, PathLaws, Paths, grow_draft
from specrun.runtime.heads.ranked_words import RankedWords
from specrun.runtime.target import EvaluatedRows
from specrun.runtime.tree import ROOT, DraftTree, TreeBuilder

__all__ = ["HydraDrafter", "PathHeads"]

FloatRows = npt.NDArray[np.float32]


class PathHeads(ReadsStates, Protocol):
    """Heads that name the likely words after a path; `heads.hydra_head.HydraCells` are."""

    n_params: int

    @property
    def native_seconds(self) -> float:
        """Time in their graphs."""

    def best_words(self, state: FloatRows, paths: Sequence[Sequence[int]]) -> npt.NDArray[np.int32]:
        """Return the best words [n, ranks] after each path below a state [hidden]; all paths have one length."""

    def best_laws(self, state: FloatRows, paths: Sequence[Sequence[int]]) -> RankedWords:
        """Return them with their log-probabilities."""

    def close(self) -> None:
        """Free native memory."""


class HydraDrafter(Drafter):
    """Draws up a tree below the target's own token, from the hidden state that this token came from.

    It is one conversation's: it owns the cells that it was given, and the heads are shared.
    """

    needs_hidden_states = True

    def __init__(self, cells: PathHeads, shape: Topology | DynamicShape, *, name: str = "hydra") -> None:
        self.name = name
        self.max_nodes = shape.max_nodes
        self.max_leaves = shape.max_leaves
        self._heads = cells
        self._shape = shape
        self._state = HydraState(cells)
        self._prompt: list[int] = []

    def begin(self, tokens: Sequence[int]) -> None:
        """Keep the states of what the prompt shares with the last text."""
        self._prompt = list(tokens)
        self._state.begin(tokens)

    def learn_prompt(self, start: int, rows: EvaluatedRows, count: int) -> None:
        """Take the prompt's states."""
        self._learn(start, rows, range(count), self._prompt)

    def propose(self, request: DraftRequest) -> DraftTree:
        """Return a tree; none where the hidden state before the last token is not known."""
        if request.max_depth < 1 or request.max_nodes < 1:
            return DraftTree()
        shape = self._shape.limited(request.max_depth, request.max_nodes)
        if isinstance(shape, Topology) and shape.n_leaves == 1:
            chain = self._state.chain(request.tokens, len(shape))
            if chain is not None:
                return DraftTree.chain(chain.words)
        state = self._state.at_end(request.tokens)
        if state is None:
            return DraftTree()
        if isinstance(shape, DynamicShape):
            return grow_draft(shape, _laws(self._heads, state, request), request)
        return _grow_by_rank(shape, self._heads, state, request.tokens[-1])

    def observe(self, outcome: RoundOutcome) -> None:
        """Take the states of the root and the accepted nodes."""
        self._learn(outcome.start - 1, outcome.rows, outcome.path_rows, outcome.tokens)

    def rewind(self, length: int) -> None:
        """Forget the states of tokens that were only guesses."""
        self._state.cut(length)

    def _learn(self, start: int, rows: EvaluatedRows, wanted: Sequence[int], tokens: Sequence[int]) -> None:
        first = 0 if self._state.reads_all else len(wanted) - 1
        states = copied_rows([rows.hidden_state(row) for row in wanted[first:]])
        self._state.learn(start + first, states, tokens)

    @property
    def native_seconds(self) -> float:
        """Time in graphs that this conversation ran."""
        return self._heads.native_seconds

    @property
    def n_params(self) -> int:
        """The heads' parameters."""
        return self._heads.n_params

    def close(self) -> None:
        """Free the cells."""
        self._heads.close()


def _grow_by_rank(topology: Topology, heads: PathHeads, state: FloatRows, last: int) -> DraftTree:
    """Return a tree of this shape, the children of a node being the best words after its path, by rank."""
    children, tokens = topology.children, dict[int, int]()  # by their places in the topology
    level = [(ROOT, [last])]  # (place, path) of what is evaluated next
    while level:
        words = heads.best_words(state, [path for _, path in level]).tolist()
        below: list[tuple[int, list[int]]] = []
        for (place, path), best in zip(level, words, strict=True):
            for child, token in zip(children[place], best, strict=False):
                tokens[child] = token
                if child in children:
                    below.append((child, [*path, token]))
        level = below
    if len(tokens) == len(topology):
        return DraftTree.of_points([tokens[place] for place in range(len(topology))], topology.parents)
    builder, nodes = TreeBuilder(), {ROOT: ROOT}  # a vocabulary of fewer words than the tree has branches
    for place in sorted(tokens):
        nodes[place] = builder.add(nodes[topology.parents[place]], tokens[place])
    return builder.build()


def _laws(heads: PathHeads, state: FloatRows, request: DraftRequest) -> PathLaws:
    """Return the heads as a source of laws: head k's is the law of the token at depth k + 1."""
    last = request.tokens[-1]

    def below(_parents: Sequence[int], _tokens: Sequence[int], paths: Paths) -> EvaluatedDepth:
        return heads.best_laws(state, [[last, *path] for path in paths()])

    return PathLaws(lambda: heads.best_laws(state, [[last]]), below, request, request.params)
