"""What NextN blocks have cached: pairs of the committed text, and behind them a round's drafts.

The pair of position j is the token x_j with the state that the target had after x_(j-1); position 0 has no state before
it, and gets zeros, as in llama.cpp (common/speculative.cpp at 4df29be4f: this evaluates in the same order). Drafts are
paired with the blocks' own states. After each round their pairs make way for real ones of what was accepted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from specrun.bindings.context import Rows
from specrun.bindings.mtp_context import MtpContext, StateBatch
from specrun.runtime.prefix import common_prefix
from specrun.runtime.transform import Logits

__all__ = ["MtpState"]

FloatRows = npt.NDArray[np.float32]


class MtpState:
    """Pairs of positions `base` to `cached - 1` are cached; those up to the last known token wait with their states.

    With several blocks, block i predicts the i-th drafted token. Each has keys and values of its own for all pairs,
    but they share the cells: to let the next block write, positions are dropped and evaluated again.
    """

    def __init__(self, context: MtpContext) -> None:
        self.context = context
        self._batch = StateBatch(context.n_batch, context.model.n_embd_out)
        self._text: list[int] = []  # up to the last token whose pair is known
        self._base = 0
        self._cached = 0
        self._waiting: list[FloatRows] = []  # the states of the pairs from `cached` on
        self._last: tuple[int, FloatRows] | None = None  # the target's latest state, and its position
        self._chain: list[tuple[int, FloatRows]] = []  # the last token's pair and those of the drafts
        self._next_state: FloatRows = self._batch.states[0]

    def begin(self, tokens: Sequence[int]) -> None:
        """Keep the pairs that hold for a text."""
        self.cut(common_prefix(self._text, tokens))

    def cut(self, length: int) -> None:
        """Forget the tokens from position `length` on."""
        if length < len(self._text):
            del self._waiting[max(0, length - self._cached) :]
            del self._text[length:]
            self._cached = min(self._cached, length)
            self._chain = []
        if length <= self._base:
            self._restart([])
        if self._last is not None and self._last[0] >= length:
            self._last = None

    def learn(self, start: int, states: FloatRows, tokens: Sequence[int]) -> None:
        """Pair the states [n, width] of positions `start` on with the tokens after them; the states are kept.

        `tokens` is the whole text; nothing need follow the last state yet. Pairs that are known already stay. Where a
        state is missing before these, the earlier pairs are given up: the blocks then see less of the text, which costs
        acceptance and nothing else.
        """
        latest = start + len(states) - 1, states[-1]
        if start == 0 and not self._text:
            self._text, self._waiting = [tokens[0]], [np.zeros_like(states[0])]
        if start == len(self._text) and self._last is not None and self._last[0] == start - 1:
            start -= 1
            states = np.concatenate([self._last[1][np.newaxis], states])
        if start + 1 > len(self._text):
            self._restart(tokens[: start + 1])
        ready = len(self._text)
        end = min(start + 1 + len(states), len(tokens))
        if end > ready:
            self._chain = []
            self._waiting.extend(states[ready - start - 1 : end - start - 1])
            self._text.extend(tokens[ready:end])
        if not self._waiting and 0 < end == ready:  # its rows may be asked for again
            self._chain = [(self._text[-1], states[end - start - 2])]
        self._last = latest
        if len(self._waiting) > self._batch.capacity:
            self._catch_up(len(self._waiting) - 1)

    def _restart(self, text: Sequence[int]) -> None:
        self._text = list(text)
        self._base = self._cached = len(text)
        self._waiting, self._chain, self._last = [], [], None
        self.context.memory.clear()

    # -- drafting ----------------------------------------------------------------------------------------

    def root(self, tokens: Sequence[int]) -> Logits | None:
        """Evaluate what waits and return the logits after the last token, None where its pair is not known.

        The logits, as those of `after`, are a view that dies with the next evaluation.
        """
        if len(self._text) != len(tokens) or self._text[-1:] != list(tokens[-1:]):
            return None
        if not self._waiting:
            if not self._chain or self._cached < 1:
                return None
            self._waiting, self._cached = [self._chain[0][1]], self._cached - 1
        self.context.memory.truncate(self._cached)
        several = self.context.n_blocks > 1
        # The pairs of accepted drafts ride along with the last one: an evaluation of their own would cost more.
        joined = 1 if several else min(len(self._waiting), self.context.n_outputs)
        self._catch_up(len(self._waiting) - joined)
        self.context.select(0)
        pairs = list(zip(self._text[self._cached :], self._waiting, strict=True))
        rows = self._evaluate(pairs, self._cached, with_rows=True)
        if not several:
            self._cached, self._waiting = len(self._text), []
        self._chain = pairs[-1:]
        return self._keep_state(rows, joined - 1)

    def after(self, token: int) -> Logits:
        """Draft a token behind the last row and return the logits after it."""
        self._chain.append((token, self._next_state))
        if self.context.n_blocks == 1:
            position = len(self._text) + len(self._chain) - 2
            return self._keep_state(self._evaluate(self._chain[-1:], position, with_rows=True), 0)
        # The next block has not seen the pairs since the last token.
        self.context.memory.truncate(len(self._text) - 1)
        self.context.select(len(self._chain) - 1)
        rows = self._evaluate(self._chain, len(self._text) - 1, with_rows=True)
        return self._keep_state(rows, len(self._chain) - 1)

    def _keep_state(self, rows: Rows, row: int) -> Logits:
        self._next_state = np.array(rows.nextn_state(row))
        return rows.logits(row)

    def _catch_up(self, count: int) -> None:
        """Cache the first `count` pairs that wait, in every block."""
        n_blocks = self.context.n_blocks
        while count > 0:
            n = min(count, self._batch.capacity)
            tokens = self._text[self._cached : self._cached + n]
            pairs = list(zip(tokens, self._waiting[:n], strict=True))
            for block in range(n_blocks):
                self.context.memory.truncate(self._cached)
                self.context.select(block)
                self._evaluate(pairs, self._cached, with_rows=False)
            del self._waiting[:n]
            self._cached += n
            count -= n

    def _evaluate(self, pairs: Sequence[tuple[int, FloatRows]], start: int, *, with_rows: bool) -> Rows:
        n = len(pairs)
        tokens = [token for token, _ in pairs]
        self._batch.fill(tokens, range(start, start + n), None, [0] * n, [int(with_rows)] * n)
        for row, (_, state) in enumerate(pairs):
            self._batch.states[row] = state
        return self.context.decode(self._batch)
