"""Chunks of a text, scored as by llama.cpp's perplexity tool: each alone, by its second half.

The text is cut into chunks of n_ctx tokens; what is left over is not used. The first token of each
chunk is replaced by the model's beginning-of-sequence token where the model adds one. Logits after
tokens n_ctx/2 to n_ctx - 2 are scored with the token that follows, so that each scored token has at
least n_ctx/2 before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specrun.bindings.batch import Batch
from specrun.bindings.context import Context
from specrun.bindings.errors import OptionError

ROWS_AT_ONCE = 64
"""The most rows of logits that are looked at together: 32 MB with a vocabulary of 128k tokens."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens evaluated together from position 0 on; logits from token `first` on are scored."""

    tokens: tuple[int, ...]
    first: int

    @property
    def n_scored(self) -> int:
        """The number of tokens whose probability counts."""
        return len(self.tokens) - self.first - 1


def cut_into_chunks(tokens: Sequence[int], n_ctx: int, bos: int | None) -> list[Chunk]:
    """Return the chunks of a text; one shorter than `n_ctx` is a chunk by itself.

    `bos` is the token that begins each chunk, None for none. Raises OptionError for a text of under
    8 tokens.
    """
    length = min(n_ctx, len(tokens))
    if length < 8:
        counts = f"{len(tokens)} tokens and a chunk {length}"
        raise OptionError(f"the text has {counts}: at least 8 are needed to compare")
    pieces = [tokens[start : start + length] for start in range(0, len(tokens), length)]
    return [
        Chunk((piece[0] if bos is None else bos, *piece[1:]), length // 2)
        for piece in pieces
        if len(piece) == length
    ]


def scored_logits(context: Context, chunk: Chunk) -> Iterator[npt.NDArray[np.float32]]:
    """Yield the scored logits of a chunk, shape [rows, vocab] of at most ROWS_AT_ONCE rows.

    The context must have been made for chunks of this length and ROWS_AT_ONCE outputs.
    """
    context.memory.clear()
    batch = Batch(max(context.n_batch, ROWS_AT_ONCE), 1)
    for start in range(0, chunk.first, context.n_batch):
        part = chunk.tokens[start : min(start + context.n_batch, chunk.first)]
        batch.fill_chain(part, start, [0], 0)
        context.decode(batch)
    last = len(chunk.tokens) - 1
    step = min(ROWS_AT_ONCE, context.n_batch)
    for start in range(chunk.first, last, step):
        part = chunk.tokens[start : min(start + step, last)]
        batch.fill_chain(part, start, [0], len(part))
        rows = context.decode(batch)
        yield np.stack([rows.logits(row) for row in range(len(part))])
