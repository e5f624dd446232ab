"""Measures what summing inputs for an importance matrix costs over plain evaluation of the same
chunks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt

from specrun.bench.convert.made_model import write_f16_model
from specrun.bench.convert.measurement import ConvertOptions, ConvertResult, Progress
from specrun.bench.timing import interleaved, ratio_of, spread_of
from specrun.bindings.batch import Batch
from specrun.bindings.context import Context
from specrun.bindings.context_options import ContextOptions
from specrun.bindings.input_observer import InputObserver
from specrun.bindings.model import Model

CHUNK_TOKENS = 512
"""llama-imatrix's chunk size."""

_CHUNKS = 2
_ARMS = ("plain evaluation", "importance matrix")


def measure(options: ConvertOptions, progress: Progress) -> Iterator[ConvertResult]:
    """Yield the row of plain evaluation, then that of evaluation with sums."""
    source = options.folder / "evaluated.gguf"
    progress(f"making a model of {options.n_bytes / 1e9:.2f} GB")
    write_f16_model(source, options.n_bytes)
    n_bytes = source.stat().st_size
    seconds: tuple[list[float], list[float]] = ([], [])
    n_summed = 0
    with ExitStack() as opened:
        model = opened.enter_context(Model(source))
        tokens = np.random.default_rng(0).integers(
            0, model.vocabulary.size, (_CHUNKS, CHUNK_TOKENS), np.int32
        )
        observer = InputObserver(lambda name: name.startswith("blk."))
        wide = ContextOptions(
            n_ctx=CHUNK_TOKENS, n_outputs=CHUNK_TOKENS, n_threads=options.n_threads
        )
        contexts = [
            opened.enter_context(Context(model, wide, observer=watcher))
            for watcher in (None, observer)
        ]
        for (
            context
        ) in contexts:  # the first evaluation reserves memory and reads the weights from the disk
            _evaluate(context, tokens[:1])
        observer.take()
        for repetition, arm in interleaved(2, options.repetitions):
            progress(f"{_ARMS[arm]}, {repetition + 1} of {options.repetitions}")
            started = time.perf_counter()
            _evaluate(contexts[arm], tokens)
            n_summed = (
                sum(squares.nbytes + counts.nbytes for squares, counts in observer.take().values())
                or n_summed
            )
            seconds[arm].append(time.perf_counter() - started)
    source.unlink()
    bandwidths = [[_CHUNKS * n_bytes / second for second in arm] for arm in seconds]
    ratio = ratio_of(bandwidths[1], bandwidths[0])
    yield ConvertResult(
        _ARMS[0], _CHUNKS * n_bytes, 0, spread_of(seconds[0]), spread_of(bandwidths[0])
    )
    yield ConvertResult(
        name=_ARMS[1],
        n_bytes_in=_CHUNKS * n_bytes,
        n_bytes_out=n_summed,
        seconds=spread_of(seconds[1]),
        bandwidth=spread_of(bandwidths[1]),
        baseline=_ARMS[0],
        of_baseline=ratio,
        note=f"{100 * (1 / ratio.value - 1):.1f} % over plain evaluation of {_CHUNKS} chunks of "
        f"{CHUNK_TOKENS} tokens; "
        "the model is read once for each.",
    )


def _evaluate(context: Context, chunks: npt.NDArray[np.int32]) -> None:
    batch = Batch(CHUNK_TOKENS, 1)
    for tokens in chunks:
        context.memory.clear()
        batch.fill_chain(tokens, 0, [0], len(tokens))
        context.decode(batch)
