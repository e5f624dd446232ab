"""Measures converting a bfloat16 checkpoint to F16 beside copying its files: bandwidth and memory.

Both read files that were just written or read (so from the page cache where there is room), and
both end with the data on the disk (fsync), in the same folder, in alternating order.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from specrun.bench.convert.child import run_child
from specrun.bench.convert.made_model import write_checkpoint
from specrun.bench.convert.measurement import ConvertOptions, ConvertResult, Progress
from specrun.bench.timing import interleaved, ratio_of, spread_of
from specrun.bindings.atomic import require_free_space

SHARE_OF_COPY = 0.5
"""F16 conversion is to reach this share of a plain copy's bandwidth."""

_LEAST_BYTES = 10**9  # of less, starting takes longer than copying

MEMORY_BEYOND_LARGEST = 2 << 30
"""Memory a conversion may take beyond its largest tensor, in bytes."""

_LARGEST_TENSOR = 4 * 8192 * 2048  # an upper bound for what made_checkpoint makes, as float32


def measure(options: ConvertOptions, progress: Progress) -> Iterator[ConvertResult]:
    """Yield the row of the copy, then that of the conversion."""
    require_free_space(options.folder, 3 * options.n_bytes)
    source, copies, output = (
        options.folder / "source",
        options.folder / "copies",
        options.folder / "model.gguf",
    )
    source.mkdir()
    copies.mkdir()
    progress(f"making a checkpoint of {options.n_bytes / 1e9:.2f} GB")
    n_bytes = write_checkpoint(source, options.n_bytes)
    seconds: tuple[list[float], list[float]] = ([], [])
    peak = 0
    for repetition, arm in interleaved(2, options.repetitions):
        progress(
            f"{('copying', 'converting to F16')[arm]}, {repetition + 1} of {options.repetitions}"
        )
        if arm == 0:
            seconds[0].append(_copy(source, copies))
        else:
            run = run_child("specrun.bench.convert.convert_child", str(source), str(output))
            seconds[1].append(run.seconds)
            peak = max(peak, run.peak_bytes)
            written = output.stat().st_size
            output.unlink()
    bandwidths = [[n_bytes / second for second in arm] for arm in seconds]
    yield ConvertResult("copy", n_bytes, n_bytes, spread_of(seconds[0]), spread_of(bandwidths[0]))
    yield ConvertResult(
        name="checkpoint to F16",
        n_bytes_in=n_bytes,
        n_bytes_out=written,
        seconds=spread_of(seconds[1]),
        bandwidth=spread_of(bandwidths[1]),
        baseline="copy",
        of_baseline=ratio_of(bandwidths[1], bandwidths[0]),
        budget=SHARE_OF_COPY if n_bytes >= _LEAST_BYTES else None,
        peak_bytes=peak,
        peak_budget=MEMORY_BEYOND_LARGEST + _LARGEST_TENSOR,
        note="" if n_bytes >= _LEAST_BYTES else "the budget is for checkpoints of at least 1 GB",
    )


def _copy(source: Path, target: Path) -> float:
    """Copy the weights as `cp` would, down to the disk; return the seconds."""
    started = time.perf_counter()
    for path in sorted(source.glob("*.safetensors")):
        copied = target / path.name
        shutil.copyfile(path, copied)
        descriptor = os.open(copied, os.O_RDWR)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    took = time.perf_counter() - started
    for path in target.iterdir():
        path.unlink()
    return took
