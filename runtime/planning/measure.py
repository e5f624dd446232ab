"""The cost of evaluations on this machine, measured by the number of tokens.

A size is evaluated twice in a row: the first time after another size, so that llama.cpp has to
rebuild its graph, then with the graph reused. Sizes are visited forwards and backwards in turn, so
that a machine that warms up or slows down does so for all of them. The least of a size's times
counts, for other programs only add to it; the distance of the median above it is the spread. A
size that contradicts its neighbours is measured again: a size that takes longer than a larger one
by more than the spread, of which a tenth counts at most (if times differ by more, their
least may be no better), or far more than the line between the sizes beside it. If that stays so, it
is a property of a kernel. All tokens give output rows, as a tree's do, at a position where a text
would be in the middle of its answer.

**First contact.** Nobody has to run `tune`: when a file is first loaded on a device,
`contact_curve` measures it for about two seconds, and keeps the curve for all later loads. Models
that take less than `WORTH_TIMING` for a token are left out: their rounds teach as much within a
moment.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from specrun.bindings.contexts.batch import Batch
from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import OptionError, SpecrunError
from specrun.bindings.models.model import Model
from specrun.runtime.memory import layers_here
from specrun.runtime.memory.fit import LoadOptions
from specrun.runtime.planning.curves import CostCurve
from specrun.runtime.planning.profile import load_curve, save_curve

MEASURED_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64)
_LARGEST = max(MEASURED_SIZES)
_FEWEST, _MOST = 3, 60  # passes
_PATIENCE = 4  # times the given seconds, after which fewer passes will do
# Times a single token: no tree yields so much more, so larger sizes are not measured.
_TOO_DEAR = 8.0
_MOST_SPREAD = 0.1  # that excuses a size from being doubted
_ABOVE = 1.3  # times the line between its neighbours, from which a size is doubted
_CHEAP = 10  # tokens, up to which a curve is measured at any price
# Doubtful sizes are measured again, at most so often, with its neighbours so many times each.
_DOUBTED, _AGAIN = 3, 3

CONTACT_SIZES = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 32)
"""Widths of the first contact: those on both sides of the steps that kernels are known to make."""
WORTH_TIMING = 2e-3
"""Seconds of a token from which a first contact measures."""
_LEAST_BYTES = 32 << 20  # of weights: fewer are read in less time than that everywhere
_CONTACT_SECONDS, _CONTACT_CTX, _CONTACT_BATCH = 2.0, 256, 64
_CALM = 0.2  # the median spread up to which times count: beyond it the machine was busy


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
    passes are made unless they take four times as long. `progress` receives the share that is done.
    """
    largest = max(sizes)
    if min(context.n_outputs, context.n_batch) < largest:
        problem = f"evaluations of {largest} tokens need a batch and output rows of that size"
        raise OptionError(problem)
    times = EvaluationTimes(context, max(0, min(depth, context.n_ctx - largest)))
    sizes = times.worth_measuring(sizes)
    started = time.perf_counter()
    for number in range(_MOST):
        for index, size in enumerate(sizes if number % 2 == 0 else reversed(sizes)):
            times.visit(size)
            passes = (number + (index + 1) / len(sizes)) / _FEWEST
            progress(min(1.0, passes, (time.perf_counter() - started) / seconds))
        elapsed = time.perf_counter() - started
        if elapsed >= seconds * (1 if number + 1 >= _FEWEST else _PATIENCE):
            break
    curve = times.curve(sizes)
    for _ in range(_DOUBTED):
        again = beside(doubted(curve), curve.sizes)
        for size in again * _AGAIN:
            times.visit(size)
        if not again:
            break
        curve = times.curve(sizes)
    progress(1.0)
    context.memory.clear()
    return curve


def doubted(curve: CostCurve) -> list[int]:
    """Return the sizes whose times contradict those of others."""
    sizes = curve.sizes

    def contradicts(times: tuple[float, ...], place: int) -> bool:
        behind = range(place + 1, len(sizes))
        spread = min(max((*curve.spread[place:], 0.0)), _MOST_SPREAD)
        if any(times[other] * (1.0 + spread) < times[place] for other in behind):
            return True
        if not 0 < place < len(sizes) - 1:
            return False
        (low, high), (a, b) = times[place - 1 : place + 2 : 2], sizes[place - 1 : place + 2 : 2]
        return times[place] > _ABOVE * (low + (high - low) * (sizes[place] - a) / (b - a))

    return [
        size
        for place, size in enumerate(sizes)
        if contradicts(curve.reused, place) or contradicts(curve.rebuilt, place)
    ]


