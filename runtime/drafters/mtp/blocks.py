"""Multi-token prediction (DeepSeek-V3): a target's own NextN blocks draft chains and trees."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Self, cast

import numpy as np

from specrun.bindings.contexts.context import MtpContext, StateBatch, check_nextn
from specrun.bindings.models.model import Model
from specrun.bindings.models.nextn import nextn_tensors
from specrun.runtime.drafters.batching import ContextPart, SharedDraftContext, share_text
from specrun.runtime.drafters.environment import DraftEnvironment
from specrun.runtime.drafters.growing.nodes import GrowingNodes, depth_shape
from specrun.runtime.drafters.growing.source import Asked, NodeRows
from specrun.runtime.drafters.states_source import Cells, StatesSource
from specrun.runtime.heads import FloatRows, RowPiece, TextRows
from specrun.runtime.laws.transform import Logits
from specrun.runtime.memory.fit import resolve_gpu_layers
from specrun.runtime.models.pairing import check_blocks
from specrun.runtime.planning.theory import multiplied
from specrun.runtime.round.drafter import DraftRequest
from specrun.runtime.round.target import EvaluatedRows
from specrun.runtime.trees.layout import count_leaves, layout_tree

# == Contexts ======================================================================================


class SharedNextn(SharedDraftContext):
    """A context over NextN blocks for several conversations, whose pairs are evaluated at once."""

    context: MtpContext
    batch: StateBatch

    def new_batch(self) -> StateBatch:
        """Return the batch of shared evaluations, with states beside the tokens."""
        width, n_sequences = self.context.model.n_embd_out, max(1, self.own.n_sequences)
        return StateBatch(self.context.n_batch, width, n_sequences)

    def new_part(self, number: int, *, copies: bool) -> NextnPart:
        """Return the part with a number, which nobody has."""
        return NextnPart(self, number, copies=copies)

    def fitting(self) -> list[ContextPart]:
        """Return the first requests of one block."""
        block = cast("NextnPart", self.asking[0]).block
        fits = super().fitting()
        return [*takewhile(lambda part: cast("NextnPart", part).block == block, fits)]

    def fill(self, parts: Sequence[ContextPart]) -> None:
        """Fill the shared batch, with the states beside the tokens; select the parts' block."""
        super().fill(parts)
        self.context.select(cast("NextnPart", parts[0]).block)
        first = 0
        for part in parts:
            asked = cast("StateBatch", part.given)
            n = asked.n_tokens
            self.batch.states[first : first + n] = asked.states[:n]
            first += n


class NextnPart(ContextPart):
    """The part of one conversation, and the NextN block of its next evaluation."""

    def __init__(self, shared: SharedNextn, number: int, *, copies: bool) -> None:
        super().__init__(shared, number, copies=copies)
        self.n_blocks, self.block = shared.context.n_blocks, 0

    def select(self, block: int) -> None:
        """Let the next evaluations use another block."""
        self.block = block


NextnCells = MtpContext | NextnPart
"""A conversation's context over NextN blocks: its own, or a part of one."""


# == The state of NextN blocks in one conversation: pairs of its text, then a round's drafts =======
#
# The pair of position j is the token x_j with the state that the target had after x_(j-1); position
# 0 has no state before it, and gets zeros, as in llama.cpp (common/speculative.cpp at 0c1e570: this
# evaluates in the same order). Drafts are paired with the blocks' own states. After each round
# their pairs make way for real ones of accepted tokens.


