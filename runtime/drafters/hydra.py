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
from specrun.runtime.drafters.hydra_state import DraftsChains, HydraState, StateLayer
from specrun.runtime.drafters.path_probability import DynamicShape, grow_by_path_probability
from specrun.runtime.drafters.pending_rows import copied_rows
from specrun.runtime.drafters.topology import Topology
from specrun.runtime.heads.ranked_words import RankedWords
from specrun.runtime.law import Law
from specrun.runtime.ranked_law import RankedLaw
from specrun.runtime.target import EvaluatedRows
from specrun.runtime.tree import ROOT, DraftTree, TreeBuilder

__all__ = ["HydraDrafter", "PathHeads"]

FloatRows = npt.NDArray[np.float32]


class PathHeads(DraftsChains, Protocol):
    """Heads that name the likely words after a path; `heads.hydra_head.HydraHead` is one."""

    n_params: int

    @property
    def native_seconds(self) -> float:
        """Time in their graphs."""

    @property
    def prefix(self) -> StateLayer | None:
        """What makes the heads' state of the target's hidden states, None where they read those."""

    def best_words(self, state: FloatRows, paths: Sequence[Sequence[int]]) -> npt.NDArray[np.int32]:
        """Return the best words [n, ranks] after each path below a state [hidden]; all paths have one length."""

    def best_laws(self, state: FloatRows, paths: Sequence[Sequence[int]]) -> RankedWords:
        """Return them with their log-probabilities."""

    def close(self) -> None:
        """Free native memory."""


class HydraDrafter(Drafter):
    """Draws up a tree below the target's own token, from the hidden state that this token came from. Owns the heads."""

    needs_hidden_states = True

    def __init__(self, heads: PathHeads, shape: Topology | DynamicShape, *, name: str = "hydra") -> None:
        self.name = name
        self.max_nodes = shape.max_nodes
        self.max_leaves = shape.max_leaves
        self._heads = heads
        self._shape = shape
        self._state = HydraState(heads.prefix)
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
        last, shape = request.tokens[-1], self._shape.limited(request.max_depth, request.max_nodes)
        if isinstance(shape, Topology) and shape.n_leaves == 1:
            chain = self._state.chain(self._heads, request.tokens, len(shape))
            if chain is not None:
                return DraftTree.chain(chain.words)
        state = self._state.at_end(request.tokens)
        if state is None:
            return DraftTree()
        if isinstance(shape, DynamicShape):
            return grow_by_path_probability(shape, _PathLaws(self._heads, state, last))
        return _grow_by_rank(shape, self._heads, state, last)

    def observe(self, outcome: RoundOutcome) -> None:
        """Take the states of the root and the accepted nodes."""
        self._learn(outcome.start - 1, outcome.rows, outcome.path_rows, outcome.tokens)

    def _learn(self, start: int, rows: EvaluatedRows, wanted: Sequence[int], tokens: Sequence[int]) -> None:
        first = 0 if self._state.reads_all else len(wanted) - 1
        states = copied_rows([rows.hidden_state(row) for row in wanted[first:]])
        self._state.learn(start + first, states, tokens)

    @property
    def native_seconds(self) -> float:
        """Time in the heads' graphs."""
        return self._heads.native_seconds

    @property
    def n_params(self) -> int:
        """The heads' parameters."""
        return self._heads.n_params

    def close(self) -> None:
        """Free the heads."""
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


class _PathLaws:
    """The heads as a source of laws: head k's is the law of the token at depth k + 1."""

    def __init__(self, heads: PathHeads, state: FloatRows, last: int) -> None:
        self._heads = heads
        self._state = state
        self._last = last
        self._paths: list[list[int]] = []

    def root(self) -> Law:
        """Return the law after the last committed token."""
        return self._laws([[self._last]])[0]

    def below(self, parents: Sequence[int], tokens: Sequence[int]) -> list[Law]:
        """Evaluate one depth of the tree."""
        paths = [
            [*([self._last] if parent == ROOT else self._paths[parent]), token]
            for parent, token in zip(parents, tokens, strict=True)
        ]
        self._paths += paths
        return self._laws(paths)

    def _laws(self, paths: list[list[int]]) -> list[Law]:
        best = self._heads.best_laws(self._state, paths)
        return list(RankedLaw.of_rows(best.words, best.log_probs))
