"""Times of a head's evaluation beside the time of copying the bytes that it has to read.

Evaluating a head is bound by memory: each weight is read once for a handful of numbers computed
with it. So the floor of an evaluation is its bytes over the bandwidth of a copy. Evaluations (of
Medusa, Hydra, Hydra++'s prefix layer and EAGLE, with random weights) and copies are timed in turn,
so that both see the same machine.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from measure.heads.random_heads import (
    HeadType,
    write_eagle,
    write_hydra,
    write_medusa,
    write_target,
)
from specrun.bench.timing import Ratio, Spread, interleaved, ratio_of, spread_of
from specrun.bindings.errors import OptionError
from specrun.bindings.gguf import read_header
from specrun.bindings.models.model import Model
from specrun.bindings.threads import available_cores
from specrun.runtime.drafters.eagle import EagleHead
from specrun.runtime.drafters.hydra import HydraHead
from specrun.runtime.drafters.medusa import MedusaHead

HEAD_TYPES: tuple[HeadType, ...] = ("F32", "F16", "Q8_0")
_RANKS = 10  # tokens that a head has to name
_CACHED = 64  # pairs in the cells of EAGLE's layer, positions in those of Hydra++'s
_WARM_UP = 2
_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class HeadsOptions:
    """Heads of each hidden size; `widths` are Hydra's paths and EAGLE's pairs in one evaluation.

    The heads, and the target whose tokens they predict, are stored as `type_name`. `copy_bytes` is
    the size of the array that is copied to measure bandwidth. Files are in `folder` meanwhile
    (None: where temporary files go).
    """

    hidden: tuple[int, ...] = (512, 4096)
    vocab_size: int = 32_000
    type_name: HeadType = "Q8_0"
    widths: tuple[int, ...] = (1, 4, 8)
    repetitions: int = 20
    n_threads: int = 0
    copy_bytes: int = 1 << 28  # far more than any cache
    folder: Path | None = None

    def __post_init__(self) -> None:
        for size in self.hidden:
            if size < 64 or size % 64:
                raise OptionError(
                    f"a hidden size of {size}: give multiples of 64, which blocks and heads divide"
                )
        if not self.hidden or not self.widths or min(self.widths) < 1 or self.repetitions < 1:
            raise OptionError("hidden sizes, widths and repetitions are 1 or more")
        if not 16 <= self.vocab_size <= 1_000_000:
            raise OptionError(f"{self.vocab_size} tokens: give 16 to 1,000,000")
        if self.type_name not in HEAD_TYPES:
            raise OptionError(f"weights of type {self.type_name}: use {', '.join(HEAD_TYPES)}")


@dataclass(frozen=True, slots=True)
class HeadResult:
    """One head: `width` states, paths or pairs in one evaluation of `time_us`, Python included.

    `n_bytes` is what it must read: each weight once, the rows of its tokens, the keys and values it
    attends to. `copy_bytes_per_s` is the bandwidth measured in between, `floor_us` what reading the
    bytes takes at that rate.
    """

    head: str
    hidden: int
    words: int
    type_name: str
    width: int
    n_threads: int
    n_bytes: int
    time_us: Spread
    native_us: Spread
    copy_bytes_per_s: Spread
    floor_us: float
    over_floor: Ratio


def measure_heads(
    options: HeadsOptions, *, progress: Callable[[str], None] = lambda _: None
) -> Iterator[HeadResult]:
    """Yield a result for each head, hidden size and width; what is written is removed again."""
    n_threads = options.n_threads or available_cores()
    writers = (write_target, write_medusa, write_hydra, write_eagle)
    for hidden in options.hidden:
        with (
            tempfile.TemporaryDirectory(prefix="specrun-heads-", dir=options.folder) as folder,
            ExitStack() as opened,
        ):
            progress(f"writing random heads of hidden size {hidden:,}")
            files = [Path(folder) / f"{write.__name__}.gguf" for write in writers]
            for write, file in zip(writers, files, strict=True):
                write(file, hidden, options.vocab_size, options.type_name)
            target, medusa, hydra, eagle = files
            model = opened.enter_context(Model(target))
            evaluations = [
                _medusa(medusa, model, n_threads, opened),
                *_hydra(hydra, model, n_threads, options.widths, opened),
                *_eagle(eagle, model, n_threads, options.widths, opened),
            ]
            probe = opened.enter_context(closing(CopyProbe(n_threads, options.copy_bytes)))
            progress(f"timing heads of hidden size {hidden:,}")
            yield from _measure(evaluations, probe, hidden, n_threads, options)


class CopyProbe:
    """Copies one large array into another with numpy, each of `n_threads` threads its own part.

    The bandwidth counts the bytes that are copied, each once. As every byte read is also written,
    memory that is only read, like a head's weights, can be faster than that.
    """

    def __init__(self, n_threads: int, n_bytes: int) -> None:
        self.n_bytes = n_bytes
        self._source = np.ones(n_bytes, np.uint8)
        self._copy = np.zeros(n_bytes, np.uint8)  # written once, so that its pages are there
        step = -(-n_bytes // n_threads)
        self._parts = [slice(start, start + step) for start in range(0, n_bytes, step)]
        self._pool = ThreadPoolExecutor(len(self._parts))

    def measure(self) -> float:
        """Return the bytes copied per second, by one copy of the whole array."""
        started = time.perf_counter()
        list(self._pool.map(self._copy_part, self._parts))
        return self.n_bytes / (time.perf_counter() - started)

    def _copy_part(self, part: slice) -> None:
        np.copyto(self._copy[part], self._source[part])

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


@dataclass(frozen=True, slots=True)
class _Evaluation:
    """One evaluation of a head: the bytes that it must read, and how to run it."""

    name: str
    head: MedusaHead | HydraHead | EagleHead
    width: int
    n_bytes: int
    run: Callable[[], object]

    def timed(self) -> tuple[float, float]:
        """Run it; return its seconds, and those inside the head's graphs."""
        native, started = self.head.native_seconds, time.perf_counter()
        self.run()
        return time.perf_counter() - started, self.head.native_seconds - native