class MtpState(TextRows[None]):
    """The pairs of a text are rows of the target's states: that of position j is state j - 1's.

    So the first row is that of position -1, zeros. Cells are llama.cpp's, by position: a row's own
    is the one after its state's. A node is paired with its parent's state.

    With several blocks, block i predicts the i-th drafted token. Each has keys and values of its
    own for all pairs, but they share the cells: to let the next block write, positions are dropped,
    and the whole tree is evaluated again. The last token's pair stays pending, because only the
    first block has seen it when the draft ends.
    """

    def __init__(self, context: NextnCells) -> None:
        self.context = context
        self._several = context.n_blocks > 1
        n_sequences, width = context.options.n_sequences, context.model.n_embd_out
        # In an evaluation of a whole tree a node carries the sequences of all leaves below it.
        self.batch = StateBatch(context.n_batch, width, n_sequences if self._several else 1)
        chunk = self.batch.capacity
        super().__init__(self._evaluate_all, context.n_ctx, ahead=1, chunk=chunk)
        self._nodes = GrowingNodes(context.memory, n_sequences)
        self._last: tuple[int, FloatRows] = 0, self.batch.states[0]  # the last token's pair
        self._start = 0  # its position
        self._states: list[FloatRows] = []  # the blocks' own, after the root and the nodes
        # Of an evaluation: the rows that are read of it, and the text's pairs that it settles.
        self._asked: tuple[range, RowPiece | None] = range(0), None

    @property
    def base(self) -> int:
        """The position of the first pair: those before it were given up."""
        return super().base + 1

    def learn(self, start: int, rows: FloatRows, tokens: Sequence[int]) -> None:
        """Pair the states [n, width] of positions `start` on with the tokens after them."""
        if start == 0:
            start, rows = -1, np.concatenate([np.zeros_like(rows[:1]), rows])
        super().learn(start, rows, tokens)

    def copy(self, other: Self, base: int, count: int) -> bool:
        """Share or copy the cells of another text's pairs."""
        self._nodes.cut(0)
        return share_text(other.context, self.context, base + 1 + count)

    # -- evaluations -------------------------------------------------------------------------------

    def root(self, tokens: Sequence[int]) -> Logits | None:
        """Evaluate waiting pairs; return the logits after the last token, None if it is not known.

        The logits, as those of `below`, are a view that dies with the next evaluation.
        """
        known = self.fill_root(tokens)
        return self.taken(self.context.decode(self.batch))[0] if known else None

    def below(self, parents: Sequence[int], tokens: Sequence[int]) -> list[Logits] | None:
        """Evaluate nodes of one depth; return the logits after them, None without a block."""
        filled = self.fill_below(parents, tokens)
        return self.taken(self.context.decode(self.batch)) if filled else None

    def fill_root(self, tokens: Sequence[int]) -> bool:
        """Fill the batch with waiting pairs; return whether the last token's is known."""
        # The pairs of accepted drafts ride along with the last one: an evaluation of their own
        # would cost more.
        piece = self.due(tokens, 1 if self._several else self.context.n_outputs)
        if piece is None:
            return False
        self._make_room(piece)
        self._nodes.forget()
        self.context.select(0)
        pairs = list(zip(piece.tokens, piece.rows, strict=True))
        self._fill(pairs, piece.position + 1, with_rows=True)
        self._last, self._start, self._states = pairs[-1], len(tokens) - 1, []
        # With several blocks the others lack this pair, so it stays pending (see the class).
        self._asked = range(len(pairs) - 1, len(pairs)), None if self._several else piece
        return True

    def fill_below(self, parents: Sequence[int], tokens: Sequence[int]) -> bool:
        """Fill the batch with nodes; return whether there is a block for their depth."""
        depth = 1 + self._nodes.depth_of(parents[0])
        if self._several:
            if depth < self.context.n_blocks:
                self._fill_tree(parents, tokens)
            return depth < self.context.n_blocks
        text, batch = self._start + 1, self.batch
        ids = self._nodes.add(parents, tokens, 0, text)
        if len(ids) == 1:
            batch.fill_one(tokens[0], text + depth - 1, ids[0])
        else:
            batch.fill_shape(tokens, text + depth - 1, depth_shape(ids))
        for row, parent in enumerate(parents):
            batch.states[row] = self._states[parent + 1]
        self._asked = range(len(ids)), None
        return True

    def _fill_tree(self, parents: Sequence[int], tokens: Sequence[int]) -> None:
        """Fill the batch with all nodes for the block of the last depth, and the last token's pair.

        That block has not seen them.
        """
        nodes, batch = self._nodes, self.batch
        nodes.note(parents, tokens)
        nodes.cut(self._start)
        self.context.select(nodes.depths[-1])
        above = tuple(nodes.parents)
        layout = layout_tree(above, count_leaves(above))
        nodes.share_text(layout.n_leaves, self._start)
        batch.fill_shape([self._last[0], *nodes.tokens], self._start, layout.shape)
        batch.states[0] = self._last[1]
        for row, parent in enumerate(above, 1):
            batch.states[row] = self._states[parent + 1]
        n = 1 + len(above)
        self._asked = range(n - len(parents), n), None

    def taken(self, rows: EvaluatedRows) -> list[Logits]:
        """Keep the states of the rows that are read, and settle pairs; return their logits."""
        wanted, piece = self._asked
        if piece is not None:
            self.settle(piece)
        # Copies: the next decode overwrites the views before they are read.
        self._states += [np.array(rows.nextn_state(row)) for row in wanted]
        return [rows.logits(row) for row in wanted]

    def _evaluate_all(self, piece: RowPiece) -> None:
        """Put pairs into their cells, in every block."""
        pairs = list(zip(piece.tokens, piece.rows, strict=True))
        self._make_room(piece)
        for block in range(self.context.n_blocks):
            # The cells stay the same ones, or a block would lose its earlier cells.
            self._nodes.cut(piece.position + 1)
            self.context.select(block)
            self._fill(pairs, piece.position + 1, with_rows=False)
            self.context.decode(self.batch)

    def _make_room(self, piece: RowPiece) -> None:
        """Drop the cells at the pairs' positions and behind; everything before the first of all."""
        self._nodes.cut(piece.position + 1 if piece.count else 0)

    def _fill(self, pairs: Sequence[tuple[int, FloatRows]], start: int, *, with_rows: bool) -> None:
        n = len(pairs)
        if n == 1 and with_rows:
            self.batch.fill_one(pairs[0][0], start)
        else:
            tokens = [token for token, _ in pairs]
            self.batch.fill_chain(tokens, start, (0,), n if with_rows else 0)
        # Into the batch's own array: llama.cpp reads states from there, beside the tokens.
        for row, (_, state) in enumerate(pairs):
            self.batch.states[row] = state


