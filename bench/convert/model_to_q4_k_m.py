"""Measures quantizing an F16 model to Q4_K_M beside llama.cpp's own API called directly, in
alternating order.

Ours has everything a user waits for: the plan, the process that does it, the look at the result.
Both end with the data on the disk.
"""

from __future__ import annotations

from collections.abc import Iterator

from specrun.bench.convert.child import run_child
from specrun.bench.convert.made_model import write_f16_model
from specrun.bench.convert.measurement import ConvertOptions, ConvertResult, Progress
from specrun.bench.timing import interleaved, ratio_of, spread_of

FILE_TYPE = "Q4_K_M"
"""What is measured: the type that is downloaded most."""

SHARE_OF_DIRECT = 0.9
"""Quantizing is to reach this share of the speed of llama.cpp's own call."""

MEMORY_OF_DIRECT = 1.2
"""Memory it may take, all its processes together, as a multiple of the direct call's."""

_ARMS = ("llama.cpp's API", f"model to {FILE_TYPE}")


def measure(options: ConvertOptions, progress: Progress) -> Iterator[ConvertResult]:
    """Yield the row of the direct call, then ours."""
    source, output = options.folder / "f16.gguf", options.folder / "quantized.gguf"
    progress(f"making a model of {options.n_bytes / 1e9:.2f} GB")
    write_f16_model(source, options.n_bytes)
    n_bytes = source.stat().st_size
    seconds: tuple[list[float], list[float]] = ([], [])
    peaks, written = [0, 0], [0, 0]
    for repetition, arm in interleaved(2, options.repetitions):
        progress(f"{_ARMS[arm]}, {repetition + 1} of {options.repetitions}")
        names = str(source), str(output), str(options.n_threads)
        run = run_child("specrun.bench.convert.quantize_child", ("direct", "specrun")[arm], *names)
        seconds[arm].append(run.seconds)
        peaks[arm] = max(peaks[arm], run.peak_bytes)
        written[arm] = output.stat().st_size
        output.unlink()
    source.unlink()
    bandwidths = [[n_bytes / second for second in arm] for arm in seconds]
    yield ConvertResult(
        _ARMS[0],
        n_bytes,
        written[0],
        spread_of(seconds[0]),
        spread_of(bandwidths[0]),
        peak_bytes=peaks[0],
    )
    yield ConvertResult(
        name=_ARMS[1],
        n_bytes_in=n_bytes,
        n_bytes_out=written[1],
        seconds=spread_of(seconds[1]),
        bandwidth=spread_of(bandwidths[1]),
        baseline=_ARMS[0],
        of_baseline=ratio_of(bandwidths[1], bandwidths[0]),
        budget=SHARE_OF_DIRECT,
        peak_bytes=peaks[1],
        peak_budget=round(MEMORY_OF_DIRECT * peaks[0]),
        note=(
            "memory is that of both its processes added up, pages of the model that are mapped "
            "included."
        ),
    )
