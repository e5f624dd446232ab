"""Conversion, quantization and importance matrices, each timed in turn with a baseline.

- `checkpoint`: a bfloat16 checkpoint to F16, beside copying its files.
- `quantize`: an F16 model to Q4_K_M, beside llama.cpp's own API called directly.
- `imatrix`: sums of squared inputs for an importance matrix, beside plain evaluation.

Sources were just written or read, so they come from the page cache where there is room; everything
that is written is on the disk (fsync) when the clock stops. Adding a measurement takes a function
and a row of `MEASUREMENTS`.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from measure.convert.child import run_child, sync
from measure.convert.made_model import write_checkpoint, write_f16_model
from specrun.bench.timing import Ratio, Spread, interleaved, ratio_of, spread_of
from specrun.bindings.contexts.batch import Batch
from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.contexts.input_observer import InputObserver
from specrun.bindings.errors import OptionError
from specrun.bindings.files import require_free_space
from specrun.bindings.models.model import Model
from specrun.convert.names import nearest

# Budgets: conversion and quantization are to reach these shares of their baselines' bandwidth, and
# to take no more memory than this beyond the largest tensor, or as a multiple of the direct call's.
SHARE_OF_COPY, SHARE_OF_DIRECT = 0.5, 0.9
MEMORY_BEYOND_LARGEST, MEMORY_OF_DIRECT = 2 << 30, 1.2

FILE_TYPE = "Q4_K_M"  # the quantization that is downloaded most
_LEAST_BYTES = 10**9  # of less, starting takes longer than copying
_LARGEST_TENSOR = 4 * 8192 * 2048  # an upper bound for what write_checkpoint makes, as float32
_CHUNK_TOKENS = 512  # llama-imatrix's chunk size
_CHUNKS = 2

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """A checkpoint of `n_bytes` is made in `folder`, which its owner empties afterwards."""

    n_bytes: int
    repetitions: int
    n_threads: int
    folder: Path

    def __post_init__(self) -> None:
        if self.repetitions < 1:
            raise OptionError(f"{self.repetitions} repetitions: give at least 1")


@dataclass(frozen=True, slots=True)
class ConvertResult:
    """One row: `seconds` for reading `n_bytes_in` and writing `n_bytes_out`, to the disk.

    `bandwidth` is bytes read a second. `of_baseline` compares it with `baseline`'s in the same
    repetitions; `budget` is what it should reach. `peak_bytes` is the most memory of a process that
    did nothing else, `peak_budget` what that should stay below. None: not measured, or no budget.
    """

    name: str
    n_bytes_in: int
    n_bytes_out: int
    seconds: Spread
    bandwidth: Spread
    baseline: str | None = None
    of_baseline: Ratio | None = None
    budget: float | None = None
    peak_bytes: int | None = None
    peak_budget: int | None = None
    note: str = ""

    @property
    def within_budget(self) -> bool | None:
        """Whether every budget is kept; None where there is none."""
        kept = []
        if self.budget is not None and self.of_baseline is not None:
            kept.append(self.of_baseline.value >= self.budget)
        if self.peak_budget is not None and self.peak_bytes is not None:
            kept.append(self.peak_bytes <= self.peak_budget)
        return all(kept) if kept else None


Rows = tuple[ConvertResult, ConvertResult]
"""The row of the baseline, and that of what is compared with it."""


def measure(
    names: Sequence[str], options: ConvertOptions, progress: Progress
) -> Iterator[ConvertResult]:
    """Yield the rows of the named measurements, of all if none is named.

    `progress` is told what is under way. Raises OptionError for an unknown name.
    """
    for name in names:
        if name not in MEASUREMENTS:
            raise OptionError(f"there is no measurement {name!r}{nearest(name, MEASUREMENTS)}")
    for name, measurement in MEASUREMENTS.items():
        if name in names or not names:
            yield from measurement(options, progress)


def _checkpoint(options: ConvertOptions, progress: Progress) -> Rows:
    """Convert a bfloat16 checkpoint to F16, beside a copy of its files in the same folder."""
    require_free_space(options.folder, 3 * options.n_bytes)
    source, copies = options.folder / "source", options.folder / "copies"
    source.mkdir()
    copies.mkdir()
    progress(f"making a checkpoint of {options.n_bytes / 1e9:.2f} GB")
    n_bytes = write_checkpoint(source, options.n_bytes)
    convert = partial(_in_child, "convert", source, options.folder / "model.gguf")
    arms = {"copy": partial(_copy, source, copies, n_bytes), "checkpoint to F16": convert}
    copied, converted = _compare(arms, n_bytes, options, progress)
    large = n_bytes >= _LEAST_BYTES
    return copied, replace(
        converted,
        budget=SHARE_OF_COPY if large else None,
        peak_budget=MEMORY_BEYOND_LARGEST + _LARGEST_TENSOR,
        note="" if large else "the budget is for checkpoints of at least 1 GB",
    )


def _quantize(options: ConvertOptions, progress: Progress) -> Rows:
    """Quantize a model as users do (plan, process, check), beside llama.cpp's call alone."""
    source, output = options.folder / "f16.gguf", options.folder / "quantized.gguf"
    n_bytes = _made_model(source, options, progress)
    arms = {
        name: partial(_in_child, job, source, output, FILE_TYPE, str(options.n_threads))
        for name, job in (
            ("llama.cpp's API", "quantize directly"),
            (f"model to {FILE_TYPE}", "quantize"),
        )
    }
    direct, ours = _compare(arms, n_bytes, options, progress)
    source.unlink()
    return direct, replace(
        ours,
        budget=SHARE_OF_DIRECT,
        peak_budget=round(MEMORY_OF_DIRECT * (direct.peak_bytes or 0)),
        note="memory is that of both its processes added up, mapped pages of the model included.",
    )