# == The source of rows ============================================================================
#
# The blocks are the target's own, or of a file that holds them apart. They are shared; every
# conversation has a context over them, or a part of one.


_BLOCK_OUTPUT = "nextn.shared_head_head.weight"


class MtpSource(StatesSource[MtpState]):
    """NextN blocks, which draft from the target's hidden states; it owns the context.

    A model with one block uses it again and again, on its own states; one with several has a block
    for each depth. `n_params` are the parameters that drafting adds to the target's: the blocks',
    or those of a whole file of blocks; `depth_params` are those that a token multiplies.
    """

    needs_nextn_states = True

    def __init__(self, context: NextnCells, n_params: int = 0, depth_params: float = 0.0) -> None:
        super().__init__(MtpState(context), cast("Cells", context), n_params, depth_params)
        self.context = context
        self.shared = context if isinstance(context, NextnPart) else None

    def room(self, tokens: Sequence[int]) -> int:
        """Return how many cells are left behind the text."""
        return self.context.n_ctx - len(tokens)

    def root(self, request: DraftRequest, highest: int) -> NodeRows | None:
        """Evaluate the pairs that wait; None if the state before the last token is unknown."""
        row = self.state.root(request.tokens)
        return None if row is None else NodeRows([row])

    def below(self, parents: Sequence[int], tokens: Sequence[int]) -> NodeRows | None:
        """Evaluate nodes with the block of their depth; None below the last block."""
        rows = self.state.below(parents, tokens)
        return None if rows is None else NodeRows(rows)

    def copy_cells(self, other: Self, base: int, count: int) -> bool:
        """Share or copy the cells of the pairs."""
        return self.state.copy(other.state, base, count)

    def submit(self, request: DraftRequest, asked: Asked) -> bool:
        """Have a depth evaluated with others'; False without the state of this text, or a block."""
        assert isinstance(asked, tuple)
        assert self.shared is not None
        state = self.state
        filled = state.fill_below(*asked) if asked[1] else state.fill_root(request.tokens)
        if filled:
            self.shared.ask(state.batch)
        return filled

    def result(self) -> NodeRows | None:
        """Return the rows of the depth; None before it was evaluated."""
        rows = None if self.shared is None else self.shared.answered()
        return None if rows is None else NodeRows(self.state.taken(rows))


def multiplied_of_block(model: Model) -> float:
    """Return how many parameters a token multiplies in a NextN block and the output matrix.

    The blocks take turns. The output matrix is the model's if a block has none of its own.
    """
    blocks = nextn_tensors(model.path, model.header)
    own = multiplied(model.header, blocks) / max(1, model.nextn.count)
    has_output = any(tensor.name.endswith(_BLOCK_OUTPUT) for tensor in blocks)
    return own + (0 if has_output else model.n_embd * model.vocabulary.size)


def open_blocks(path: Path, env: DraftEnvironment) -> Model:
    """Open a file of NextN blocks; raises `PairError` if they were not made for such a target."""
    layers = resolve_gpu_layers(env.n_gpu_layers, path, drafts=True)
    model = Model(path, n_gpu_layers=layers, use_mmap=env.use_mmap, load_nextn=True, drafts=True)
    try:
        check_nextn(model)
        check_blocks(env.target, model)
    except BaseException:
        model.close()
        raise
    return model