def beside(doubtful: Sequence[int], sizes: tuple[int, ...]) -> list[int]:
    """Return these sizes with those next to them, which may be wrong."""
    places = {sizes.index(size) + step for size in doubtful for step in (-1, 0, 1)}
    return [size for place, size in enumerate(sizes) if place in places]


class EvaluationTimes:
    """Times evaluations behind `depth` cached tokens, by their size and the last evaluation.

    The context is emptied, and needs room and output rows as in `measure_cost_curve`.
    """

    def __init__(self, context: Context, depth: int) -> None:
        self._context, self._start = context, depth
        self._batch = Batch(context.n_batch, 1)
        self._reused: dict[int, list[float]] = {}
        self._rebuilt: dict[int, list[float]] = {}
        self._last = 0
        _fill(context, self._batch, depth)

    def visit(self, size: int) -> None:
        """Time a size after another one, and again; if passes turn it is the same size again."""
        first = self._reused if size == self._last else self._rebuilt
        first.setdefault(size, []).append(self._timed(size))
        self._reused.setdefault(size, []).append(self._timed(size))

    def least(self, size: int) -> float:
        """Return the least time of a size that was visited."""
        return min(self._reused[size])

    def curve(self, sizes: tuple[int, ...]) -> CostCurve:
        """Return the times: the least, and how far the medians lie above it."""
        reused = tuple(min(self._reused[size]) for size in sizes)
        # A single size never comes after another one.
        rebuilt = tuple(min(self._rebuilt.get(size, self._reused[size])) for size in sizes)
        medians = (statistics.median(self._reused[size]) for size in sizes)
        spread = (median / least - 1.0 for median, least in zip(medians, reused, strict=True))
        return CostCurve(sizes, reused, rebuilt, tuple(spread))

    def typical(self) -> CostCurve:
        """Return the medians of all sizes that were visited.

        Answers that were timed meanwhile have met the same disturbances: times that are compared
        with them must not be the least. One visit of a size gives a rebuilt and a reused time.
        """
        sizes = tuple(sorted(self._reused))
        reused = tuple(statistics.median(self._reused[size]) for size in sizes)
        rebuilt = tuple(
            statistics.median(self._rebuilt.get(size, self._reused[size])) for size in sizes
        )
        return CostCurve(sizes, reused, rebuilt)

    def worth_measuring(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Return the sizes up to the first that costs too much; touches all weights once."""
        self._timed(sizes[0])
        single = self._timed(sizes[0])
        for index, size in enumerate(sizes):
            # A size that seems too dear is looked at again, for it may have been disturbed.
            dear = (self._timed(size) > _TOO_DEAR * single for _ in range(_AGAIN))
            if all(dear) and size >= _CHEAP:
                return sizes[: index + 1]
        return sizes

    def is_slow(self) -> bool:
        """Return whether a token takes `WORTH_TIMING`; the first one touches all weights."""
        self._timed(1)
        return all(self._timed(1) >= WORTH_TIMING for _ in range(_AGAIN))

    def _timed(self, n: int) -> float:
        """Return the seconds of evaluating n tokens, and drop them again.

        Recurrent states drop nothing: their text goes on, and begins again when it is long.
        """
        context = self._context
        if self._start + n > context.n_ctx:
            context.memory.clear()
            self._start = 0
        start = self._start
        self._batch.fill_chain(_tokens(context, start, n), start, [0], n)
        # Time inside llama.cpp alone: Python's own is stated apart, in RoundCosts.
        before = context.native_seconds
        context.decode(self._batch)
        taken = context.native_seconds - before
        if context.model.can_branch:
            context.memory.truncate(start)
        else:
            self._start = start + n
        self._last = n
        return taken


def _fill(context: Context, batch: Batch, depth: int) -> None:
    """Cache `depth` tokens, in pieces that fit the batch."""
    context.memory.clear()
    for start in range(0, depth, context.n_batch):
        n = min(context.n_batch, depth - start)
        # One output row is enough: nobody reads these logits.
        batch.fill_chain(_tokens(context, start, n), start, [0], min(n, 1))
        context.decode(batch)


def _tokens(context: Context, start: int, n: int) -> list[int]:
    """Return n tokens of the vocabulary, different ones: experts of a mixture depend on them."""
    size = context.model.vocabulary.size
    # Steps of a prime spread over the whole vocabulary, and do not repeat within it.
    tokens: list[int] = (np.arange(start, start + n) * 7919 % size).tolist()
    return tokens


def target_curve(
    target: Path, loading: LoadOptions, *, seconds: float, again: bool = False
) -> CostCurve:
    """Return the curve of a model file with these settings: the stored one, or a new one, stored.

    With `again` it is measured in any case, and if only a first contact measured it.
    """
    layers = layers_here(target, loading)
    curve = None if again else load_curve(target, loading.context, layers)
    if curve is None or curve.is_first:
        curve = measure_target_costs(target, loading, seconds=seconds)
        save_curve(curve, target, loading.context, layers)
    return curve


@dataclasses.dataclass(frozen=True, slots=True)
class Contact:
    """The measured curve of an open model, None without one, and a line if it was measured now."""

    curve: CostCurve | None = None
    line: str = ""


def contact_curve(model: Model, context: ContextOptions, *, measures: bool = True) -> Contact:
    """Return the stored curve of a model with these settings, or measure and store a first one.

    Nothing is measured without `measures`, nor of models that take less than `WORTH_TIMING` for a
    token. Of a busy machine nothing is kept or used. Nothing raises but Ctrl-C:
    a model that cannot be measured is loaded all the same.
    """
    curve = load_curve(model.path, context, model.n_gpu_layers)
    if curve is not None or not measures or model.n_bytes < _LEAST_BYTES:
        return Contact(curve)
    started = time.perf_counter()
    n_ctx, most = min(_CONTACT_CTX, context.size_for(model)), max(CONTACT_SIZES)
    small = dataclasses.replace(
        context,
        n_ctx=n_ctx,
        n_batch=_CONTACT_BATCH,
        n_ubatch=_CONTACT_BATCH,
        n_outputs=most,
        n_sequences=1,
    )
    try:
        with Context(model, small) as opened:
            curve = first_curve(opened)
        if curve is None:
            return Contact()
        if statistics.median(curve.spread) > _CALM:
            busy = "this machine is too busy to measure the cost of evaluations"
            return Contact(None, f"{busy}: a later load tries again (--no-measure does not)")
        save_curve(curve, model.path, context, model.n_gpu_layers)
    except (SpecrunError, OSError) as problem:
        return Contact(None, f"the cost of evaluations was not measured here: {problem}")
    return Contact(curve, _contact_line(curve, time.perf_counter() - started))


def first_curve(context: Context, *, seconds: float = _CONTACT_SECONDS) -> CostCurve | None:
    """Return the curve of a context that was not measured before; None if it is fast.

    All sizes are visited, up to the first that is too dear, then again, then those that contradict
    others once more: of a slow model as many as there is time for.
    """
    times = EvaluationTimes(context, min(_CONTACT_BATCH, context.n_ctx - max(CONTACT_SIZES)))
    if not times.is_slow():
        return None
    started, visited = time.perf_counter(), list[int]()

    def is_late() -> bool:
        return time.perf_counter() - started > seconds

    for size in CONTACT_SIZES:
        times.visit(size)
        visited.append(size)
        dear = times.least(size) > _TOO_DEAR * times.least(1)
        if size >= _CHEAP and (dear or is_late()):
            break
    sizes = tuple(visited)
    for again in (sizes, ()):
        for size in again or beside(doubted(times.curve(sizes)), sizes):
            if not is_late():
                times.visit(size)
    return dataclasses.replace(times.curve(sizes), is_first=True)


def _contact_line(curve: CostCurve, seconds: float) -> str:
    """Describe a first contact: the measured facts and their consequences."""
    most = curve.sizes[-1]
    cost = curve.seconds(most) / curve.seconds(1)
    filled = [n for n in range(2, most) if curve.wider(n, most) > n]
    padded = f", and {filled[0]} less than more of them: batches are filled up" if filled else ""
    return (
        f"measured once in {seconds:.1f} s: {most} tokens take {cost:.1f} times as long as one"
        f"{padded} (--no-measure leaves this out)"
    )


def measure_target_costs(
    target: Path,
    loading: LoadOptions,
    *,
    seconds: float = 12.0,
    progress: Callable[[float], None] = lambda _: None,
) -> CostCurve:
    """Return the target's cost curve with these settings, measured in about so many seconds.

    `progress` receives the share that is done. Raises as `Model` and `Context` do.
    """
    layers = layers_here(target, loading)
    with Model(target, n_gpu_layers=layers, use_mmap=loading.use_mmap) as model:
        options = dataclasses.replace(sized_to_measure(loading.context, model), n_outputs=_LARGEST)
        with Context(model, options) as opened:
            return measure_cost_curve(opened, seconds=seconds, progress=progress)


def sized_to_measure(context: ContextOptions, model: Model) -> ContextOptions:
    """Return the settings of a context of the model's size whose batch holds all MEASURED_SIZES."""
    n_batch = max(_LARGEST, context.n_batch)
    return dataclasses.replace(context, n_ctx=context.size_for(model), n_batch=n_batch)
