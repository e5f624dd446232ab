"""Comparison of two models of one vocabulary on one text: a quantized model and its source."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from specrun.bench.models.divergence import (
    DivergenceSummary,
    RowDivergence,
    row_divergence,
    summarise_rows,
)
from specrun.bench.models.scored_text import ROWS_AT_ONCE, Chunk, cut_into_chunks, scored_logits
from specrun.bindings.context import Context
from specrun.bindings.context_options import ContextOptions
from specrun.bindings.errors import OptionError
from specrun.bindings.model import Model
from specrun.runtime.offload import LayerCount, resolve_gpu_layers
from specrun.runtime.pairing import check_same_vocabulary


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