def _imatrix(options: ConvertOptions, progress: Progress) -> Rows:
    """Evaluate chunks of tokens with the sums of an importance matrix, and without."""
    source = options.folder / "evaluated.gguf"
    n_bytes = _made_model(source, options, progress)
    observer = InputObserver(lambda name: name.startswith("blk."))
    sizes = ContextOptions(
        n_ctx=_CHUNK_TOKENS, n_outputs=_CHUNK_TOKENS, n_threads=options.n_threads
    )
    with ExitStack() as opened:
        model = opened.enter_context(Model(source))
        random = np.random.default_rng(0)
        tokens = random.integers(0, model.vocabulary.size, (_CHUNKS, _CHUNK_TOKENS), np.int32)
        plain = opened.enter_context(Context(model, sizes))
        observed = opened.enter_context(Context(model, sizes, observer=observer))
        for context in (plain, observed):  # the first reserves memory and reads weights from disk
            _evaluate(context, tokens[:1], None)
        observer.take()
        arms = {
            "plain evaluation": partial(_evaluate, plain, tokens, None),
            "importance matrix": partial(_evaluate, observed, tokens, observer),
        }
        baseline, summed = _compare(arms, _CHUNKS * n_bytes, options, progress)
    source.unlink()
    extra = 1 / summed.of_baseline.value - 1 if summed.of_baseline is not None else 0.0
    note = (
        f"{100 * extra:.1f} % over plain evaluation of {_CHUNKS} chunks of {_CHUNK_TOKENS} tokens; "
        "the model is read once for each."
    )
    return baseline, replace(summed, note=note)


MEASUREMENTS: Mapping[str, Callable[[ConvertOptions, Progress], Rows]] = {
    "checkpoint": _checkpoint,
    "quantize": _quantize,
    "imatrix": _imatrix,
}
"""What can be measured, by name, in this order."""


@dataclass(frozen=True, slots=True)
class _Run:
    seconds: float
    n_bytes_out: int
    peak_bytes: int | None = None


def _compare(
    arms: Mapping[str, Callable[[], _Run]],
    n_bytes: int,
    options: ConvertOptions,
    progress: Progress,
) -> Rows:
    """Run two arms in turn, each reading `n_bytes`; the first is the second's baseline."""
    names, runs = list(arms), [list[_Run]() for _ in arms]
    for repetition, arm in interleaved(len(arms), options.repetitions):
        progress(f"{names[arm]}, {repetition + 1} of {options.repetitions}")
        runs[arm].append(arms[names[arm]]())
    rates = [[n_bytes / run.seconds for run in own] for own in runs]
    first, second = (
        ConvertResult(
            name=name,
            n_bytes_in=n_bytes,
            n_bytes_out=own[-1].n_bytes_out,
            seconds=spread_of([run.seconds for run in own]),
            bandwidth=spread_of(rate),
            peak_bytes=max((run.peak_bytes for run in own if run.peak_bytes), default=None),
        )
        for name, own, rate in zip(names, runs, rates, strict=True)
    )
    return first, replace(second, baseline=names[0], of_baseline=ratio_of(rates[1], rates[0]))


def _copy(source: Path, target: Path, n_bytes: int) -> _Run:
    """Copy the weights as `cp` would, down to the disk."""
    started = time.perf_counter()
    for path in sorted(source.glob("*.safetensors")):
        shutil.copyfile(path, target / path.name)
        sync(target / path.name)
    seconds = time.perf_counter() - started
    for path in target.iterdir():
        path.unlink()
    return _Run(seconds, n_bytes)


def _in_child(job: str, source: Path, output: Path, *arguments: str) -> _Run:
    run = run_child(job, str(source), str(output), *arguments)
    written = output.stat().st_size
    output.unlink()
    return _Run(run.seconds, written, run.peak_bytes)


def _evaluate(
    context: Context, chunks: npt.NDArray[np.int32], observer: InputObserver | None
) -> _Run:
    """Evaluate chunks of shape [chunks, tokens], and take the sums that were made meanwhile."""
    started = time.perf_counter()
    batch = Batch(_CHUNK_TOKENS, 1)
    for tokens in chunks:
        context.memory.clear()
        batch.fill_chain(tokens, 0, [0], len(tokens))
        context.decode(batch)
    taken = observer.take().values() if observer is not None else ()
    n_summed = sum(squares.nbytes + counts.nbytes for squares, counts in taken)
    return _Run(time.perf_counter() - started, n_summed)


def _made_model(path: Path, options: ConvertOptions, progress: Progress) -> int:
    """Write a random F16 model; return its size in bytes."""
    progress(f"making a model of {options.n_bytes / 1e9:.2f} GB")
    write_f16_model(path, options.n_bytes)
    return path.stat().st_size
