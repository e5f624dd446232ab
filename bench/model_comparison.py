"""Comparison of two models of one vocabulary: distributions on one text, and errors of tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from specrun.bindings.contexts import Context, ContextOptions
from specrun.bindings.errors import OptionError
from specrun.bindings.gguf import TensorInfo, read_header
from specrun.bindings.models import Model
from specrun.convert.checkpoint import read_array
from specrun.runtime.memory import LayerCount, resolve_gpu_layers
from specrun.runtime.models import check_same_vocabulary
from specrun.runtime.tuning import ROWS_AT_ONCE, scored_logits

# == Perplexity and KL divergence of one model's distributions from another's ======================
#
# Standard errors are those of a mean over rows taken as independent.


Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RowDivergence:
    """Per row: both models' negative log-likelihood of the token that came, KL(P || Q) of the
    original's distribution P from the other's Q (all in nats), and whether their most likely token
    agrees.
    """

    original_nll: Floats
    other_nll: Floats
    kl: Floats
    same_top: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Perplexity:
    """exp of the mean negative log-likelihood, with its standard error."""

    value: float
    error: float


@dataclass(frozen=True, slots=True)
class DivergenceSummary:
    """Figures over all rows: KL in nats, `same_top` a share, `..._error` standard errors."""

    n_tokens: int
    original: Perplexity
    other: Perplexity
    kl_mean: float
    kl_error: float
    kl_median: float
    kl_99: float
    kl_largest: float
    same_top: float
    top_error: float


def row_divergence(
    original: npt.NDArray[Any], other: npt.NDArray[Any], tokens: Sequence[int]
) -> RowDivergence:
    """Compare logits of shape [rows, vocab]; `tokens` came after each row."""
    log_p, log_q = log_laws(original), log_laws(other)
    rows, came = np.arange(len(tokens)), np.asarray(tokens)
    p = np.exp(log_p)
    # A token of probability 0 in the original adds nothing, whatever the other model gives it.
    with np.errstate(invalid="ignore"):
        terms = np.where(p > 0, p * (log_p - log_q), 0.0)
    return RowDivergence(
        original_nll=-log_p[rows, came],
        other_nll=-log_q[rows, came],
        kl=np.maximum(terms.sum(axis=1), 0.0),  # below zero by rounding only
        same_top=log_p.argmax(axis=1) == log_q.argmax(axis=1),
    )


def summarise_rows(parts: Sequence[RowDivergence]) -> DivergenceSummary:
    """Return the figures over all rows; at least one is needed."""
    if not parts:
        raise OptionError("there is nothing to compare: the text is too short")
    kl = np.concatenate([part.kl for part in parts])
    same = np.concatenate([part.same_top for part in parts])
    share = float(same.mean())
    return DivergenceSummary(
        n_tokens=len(kl),
        original=_perplexity(np.concatenate([part.original_nll for part in parts])),
        other=_perplexity(np.concatenate([part.other_nll for part in parts])),
        kl_mean=float(kl.mean()),
        kl_error=_standard_error(kl),
        kl_median=float(np.median(kl)),
        kl_99=float(np.quantile(kl, 0.99, method="higher")),
        kl_largest=float(kl.max()),
        same_top=share,
        top_error=math.sqrt(share * (1 - share) / len(same)),
    )


def log_laws(logits: npt.NDArray[Any]) -> Floats:
    """Return log softmax of each row; the greatest logit is taken off so that exp stays finite."""
    rows = logits.astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
    return np.asarray(rows)


def _perplexity(nll: Floats) -> Perplexity:
    # A token given probability 0 makes it infinite, which is the right value.
    value = math.exp(min(float(nll.mean()), 700.0)) if np.isfinite(nll).all() else math.inf
    # By the delta method: the derivative of exp at the mean is the perplexity itself.
    return Perplexity(value, value * _standard_error(nll))


def _standard_error(values: Floats) -> float:
    if not np.isfinite(values).all():
        return math.inf
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else 0.0


# == The comparison: a quantized model and its source on one text ==================================
#
# The text is scored as by llama.cpp's perplexity tool. It is cut into chunks of n_ctx tokens, each
# evaluated alone; the rest is not used. The first token of each chunk is replaced by the model's
# beginning-of-sequence token if the model adds one. Logits after tokens n_ctx/2 to n_ctx - 2 are
# scored with the token that follows, so that each scored token has at least n_ctx/2 before it.


@dataclass(frozen=True, slots=True)
class ComparisonOptions:
    """Chunks of `n_ctx` tokens, or of the training context if that is less, at most `n_chunks`.

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
    """Evaluate `text` with both models and compare their distributions.

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
    blocks = (scored_logits(context, chunk.tokens, chunk.first) for context in contexts)
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


# == Relative root-mean-square errors of the tensors of two GGUF files =============================
#
# They are read and dequantized a piece at a time, so that memory does not grow with the tensors.


_PIECE = 1 << 20  # numbers at a time
_WHOLE = {"I8": "<i1", "I16": "<i2", "I32": "<i4", "I64": "<i8", "F64": "<f8"}


@dataclass(frozen=True, slots=True)
class TensorError:
    """A tensor's error: the rms of its differences from the original, over the original's rms.

    `relative_rms` is None if the two cannot be compared; `note` is then the reason.
    """

    name: str
    original_type: str | None
    other_type: str | None
    n_elements: int
    relative_rms: float | None
    note: str = ""


def tensor_errors(
    original: Path, other: Path, progress: Callable[[int, int], None] | None = None
) -> Iterator[TensorError]:
    """Yield each tensor's error in the original's order, then the tensors of the other file alone.

    `progress` gets the numbers compared so far and in all. Raises as `read_header` and `read_array`
    do.
    """
    ours = {tensor.name: tensor for tensor in read_header(original).tensors}
    theirs = {tensor.name: tensor for tensor in read_header(other).tensors}
    total = sum(tensor.n_elements for tensor in ours.values())
    done = 0
    for name, tensor in ours.items():
        yield _compare(original, tensor, other, theirs.get(name))
        done += tensor.n_elements
        if progress is not None:
            progress(done, total)
    for name, tensor in theirs.items():
        if name not in ours:
            note = "only in the second file"
            yield TensorError(name, None, tensor.type_name, tensor.n_elements, None, note)


def _compare(
    original: Path, tensor: TensorInfo, other: Path, two: TensorInfo | None
) -> TensorError:
    ours = tensor.name, tensor.type_name
    if two is None:
        return TensorError(*ours, None, tensor.n_elements, None, "only in the first file")

    def result(relative_rms: float | None, note: str = "") -> TensorError:
        return TensorError(*ours, two.type_name, tensor.n_elements, relative_rms, note)

    if tensor.shape != two.shape:
        shapes = (" x ".join(map(str, tensor.shape[::-1])) for tensor in (tensor, two))
        return result(None, "other shape: {} and {}".format(*shapes))
    if not (_is_known(tensor) and _is_known(two)):
        return result(None, "a type that cannot be read here")
    squares = errors = 0.0
    for a, b in zip(_pieces(original, tensor), _pieces(other, two), strict=True):
        wide = a.astype(np.float64)
        squares += float(np.dot(wide, wide))
        wide -= b
        errors += float(np.dot(wide, wide))
    if squares == 0.0:
        return result(0.0 if errors == 0.0 else math.inf)
    return result(math.sqrt(errors / squares))


def _is_known(tensor: TensorInfo) -> bool:
    if tensor.type_name in _WHOLE:
        return True
    if tensor.type_name not in GGMLQuantizationType.__members__:
        return False
    kind = GGMLQuantizationType[tensor.type_name]
    block, n_bytes = GGML_QUANT_SIZES[kind]
    try:  # gguf has more types than it can dequantize
        dequantize(np.zeros((1, n_bytes), np.uint8), kind)
    except (NotImplementedError, KeyError):
        return False
    return tensor.shape[0] % block == 0


def _pieces(path: Path, tensor: TensorInfo) -> Iterator[npt.NDArray[Any]]:
    """Yield the tensor's numbers, flat, in pieces that begin at the same rows for every type."""
    row = tensor.shape[0]
    n_rows = tensor.n_elements // row
    row_bytes = tensor.n_bytes // n_rows
    step = max(1, _PIECE // row)
    for start in range(0, n_rows, step):
        count = min(step, n_rows - start)
        raw = read_array(path, np.uint8, (count, row_bytes), tensor.offset + start * row_bytes)
        if tensor.type_name in _WHOLE:
            yield raw.reshape(-1).view(_WHOLE[tensor.type_name])
        else:
            yield dequantize(raw, GGMLQuantizationType[tensor.type_name]).reshape(-1)