def _medusa(path: Path, model: Model, n_threads: int, opened: ExitStack) -> _Evaluation:
    head = MedusaHead(path, model, n_threads=n_threads, ranks=[_RANKS])
    opened.enter_context(closing(head))
    state = np.random.default_rng(0).standard_normal(model.n_embd, dtype=np.float32)
    n_bytes = sum(_tensor_bytes(path).values())
    return _Evaluation("medusa", head, 1, n_bytes, lambda: head.said_of(state[None]))


def _hydra(
    path: Path, model: Model, n_threads: int, widths: Sequence[int], opened: ExitStack
) -> list[_Evaluation]:
    """Return evaluations of the first head by paths, and of the prefix layer for one position."""
    head = opened.enter_context(
        closing(HydraHead(path, model, ranks=[_RANKS], n_threads=n_threads))
    )
    layer = opened.enter_context(closing(head.cells(_CACHED + 1))).prefix
    assert layer is not None
    assert head.prefix is not None
    random = np.random.default_rng(0)
    states = random.standard_normal((_CACHED + 1, model.n_embd), dtype=np.float32)
    layer.evaluate(states[:_CACHED], 0, 0)
    sizes = _tensor_bytes(path)
    in_layer = sum(n_bytes for name, n_bytes in sizes.items() if name.startswith("hydra.prefix."))

    def evaluation(width: int) -> _Evaluation:
        paths = [[token] for token in range(width)]
        n_bytes = sum(sizes.values()) - in_layer + width * _embedding_row(model)
        return _Evaluation("hydra", head, width, n_bytes, lambda: head.best_laws(states[0], paths))

    n_bytes = (
        in_layer + 2 * _CACHED * head.prefix.attention.kv_size * _FLOAT_BYTES
    )  # keys and values
    of_layer = _Evaluation(
        "hydra++ layer",
        head,
        1,
        n_bytes,
        lambda: layer.evaluate(states[_CACHED:], _CACHED, _CACHED),
    )
    return [*map(evaluation, widths), of_layer]


def _eagle(
    path: Path, model: Model, n_threads: int, widths: Sequence[int], opened: ExitStack
) -> list[_Evaluation]:
    """Return evaluations of pairs side by side after cached ones, as children of one node are."""
    head = opened.enter_context(closing(EagleHead(path, model, ranks=_RANKS, n_threads=n_threads)))
    pairs = opened.enter_context(closing(head.cells(_CACHED + max(widths))))
    random = np.random.default_rng(0)
    states = random.standard_normal((max(_CACHED, *widths), model.n_embd), dtype=np.float32)
    cached, causal = range(_CACHED), np.tri(_CACHED, dtype=np.bool_)
    pairs.evaluate([0] * _CACHED, states[:_CACHED], (cached, cached, 0, causal))
    # EAGLE shares the target's output matrix and embedding: what it reads of them counts too.
    shared = next(info.n_bytes for info in model.header.tensors if info.name == "output.weight")
    keys_and_values = 2 * _CACHED * head.sizes.attention.kv_size * _FLOAT_BYTES
    own = sum(_tensor_bytes(path).values()) + shared + keys_and_values

    def evaluation(width: int) -> _Evaluation:
        # Each pair sees all cached ones and itself, not those beside it.
        cells = range(_CACHED, _CACHED + width)
        places = [_CACHED] * width, cells, _CACHED, np.eye(width, dtype=np.bool_)
        tokens = list(range(width))
        n_bytes = own + width * _embedding_row(model)
        return _Evaluation(
            "eagle",
            head,
            width,
            n_bytes,
            lambda: pairs.evaluate(tokens, states[:width], places),
        )

    return [evaluation(width) for width in widths]


def _tensor_bytes(path: Path) -> dict[str, int]:
    return {info.name: info.n_bytes for info in read_header(path).tensors}


def _embedding_row(model: Model) -> int:
    """Return the bytes of one token's embedding."""
    tensors = model.header.tensors
    embedding = next(info for info in tensors if info.name == "token_embd.weight")
    return embedding.n_bytes // embedding.shape[1]


def _measure(
    evaluations: Sequence[_Evaluation],
    probe: CopyProbe,
    hidden: int,
    n_threads: int,
    options: HeadsOptions,
) -> Iterator[HeadResult]:
    for evaluation in evaluations:
        for _ in range(_WARM_UP):
            evaluation.run()
    probe.measure()
    taken: list[list[tuple[float, float, float]]] = [[] for _ in evaluations]
    for _, arm in interleaved(len(evaluations), options.repetitions):
        # The copy also leaves no weights in the caches, as the target's evaluation does between two
        # drafts.
        taken[arm].append((probe.measure(), *evaluations[arm].timed()))
    for evaluation, found in zip(evaluations, taken, strict=True):
        copies, wall, native = (list(column) for column in zip(*found, strict=True))
        floors = [evaluation.n_bytes / rate for rate in copies]
        yield HeadResult(
            head=evaluation.name,
            hidden=hidden,
            words=options.vocab_size,
            type_name=options.type_name,
            width=evaluation.width,
            n_threads=n_threads,
            n_bytes=evaluation.n_bytes,
            time_us=spread_of([1e6 * seconds for seconds in wall]),
            native_us=spread_of([1e6 * seconds for seconds in native]),
            copy_bytes_per_s=spread_of(copies),
            floor_us=1e6 * spread_of(floors).median,
            over_floor=ratio_of(wall, floors),
        )
