"""Multi-token prediction (DeepSeek-V3): a target's own NextN blocks draft a chain."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from specrun.bindings.contexts.context import MtpContext, StateBatch, check_nextn
from specrun.bindings.contexts.rows import Rows
from specrun.bindings.models.model import Model
from specrun.bindings.models.nextn import nextn_tensors
from specrun.runtime.drafters.environment import DraftEnvironment
from specrun.runtime.drafters.source import NodeRows
from specrun.runtime.drafters.states_source import StatesSource
from specrun.runtime.heads import FloatRows, RowPiece, TextRows
from specrun.runtime.laws.transform import Logits
from specrun.runtime.memory.fit import resolve_gpu_layers
from specrun.runtime.models.pairing import check_blocks
from specrun.runtime.planning.theory import multiplied
from specrun.runtime.round.drafter import DraftRequest
from specrun.runtime.round.target import EvaluatedRows

# == The state of NextN blocks in one conversation: pairs of its text, then a round's drafts =======
#
# The pair of position j is the token x_j with the state that the target had after x_(j-1); position
# 0 has no state before it, and gets zeros, as in llama.cpp (common/speculative.cpp at 0c1e570: this
# evaluates in the same order). Drafts are paired with the blocks' own states. After each round
# their pairs make way for real ones of what was accepted.


class MtpState(TextRows[None]):
    """The pairs of a text are rows of the target's states: that of position j is state j - 1's.

    So the first row is that of position -1, zeros. Cells are llama.cpp's, by position: a row's own
    is the one after its state's. With several blocks, block i predicts the i-th drafted token. Each
    has keys and values of its own for all pairs, but they share the cells: to let the next block
    write, positions are dropped and evaluated again, and the last token's pair stays pending,
    because only the first block has seen it when the draft ends.
    """

    def __init__(self, context: MtpContext) -> None:
        self.context = context
        self._batch = StateBatch(context.n_batch, context.model.n_embd_out)
        chunk = self._batch.capacity
        super().__init__(self._evaluate_all, context.n_ctx, ahead=1, chunk=chunk)
        # The last token's pair and those of the drafts.
        self._chain: list[tuple[int, FloatRows]] = []
        self._start = 0  # the position of the first of them
        self._next_state: FloatRows = self._batch.states[0]

    @property
    def base(self) -> int:
        """The position of the first pair: those before it were given up."""
        return super().base + 1

    def learn(self, start: int, rows: FloatRows, tokens: Sequence[int]) -> None:
        """Pair the states [n, width] of positions `start` on with the tokens after them."""
        if start == 0:
            start, rows = -1, np.concatenate([np.zeros_like(rows[:1]), rows])
        super().learn(start, rows, tokens)

    def root(self, tokens: Sequence[int]) -> Logits | None:
        """Evaluate what waits; return the logits after the last token, None if it is not known.

        The logits, as those of `after`, are a view that dies with the next evaluation.
        """
        several = self.context.n_blocks > 1
        # The pairs of accepted drafts ride along with the last one: an evaluation of their own
        # would cost more.
        piece = self.due(tokens, 1 if several else self.context.n_outputs)
        if piece is None:
            return None
        self._make_room(piece)
        self.context.select(0)
        pairs = list(zip(piece.tokens, piece.rows, strict=True))
        rows = self._decode(pairs, piece.position + 1, with_rows=True)
        # With several blocks the others lack this pair, so it stays pending (see the class).
        if not several:
            self.settle(piece)
        self._chain, self._start = pairs[-1:], len(tokens) - 1
        return self._keep_state(rows, len(pairs) - 1)

    def after(self, token: int) -> Logits | None:
        """Draft a token behind the last row; return the logits after it, None without a block."""
        if self.context.n_blocks > 1 and len(self._chain) == self.context.n_blocks:
            return None
        self._chain.append((token, self._next_state))
        if self.context.n_blocks == 1:
            position = self._start + len(self._chain) - 1
            return self._keep_state(self._decode(self._chain[-1:], position, with_rows=True), 0)
        # The next block has not seen the pairs since the last token.
        self.context.memory.truncate(self._start)
        self.context.select(len(self._chain) - 1)
        rows = self._decode(self._chain, self._start, with_rows=True)
        return self._keep_state(rows, len(self._chain) - 1)

    def _keep_state(self, rows: Rows, row: int) -> Logits:
        # A copy: the next decode overwrites the view before it is read.
        self._next_state = np.array(rows.nextn_state(row))
        return rows.logits(row)

    def _evaluate_all(self, piece: RowPiece) -> None:
        """Put pairs into their cells, in every block."""
        pairs = list(zip(piece.tokens, piece.rows, strict=True))
        self._make_room(piece)
        for block in range(self.context.n_blocks):
            # The cells stay the same ones, or a block would lose what it wrote before.
            self.context.memory.truncate(piece.position + 1)
            self.context.select(block)
            self._decode(pairs, piece.position + 1, with_rows=False)

    def _make_room(self, piece: RowPiece) -> None:
        """Drop what lies where the pairs belong and behind; everything before the first of all."""
        if piece.count:
            self.context.memory.truncate(piece.position + 1)
        else:
            self.context.memory.clear()

    def _decode(
        self, pairs: Sequence[tuple[int, FloatRows]], start: int, *, with_rows: bool
    ) -> Rows:
        n = len(pairs)
        if n == 1 and with_rows:
            self._batch.fill_one(pairs[0][0], start)
        else:
            tokens = [token for token, _ in pairs]
            self._batch.fill_chain(tokens, start, (0,), n if with_rows else 0)
        # Into the batch's own array: llama.cpp reads states from there, beside the tokens.
        for row, (_, state) in enumerate(pairs):
            self._batch.states[row] = state
        return self.context.decode(self._batch)


# == The source of rows ============================================================================
#
# The blocks are the target's own, or of a file that holds them apart. They are shared; every
# conversation has a context over them.


_BLOCK_OUTPUT = "nextn.shared_head_head.weight"


class MtpSource(StatesSource[MtpState]):
    """NextN blocks, which draft chains from the target's hidden states; it owns the context.

    A model with one block uses it again and again, on its own states; one with several has a block
    for each token. `n_params` are the parameters that drafting adds to the target's: the blocks',
    or those of a whole file of blocks; `depth_params` are those that a token multiplies.
    """

    needs_nextn_states = True

    def __init__(self, context: MtpContext, n_params: int = 0, depth_params: float = 0.0) -> None:
        super().__init__(MtpState(context), context, n_params, depth_params)
        self.context = context

    def room(self, tokens: Sequence[int]) -> int:
        """Return how many cells are left behind the text."""
        return self.context.n_ctx - len(tokens)

    def root(self, request: DraftRequest, highest: int) -> NodeRows | None:
        """Evaluate the pairs that wait; None if the state before the last token is unknown."""
        row = self.state.root(request.tokens)
        return None if row is None else NodeRows([row])

    def below(self, parents: Sequence[int], tokens: Sequence[int]) -> NodeRows | None:
        """Evaluate a token with the block of its depth; None below the last block."""
        row = self.state.after(tokens[0])
        return None if row is None else NodeRows([row])

    def read_states(self, rows: EvaluatedRows, wanted: Sequence[int]) -> FloatRows:
        """Return a copy [n, width] of the rows that the blocks read."""
        return np.stack([rows.nextn_state(row) for row in wanted])


def multiplied_of_block(model: Model) -> float:
    """Return how many parameters a token multiplies in a NextN block and the output matrix.

    The blocks take turns. The output matrix is the model's where a block has none of its own.
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
