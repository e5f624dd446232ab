"""Comparison of two models of one vocabulary on one text: a quantized model and its source.

The text is scored as by llama.cpp's perplexity tool. It is cut into chunks of n_ctx tokens, each
evaluated alone; what is left over is not used. The first token of each chunk is replaced by the
model's beginning-of-sequence token where the model adds one. Logits after tokens n_ctx/2 to n_ctx -
2 are scored with the token that follows, so that each scored token has at least n_ctx/2 before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from specrun.bench.models.divergence import (
    DivergenceSummary,
    RowDivergence,
    row_divergence,
    summarise_rows,
)
from specrun.bindings.contexts.batch import Batch
from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import OptionError
from specrun.bindings.models.model import Model
from specrun.runtime.memory import LayerCount, resolve_gpu_layers
from specrun.runtime.models import check_same_vocabulary

ROWS_AT_ONCE = 64
"""The most rows of logits that are looked at together: 32 MB with a vocabulary of 128k tokens."""


@dataclass(frozen=True, slots=True)
class ComparisonOptions:
    """Chunks of `n_ctx` tokens, or of the training context where that is less, at most `n_chunks`.

    `n_chunks` 0 means all, `n_threads` 0 one a core.
    """

    n_ctx: int = 512
    n_chunks: int = 0
    n_threads: int = 0
    n_gpu_layers: LayerCount = 0

    def __post_init__(self) -> None:
        if self.n_ctx < 8:
            raise OptionError(f"n_ctx is {self.n_ctx}: a chunk needs at least 8 tokens")
        if self.n_chunks < 0:
            raise OptionError(f"n_chunks is {self.n_chunks}: give 0 (all) or a count")


@dataclass(frozen=True, slots=True)
class ModelComparison:
    """The figures over `n_chunks` chunks of `n_ctx` tokens."""

    n_chunks: int
    n_ctx: int
    summary: DivergenceSummary


def compare_models(
    original: Path,
    other: Path,
    text: str,
    options: ComparisonOptions | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ModelComparison:
    """Evaluate `text` with both models and compare their laws.

    `progress` gets chunks done and in all. Raises PairError unless both have the same vocabulary,
    OptionError if the text is too short, and as Model and Context do.
    """
    options = options or ComparisonOptions()
    with ExitStack() as stack:
        models = []
        for path in (original, other):
            n_gpu_layers = resolve_gpu_layers(options.n_gpu_layers, path)
            models.append(stack.enter_context(Model(path, n_gpu_layers=n_gpu_layers)))
        check_same_vocabulary(*models)
        vocabulary = models[0].vocabulary
        bos = vocabulary.bos if vocabulary.adds_bos else None
        n_ctx = min(options.n_ctx, *(model.n_ctx_train for model in models))
        chunks = cut_into_chunks(vocabulary.tokenize(text), n_ctx, bos)
        chunks = chunks[: options.n_chunks or None]
        length = len(chunks[0].tokens)
        settings = ContextOptions(
            n_ctx=length,
            n_batch=min(512, length),
            n_outputs=min(ROWS_AT_ONCE, length),
            n_threads=options.n_threads,
        )
        contexts = [stack.enter_context(Context(model, settings)) for model in models]
        parts: list[RowDivergence] = []
        for index, chunk in enumerate(chunks):
            parts += _compare_chunk(contexts, chunk)
            if progress is not None:
                progress(index + 1, len(chunks))
        return ModelComparison(len(chunks), length, summarise_rows(parts))


def _compare_chunk(contexts: list[Context], chunk: Chunk) -> list[RowDivergence]:
    parts, place = [], chunk.first + 1
    blocks = (scored_logits(context, chunk) for context in contexts)
    for first, other in zip(*blocks, strict=True):
        parts.append(row_divergence(first, other, chunk.tokens[place : place + len(first)]))
        place += len(first)
    return parts


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


def scored_logits(
    context: Context, chunk: Chunk, width: int = ROWS_AT_ONCE
) -> Iterator[npt.NDArray[np.float32]]:
    """Yield the scored logits of a chunk, shape [rows, vocab], `width` rows an evaluation at most.

    The context must have been made for chunks of this length and `width` outputs.
    """
    context.memory.clear()
    batch = Batch(max(context.n_batch, ROWS_AT_ONCE), 1)
    for start in range(0, chunk.first, context.n_batch):
        part = chunk.tokens[start : min(start + context.n_batch, chunk.first)]
        batch.fill_chain(part, start, [0], 0)
        context.decode(batch)
    last = len(chunk.tokens) - 1
    step = min(width, context.n_batch)
    for start in range(chunk.first, last, step):
        part = chunk.tokens[start : min(start + step, last)]
        batch.fill_chain(part, start, [0], len(part))
        rows = context.decode(batch)
        yield np.stack([rows.logits(row) for row in range(len(part))])
