"""The target: evaluates a draft tree in one pass and keeps the accepted path's cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from specrun.bindings.batch import Batch
from specrun.bindings.context import Context, ContextOptions
from specrun.bindings.errors import OptionError, UnsupportedModelError
from specrun.runtime.layout import TreeLayout, layout_tree, moves_onto
from specrun.runtime.tree import DraftTree

__all__ = ["EvaluatedRows", "Target", "TargetModel", "target_context_options"]

# Prompts are evaluated in pieces, because Ctrl-C is only seen between evaluations.
_PREFILL_CHUNK = 256


# With hidden states every token of a prompt needs an output row: prompts go in pieces of at least this size.
_HIDDEN_STATE_ROWS = 64


class EvaluatedRows(Protocol):
    """The rows of one evaluation: 0 for the root, i + 1 for node i. Views die with the next evaluation."""

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        """Return the logits of one row, [n_vocab]."""

    def hidden_state(self, row: int) -> npt.NDArray[np.float32]:
        """Return the final hidden state of one row, [n_embd]."""

    def layer_input(self, row: int, layer: int) -> npt.NDArray[np.float32]:
        """Return the input of one of the target's layers at one row, [n_embd]."""


PromptLearner = Callable[[int, EvaluatedRows, int], None]


class Target(Protocol):
    """What the decoding loop needs of a target; tests pass scripted ones."""

    tokens: list[int]

    def evaluate(self, pending: int, tree: DraftTree) -> EvaluatedRows:
        """Evaluate the last committed token and the tree below it."""

    def commit(self, path: Sequence[int]) -> None:
        """Keep the evaluated root and these nodes, a path from the root down; drop the others."""


class DraftSize(Protocol):
    """What the target's context must hold of a drafter's trees."""

    max_leaves: int
    max_nodes: int
    needs_hidden_states: bool
    layer_inputs: tuple[int, ...]


class TargetModel:
    """A llama.cpp context as the target.

    `tokens` are exactly the committed tokens whose keys and values are cached, for every sequence id of
    the context: a tree's paths all start from the same cached prefix.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self.tokens: list[int] = []
        self._n_sequences = context.options.n_sequences
        self._all_ids = np.arange(self._n_sequences, dtype=np.int32)
        self._batch = Batch(context.n_batch, self._n_sequences)
        self._tree: DraftTree | None = None
        self._layout: TreeLayout | None = None
        self._pending = 0

    @property
    def room(self) -> int:
        """How many more positions the context can hold."""
        return self.context.n_ctx - len(self.tokens)

    @property
    def max_nodes(self) -> int:
        """The most tree nodes one evaluation can take beside the root."""
        return min(self.context.n_batch, self.context.n_outputs) - 1

    def rewind(self, length: int) -> int:
        """Drop everything after the first `length` committed tokens; return how many are cached now.

        Also drops what an interrupted round left behind. Memories that cannot drop a part are cleared.
        """
        self._tree = None
        memory = self.context.memory
        if self.context.model.can_branch:
            memory.truncate(length)
        elif length < len(self.tokens) or memory.last_position() >= length:
            memory.clear()
            length = 0
        del self.tokens[length:]
        return length

    def prefill(self, tokens: Sequence[int], learn: PromptLearner | None = None) -> None:
        """Evaluate and commit more tokens, without output rows unless the context has hidden states.

        If it has those or layer inputs, `learn` is told each piece: the position of its first token, its rows, and
        how many there are.
        """
        hidden_states = self.context.options.hidden_states
        shows = hidden_states or bool(self.context.options.layer_inputs)
        chunk = min(_PREFILL_CHUNK, self.context.n_batch)
        if hidden_states:
            chunk = min(chunk, self.context.n_outputs)
        for start in range(0, len(tokens), chunk):
            piece = list(tokens[start : start + chunk])
            self._batch.fill_chain(piece, len(self.tokens), self._all_ids, len(piece) if hidden_states else 0)
            rows = self.context.decode(self._batch)
            if shows and learn is not None:
                learn(len(self.tokens), rows, len(piece))
            self.tokens.extend(piece)

    def evaluate(self, pending: int, tree: DraftTree) -> EvaluatedRows:
        """Evaluate `pending` (the last committed token) and `tree` below it in one llama_decode."""
        if len(tree) and not self.context.model.can_branch:
            raise UnsupportedModelError(
                f"{self.context.model.architecture} models keep a recurrent state and cannot verify drafts"
            )
        layout = layout_tree(tree.parents, self._n_sequences)
        if layout.n_leaves > self._n_sequences:
            raise OptionError(f"a draft tree with more leaves than the context's {self._n_sequences} sequences")
        self._batch.fill(
            (pending, *tree.tokens),
            layout.depths + len(self.tokens),
            layout.id_counts,
            layout.flat_ids,
            layout.outputs,
        )
        rows = self.context.decode(self._batch)
        self._tree, self._layout, self._pending = tree, layout, pending
        return rows

    def commit(self, path: Sequence[int]) -> None:
        """Keep the root and the nodes of `path` for every sequence, touching only the round's positions."""
        if self._tree is None or self._layout is None:
            raise OptionError("there is no evaluated tree to commit")
        tree, layout = self._tree, self._layout
        moves = moves_onto(tuple(path), tree.parents, self._n_sequences)
        root = len(self.tokens)
        end = root + 1 + len(path)
        memory = self.context.memory
        if tree.max_depth > len(path):
            memory.truncate(end)  # one walk drops everything deeper than the path, for all sequences
        if path:
            source = layout.ids[path[-1]][0]
            for sequence, shared, strays in moves:
                if strays:
                    memory.truncate(root + 1 + shared, end, sequence)
                memory.branch(source, sequence, root + 1 + shared, end)
        self.tokens.append(self._pending)
        self.tokens.extend(tree.tokens[node] for node in path)
        self._tree = None


def target_context_options(options: ContextOptions, drafter: DraftSize) -> ContextOptions:
    """Return the settings of a context that verifies this drafter's trees."""
    rows = drafter.max_nodes + 1
    return dataclasses.replace(
        options,
        n_sequences=drafter.max_leaves,
        n_outputs=max(rows, _HIDDEN_STATE_ROWS) if drafter.needs_hidden_states else rows,
        hidden_states=drafter.needs_hidden_states,
        layer_inputs=drafter.layer_inputs,
    )
