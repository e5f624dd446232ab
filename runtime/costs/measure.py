"""Measuring what evaluations cost on this machine, by the number of tokens.

A size is evaluated twice in a row: the first time after another size, so that llama.cpp has to
rebuild its graph, then with the graph reused. Sizes are visited forwards and backwards in turn, so
that a machine that warms up or slows down does so for all of them, and the medians are taken. All
tokens give output rows, as a tree's do, at a position where a text would be in the middle of its
answer.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from specrun.bindings.batch import Batch
from specrun.bindings.context import Context
from specrun.bindings.context_options import ContextOptions
from specrun.bindings.errors import OptionError
from specrun.bindings.model import Model
from specrun.runtime.costs.curves import CostCurve
from specrun.runtime.offload import LayerCount, resolve_gpu_layers
from specrun.runtime.pairing import check_draftable

MEASURED_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64)
_LARGEST = max(MEASURED_SIZES)
_FEWEST, _MOST = 3, 60  # passes
_PATIENCE = 4  # times the given seconds, after which fewer passes will do
# Times a single token: no tree yields so much more, so larger sizes are not measured.
_TOO_DEAR = 8.0


def measure_cost_curve(
    context: Context,
    *,
    seconds: float,
    sizes: tuple[int, ...] = MEASURED_SIZES,
    depth: int = 256,
    progress: Callable[[float], None] = lambda _: None,
) -> CostCurve:
    """Return the curve of a context, which is left empty, in about so many seconds.

    The context needs output rows for the largest size, and room for it after `depth` tokens. Three
    passes are made unless they take four times as long. `progress` is told the share that is done.
    """
    largest = max(sizes)
    if min(context.n_outputs, context.n_batch) < largest:
        problem = f"evaluations of {largest} tokens need a batch and output rows of that size"
        raise OptionError(problem)
    depth = max(0, min(depth, context.n_ctx - largest))
    batch = Batch(context.n_batch, 1)
    _fill(context, batch, depth)
    sizes = _worth_measuring(context, batch, depth, sizes)
    rebuilt: dict[int, list[float]] = {size: [] for size in sizes}
    reused: dict[int, list[float]] = {size: [] for size in sizes}
    started = time.perf_counter()
    for number in range(_MOST):
        for index, size in enumerate(sizes if number % 2 == 0 else reversed(sizes)):
            rebuilt[size].append(_timed(context, batch, depth, size))
            reused[size].append(_timed(context, batch, depth, size))
            passes = (number + (index + 1) / len(sizes)) / _FEWEST
            progress(min(1.0, passes, (time.perf_counter() - started) / seconds))
        elapsed = time.perf_counter() - started
        if elapsed >= seconds * (1 if number + 1 >= _FEWEST else _PATIENCE):
            break
    progress(1.0)
    context.memory.clear()
    # Medians: a pause of the machine lengthens single passes, and a mean would take it in.
    medians = (
        tuple(statistics.median(times[size]) for size in sizes) for times in (reused, rebuilt)
    )
    return CostCurve(sizes, *medians)


def _worth_measuring(
    context: Context, batch: Batch, depth: int, sizes: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the sizes up to the first that costs too much; touches all weights once."""
    _timed(context, batch, depth, sizes[0])
    single = _timed(context, batch, depth, sizes[0])
    for index, size in enumerate(sizes):
        # Index 8 is size 10 of MEASURED_SIZES: up to there the curve is measured at any price.
        if _timed(context, batch, depth, size) > _TOO_DEAR * single and index >= 8:
            return sizes[: index + 1]
    return sizes


def _fill(context: Context, batch: Batch, depth: int) -> None:
    """Cache `depth` tokens, in pieces that fit the batch."""
    context.memory.clear()
    for start in range(0, depth, context.n_batch):
        n = min(context.n_batch, depth - start)
        # One output row is enough: nobody reads these logits.
        batch.fill_chain(_tokens(context, start, n), start, [0], min(n, 1))
        context.decode(batch)


def _timed(context: Context, batch: Batch, start: int, n: int) -> float:
    """Return the seconds of evaluating n tokens at position `start`, and drop them again."""
    batch.fill_chain(_tokens(context, start, n), start, [0], n)
    # Time inside llama.cpp alone: Python's own is stated apart, in RoundCosts.
    before = context.native_seconds
    context.decode(batch)
    taken = context.native_seconds - before
    context.memory.truncate(start)
    return taken


def _tokens(context: Context, start: int, n: int) -> list[int]:
    """Return n tokens of the vocabulary, different ones: experts of a mixture depend on them."""
    size = context.model.vocabulary.size
    # Steps of a prime spread over the whole vocabulary, and do not repeat within it.
    tokens: list[int] = (np.arange(start, start + n) * 7919 % size).tolist()
    return tokens


def measure_target_costs(
    target: Path,
    context: ContextOptions,
    *,
    n_gpu_layers: LayerCount = "auto",
    seconds: float = 12.0,
    use_mmap: bool = True,
    progress: Callable[[float], None] = lambda _: None,
) -> CostCurve:
    """Return the target's cost curve with these settings, measured in about so many seconds.

    `progress` is told the share that is done. Raises as `Model` and `Context` do, and
    UnsupportedModelError for a model that cannot verify drafts.
    """
    layers = resolve_gpu_layers(n_gpu_layers, target)
    with Model(target, n_gpu_layers=layers, use_mmap=use_mmap) as model:
        check_draftable(model)
        options = dataclasses.replace(sized_to_measure(context, model), n_outputs=_LARGEST)
        with Context(model, options) as opened:
            return measure_cost_curve(opened, seconds=seconds, progress=progress)


def sized_to_measure(context: ContextOptions, model: Model) -> ContextOptions:
    """Return the settings of a context of the model's size whose batch holds all MEASURED_SIZES."""
    n_batch = max(_LARGEST, context.n_batch)
    return dataclasses.replace(context, n_ctx=context.size_for(model), n_batch=n_batch)
