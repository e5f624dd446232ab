"""Hydra drafts a tree with heads that know the tokens before their own (Ankner et al. 2024).

The tree is verified as point masses, so the text is plain decoding's own. As a head's law depends
on the path, it is evaluated for every path of a depth at once; static trees take its best tokens by
rank, dynamic ones those of highest path probability. A chain is one evaluation of all heads, where
they have a graph for that.

The state that Hydra's heads read: of the position before the last committed token, true after any
rounds.

Without a prefix layer it is the target's own hidden state there. With one it is the layer's output,
for which the layer has to have seen the states of all positions before: they are cached as the text
is committed, and no drafts among them. They wait until the heads are asked to draft: a chain's
graph evaluates them with the draft.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from specrun.runtime.drafter import Drafter, DraftRequest, RoundOutcome
from specrun.runtime.heads import (
    MOST_CHAIN_ROWS,
    ChainTokens,
    RankedTokens,
    RowPiece,
    TextRows,
    copied_rows,
)
from specrun.runtime.target import EvaluatedRows
from specrun.runtime.tree import ROOT, DraftTree, TreeBuilder
from specrun.runtime.trees import (
    DynamicShape,
    EvaluatedDepth,
    PathLaws,
    Paths,
    Topology,
    grow_draft,
)

FloatRows = npt.NDArray[np.float32]


class StateCells(Protocol):
    """Cells of the layer that makes states of hidden states; `heads.prefix_layer.PrefixCells`
    are."""

    n_cells: int


class ReadsStates(Protocol):
    """Heads as a conversation has them; `heads.hydra_head.HydraCells` are."""

    @property
    def prefix(self) -> StateCells | None:
        """The cells of what makes the heads' state of hidden states, None where they read those."""

    def states(self, states: FloatRows, position: int, count: int) -> FloatRows:
        """See `HydraCells.states`."""

    def chain(
        self,
        states: FloatRows,
        position: int,
        count: int,
        token: int,
        n: int,
        *,
        probabilities: bool = False,
    ) -> ChainTokens | None:
        """See `HydraCells.chain`."""


class HydraState:
    """The positions of a text are `TextRows` of the target's hidden states.

    Without a prefix layer none of them lies in a cell anywhere, there is room for all, and only the
    last one is read.
    """

    def __init__(self, heads: ReadsStates) -> None:
        self._heads = heads
        prefix = heads.prefix
        self._rows = TextRows(
            self._evaluate, sys.maxsize if prefix is None else prefix.n_cells, ahead=0
        )

    @property
    def reads_all(self) -> bool:
        """Whether it wants the states of all positions; otherwise the last one is enough."""
        return self._heads.prefix is not None

    def begin(self, tokens: Sequence[int]) -> None:
        """Keep what holds for a text as well."""
        self._rows.begin(tokens)

    def cut(self, length: int) -> None:
        """Forget the tokens from position `length` on."""
        self._rows.cut(length)

    def learn(self, start: int, states: FloatRows, tokens: Sequence[int]) -> None:
        """Take the hidden states [n, hidden] of positions `start` on; see `TextRows.learn`."""
        self._rows.learn(start, states, tokens)

    def at_end(self, tokens: Sequence[int]) -> FloatRows | None:
        """Return the state [hidden] before the last token of a text, None where it is not known."""
        return self._rows.said(tokens)

    def chain(self, tokens: Sequence[int], n: int) -> ChainTokens | None:
        """Return n tokens of a greedy chain after the last token of a text, evaluated at once.

        None where the state before it is not known, or the heads have no graph for it.
        """
        piece = self._rows.due(tokens, MOST_CHAIN_ROWS)
        if piece is None:
            return None
        drafted = self._heads.chain(piece.rows, piece.position, piece.count, tokens[-1], n)
        if drafted is not None:
            self._rows.settle(piece)
        return drafted

    def _evaluate(self, piece: RowPiece) -> FloatRows:
        state: FloatRows = self._heads.states(piece.rows, piece.position, piece.count)[-1]
        return state


class PathHeads(ReadsStates, Protocol):
    """Heads that name the likely tokens after a path; `heads.hydra_head.HydraCells` are."""

    n_params: int

    @property
    def native_seconds(self) -> float:
        """Time in their graphs."""

    def best_tokens(
        self, state: FloatRows, paths: Sequence[Sequence[int]]
    ) -> npt.NDArray[np.int32]:
        """Return the best tokens [n, ranks] after each path below a state [hidden]; all paths have
        one length."""

    def best_laws(self, state: FloatRows, paths: Sequence[Sequence[int]]) -> RankedTokens:
        """Return them with their log-probabilities."""

    def close(self) -> None:
        """Free native memory."""


class HydraDrafter(Drafter):
    """Draws up a tree below the target's own token, from the hidden state that this token came
    from.

    It is one conversation's: it owns the cells that it was given, and the heads are shared.
    """

    needs_hidden_states = True

    def __init__(
        self, cells: PathHeads, shape: Topology | DynamicShape, *, name: str = "hydra"
    ) -> None:
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
                return DraftTree.chain(chain.tokens)
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

    def _learn(
        self, start: int, rows: EvaluatedRows, wanted: Sequence[int], tokens: Sequence[int]
    ) -> None:
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
    """Return a tree of this shape, the children of a node being the best tokens after its path, by
    rank."""
    children, tokens = topology.children, dict[int, int]()  # by their places in the topology
    level = [(ROOT, [last])]  # (place, path) of what is evaluated next
    while level:
        named = heads.best_tokens(state, [path for _, path in level]).tolist()
        below: list[tuple[int, list[int]]] = []
        for (place, path), best in zip(level, named, strict=True):
            for child, token in zip(children[place], best, strict=False):
                tokens[child] = token
                if child in children:
                    below.append((child, [*path, token]))
        level = below
    if len(tokens) == len(topology):
        return DraftTree.of_points(
            [tokens[place] for place in range(len(topology))], topology.parents
        )
    builder, nodes = (
        TreeBuilder(),
        {ROOT: ROOT},
    )  # a vocabulary of fewer tokens than the tree has branches
    for place in sorted(tokens):
        nodes[place] = builder.add(nodes[topology.parents[place]], tokens[place])
    return builder.build()


def _laws(heads: PathHeads, state: FloatRows, request: DraftRequest) -> PathLaws:
    """Return the heads as a source of laws: head k's is the law of the token at depth k + 1."""
    last = request.tokens[-1]

    def below(_parents: Sequence[int], _tokens: Sequence[int], paths: Paths) -> EvaluatedDepth:
        return heads.best_laws(state, [[last, *path] for path in paths()])

    return PathLaws(lambda: heads.best_laws(state, [[last]]), below, request, request.params)
