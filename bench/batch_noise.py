"""Batch noise: how much a model's distributions depend on how many tokens an evaluation has.

Kernels round by the number of rows of a batch, so drafts change the last bits of the
target's logits, and now and then the next token of a greedy text. Here one text is evaluated
several times: after the same first tokens, one token at a time as in plain decoding, then 2, 3, ...
at a time. Each row has the same tokens before it; the only difference is rounding, that of the
cached keys and values too, as in a text that was drafted. Last it is evaluated in a fixed shape
(runtime/round/padding.py), where nothing may differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from specrun.bench.model_comparison import Chunk, log_laws
from specrun.bindings.contexts import Context, ContextOptions
from specrun.bindings.errors import OptionError, UnsupportedModelError
from specrun.bindings.models import Model
from specrun.runtime.memory import LayerCount, resolve_gpu_layers
from specrun.runtime.round import CachedText, FixedShapeTarget, fixed_shape_options
from specrun.runtime.trees import DraftTree
from specrun.runtime.tuning import scored_logits

WIDTHS = (2, 3, 4, 5, 8, 16)
"""Tokens at a time that are compared with one at a time: roots with drafts of 1 to 15 tokens."""

_BEFORE = 32  # tokens that are evaluated together before the first position that is compared
_FIXED = 8  # tokens in the evaluations of the fixed shape
_REAL = (1, 5)  # how many tokens of a fixed shape are the text's: without drafts, and with four

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class NoiseOptions:
    """At most `n_positions` are compared; their logits, [n_positions, n_vocab], are kept twice.

    The fields of `context` that follow from the text (its length, rows, sequences) are set here.
    """

    n_positions: int = 256
    context: ContextOptions = field(default_factory=ContextOptions)
    n_gpu_layers: LayerCount = 0

    def __post_init__(self) -> None:
        if self.n_positions < max(WIDTHS):
            problem = f"n_positions is {self.n_positions}: give {max(WIDTHS)} or more"
            raise OptionError(f"{problem}, the tokens of the widest evaluation")


@dataclass(frozen=True, slots=True)
class WidthNoise:
    """How far distributions move when `width` tokens are evaluated at a time instead of one.

    `logprob_...` are differences of log-probabilities in nats, absolute, over all tokens of all
    positions; `variation_...` total variations (half the sum of differences of probabilities, 0 to
    1) over positions. `other_top` is the share of positions with another most likely token, and
    `parts_after` 1 / `other_top`: the expected number of tokens until greedy texts part, None
    if no position differs.
    """

    width: int
    n_positions: int
    logprob_mean: float
    logprob_largest: float
    variation_mean: float
    variation_largest: float
    other_top: float
    parts_after: float | None


@dataclass(frozen=True, slots=True)
class FixedShapeBits:
    """Evaluations of `width` tokens, of which one is the text's, against those with five.

    At `n_equal` of `n_positions` all logits have the same bits; `largest` is the largest difference
    of logits, in nats. `left_out` is why nothing was compared, and is empty if something was.
    """

    width: int
    n_positions: int = 0
    n_equal: int = 0
    largest: float = 0.0
    left_out: str = ""


@dataclass(frozen=True, slots=True)
class BatchNoise:
    """The figures by width, at `n_positions` positions after the first `n_before` tokens."""

    n_before: int
    n_positions: int
    widths: tuple[WidthNoise, ...]
    fixed_shape: FixedShapeBits


def measure_batch_noise(
    path: Path,
    text: str,
    options: NoiseOptions | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> BatchNoise:
    """Evaluate `text` with the model at `path` in evaluations of one token, of more, and fixed.

    `progress` gets the number of times that the text was evaluated, and of those in all. Raises
    OptionError if the text or the model's context is too short, and as Model and Context do.
    """
    options = options or NoiseOptions()
    report = progress or (lambda _done, _total: None)
    n_steps = 1 + len(WIDTHS) + len(_REAL)
    with Model(path, n_gpu_layers=resolve_gpu_layers(options.n_gpu_layers, path)) as model:
        chunk = _chunk_of(model, text, options.n_positions)
        settings = dataclasses.replace(
            options.context,
            n_ctx=len(chunk.tokens) + _FIXED,  # a fixed shape's last evaluation is filled up
            n_batch=_BEFORE,
            n_outputs=max(WIDTHS),
        )
        with Context(model, settings) as context:
            alone = np.concatenate([*scored_logits(context, chunk.tokens, chunk.first, 1)])
            report(1, n_steps)
            found = []
            for width in WIDTHS:
                pieces = scored_logits(context, chunk.tokens, chunk.first, width)
                found.append(compare_rows(width, alone, pieces))
                report(1 + len(found), n_steps)
        del alone
        try:
            fixed = fixed_shape_bits(model, chunk, settings)
        except UnsupportedModelError as error:
            fixed = FixedShapeBits(_FIXED, left_out=str(error))
        report(n_steps, n_steps)
        return BatchNoise(chunk.first, chunk.n_scored, tuple(found), fixed)


def compare_rows(width: int, alone: Logits, pieces: Iterable[Logits]) -> WidthNoise:
    """Compare logits of `width` tokens at a time, in pieces, with those of one token at a time.

    `alone` has shape [n_positions, n_vocab], a piece [width, n_vocab]. A last piece of fewer tokens
    is not compared: its evaluation is one of another width.
    """
    means: list[float] = []
    largest: list[float] = []
    variations: list[npt.NDArray[np.float64]] = []
    other: list[npt.NDArray[np.bool_]] = []
    for start, piece in zip(range(0, len(alone), width), pieces, strict=True):
        if len(piece) == width:
            ours, theirs = log_laws(alone[start : start + width]), log_laws(piece)
            # Tokens of probability 0 in both (logits of -inf) do not differ.
            apart = np.zeros_like(ours)
            np.subtract(ours, theirs, out=apart, where=ours != theirs)
            np.abs(apart, out=apart)
            means.append(float(apart.mean()))
            largest.append(float(apart.max()))
            variations.append(np.abs(np.exp(ours) - np.exp(theirs)).sum(axis=1) / 2)
            other.append(ours.argmax(axis=1) != theirs.argmax(axis=1))
    variation, share = np.concatenate(variations), float(np.concatenate(other).mean())
    return WidthNoise(
        width=width,
        n_positions=len(variation),
        logprob_mean=float(np.mean(means)),
        logprob_largest=float(np.max(largest)),
        variation_mean=float(variation.mean()),
        variation_largest=float(variation.max()),
        other_top=share,
        parts_after=1 / share if share else None,
    )


def fixed_shape_bits(model: Model, chunk: Chunk, settings: ContextOptions) -> FixedShapeBits:
    """Evaluate a chunk in a fixed shape, one token at a time and five, and compare the bits.

    Raises UnsupportedModelError for recurrent models.
    """
    with Context(model, fixed_shape_options(model, settings, _FIXED)) as context:
        target = FixedShapeTarget(context, _FIXED)
        single, several = (np.concatenate([*_rows_of_rounds(target, chunk, n)]) for n in _REAL)
    return compare_bits(_FIXED, single[: len(several)], several)


def compare_bits(width: int, first: Logits, other: Logits) -> FixedShapeBits:
    """Compare logits of shape [n_positions, n_vocab] bit by bit."""
    same = (first.view(np.uint32) == other.view(np.uint32)).all(axis=1)
    apart = np.abs(first[~same] - other[~same])
    return FixedShapeBits(width, len(same), int(same.sum()), float(apart.max(initial=0.0)))


def _rows_of_rounds(target: FixedShapeTarget, chunk: Chunk, n_real: int) -> Iterator[Logits]:
    """Yield the logits of rounds whose drafts, of `n_real` - 1 tokens, are the text itself."""
    target.context.memory.clear()
    text = CachedText(chunk.tokens[: chunk.first])
    target.prefill(text, chunk.first)
    for place in range(chunk.first, len(chunk.tokens) - n_real, n_real):
        text.tokens.append(chunk.tokens[place])
        tree = DraftTree.chain([*chunk.tokens[place + 1 : place + n_real]])
        rows = target.evaluate(text, tree)
        yield np.stack([rows.logits(row) for row in range(n_real)])
        target.commit(text, tree, range(n_real - 1))


def _chunk_of(model: Model, text: str, n_positions: int) -> Chunk:
    """Return the text's first tokens: those that come before, the positions, the one after."""
    tokens = model.vocabulary.tokenize(text)
    least, room = _BEFORE + max(WIDTHS) + 1, model.n_ctx_train - _FIXED
    for what, n_tokens in (("the text has", len(tokens)), ("the model has room for", room)):
        if n_tokens < least:
            why = f"{_BEFORE} that come before and {max(WIDTHS)} to evaluate at once"
            raise OptionError(f"{what} {n_tokens} tokens: {least} are needed, {why}")
    return Chunk(tuple(tokens[: min(_BEFORE + n_positions + 1, room)]), _BEFORE)
