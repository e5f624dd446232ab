"""Times evaluations of random heads beside copies of memory, in turn, so that both see the same
machine.

How fast this machine copies memory: the measure that evaluations of heads are held against.

One thing to time: an evaluation of a head, and the bytes that it has to read.

Evaluations of Hydra's first head, for each number of paths, and of Hydra++'s prefix layer for one
position.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from specrun.bench.heads.random_heads import write_eagle, write_hydra, write_medusa, write_target
from specrun.bench.timing import Ratio, Spread, interleaved, ratio_of, spread_of
from specrun.bindings.devices import available_cores
from specrun.bindings.errors import OptionError
from specrun.bindings.gguf import read_header
from specrun.bindings.model import Model
from specrun.runtime.drafters.eagle import EagleHead
from specrun.runtime.drafters.hydra import HydraHead
from specrun.runtime.drafters.medusa import MedusaHead

_BYTES = 1 << 28  # far more than any cache


class CopyProbe:
    """Copies one large array into another with numpy, each of `n_threads` threads its own part.

    The bandwidth counts the bytes that are copied, each once. As every byte read is also written,
    memory that is only read, like a head's weights, can be faster than that.
    """

    def __init__(self, n_threads: int, n_bytes: int = _BYTES) -> None:
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
class Evaluation:
    """What it is, what it must read, how to run it; `native` is the time in its graphs so far."""

    head: str
    width: int
    n_bytes: int
    run: Callable[[], object]
    native: Callable[[], float]


_FLOAT_BYTES = 4


def hydra_evaluations(
    path: Path,
    model: Model,
    n_threads: int,
    widths: Sequence[int],
    opened: ExitStack,
    *,
    ranks: int,
    cached: int,
) -> list[Evaluation]:
    """Return the evaluations of a file with one head and a prefix layer, which has seen `cached`
    positions before."""
    n_cells = cached + 1
    head = opened.enter_context(closing(HydraHead(path, model, ranks=[ranks], n_threads=n_threads)))
    layer = opened.enter_context(closing(head.cells(n_cells))).prefix
    assert layer is not None
    states = np.random.default_rng(0).standard_normal((n_cells, model.n_embd), dtype=np.float32)
    layer.evaluate(states[:cached], 0, 0)
    sizes = {info.name: info.n_bytes for info in read_header(path).tensors}
    in_layer = sum(n_bytes for name, n_bytes in sizes.items() if name.startswith("hydra.prefix."))
    embedding = next(
        tensor for tensor in model.header.tensors if tensor.name == "token_embd.weight"
    )
    row = embedding.n_bytes // embedding.shape[1]

    def evaluation(width: int) -> Evaluation:
        paths = [[token] for token in range(width)]
        return Evaluation(
            "hydra",
            width,
            sum(sizes.values()) - in_layer + width * row,
            lambda: head.best_tokens(states[0], paths),
            lambda: head.native_seconds,
        )

    keys_and_values = 2 * cached * layer.kv_size * _FLOAT_BYTES
    return [
        *(evaluation(width) for width in widths),
        Evaluation(
            "hydra++ layer",
            1,
            in_layer + keys_and_values,
            lambda: layer.evaluate(states[cached:], cached, cached),
            lambda: head.native_seconds,
        ),
    ]


HeadType = Literal["F32", "F16", "Q8_0"]
HEAD_TYPES: tuple[HeadType, ...] = ("F32", "F16", "Q8_0")
_RANKS = 10  # tokens that a head has to name
_PAIRS = 64  # that EAGLE's layer has cached, and positions that Hydra++'s has
_WARM_UP = 2


@dataclass(frozen=True, slots=True)
class HeadsOptions:
    """What to measure: heads of each hidden size, Hydra's for each number of paths and EAGLE's of
    pairs that are evaluated at once.

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
    copy_bytes: int = 1 << 28
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
    """One head: `width` states, paths or pairs in one evaluation of `time_us`, everything in Python
    included.

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
    """Yield a result for each head, hidden size and width. Everything that is written is gone
    afterwards."""
    n_threads = options.n_threads or available_cores()
    for hidden in options.hidden:
        with (
            tempfile.TemporaryDirectory(prefix="specrun-heads-", dir=options.folder) as folder,
            ExitStack() as opened,
        ):
            names = ("target", "medusa", "hydra", "eagle")
            target, medusa, hydra, eagle = (Path(folder) / f"{name}.gguf" for name in names)
            progress(f"writing random heads of hidden size {hidden:,}")
            write_target(target, hidden, options.vocab_size, options.type_name)
            write_medusa(medusa, hidden, options.vocab_size, options.type_name)
            write_hydra(hydra, hidden, options.vocab_size, options.type_name)
            write_eagle(eagle, hidden, options.vocab_size, options.type_name)
            model = opened.enter_context(Model(target))
            evaluations = [
                *_medusa(medusa, model, n_threads, opened),
                *hydra_evaluations(
                    hydra, model, n_threads, options.widths, opened, ranks=_RANKS, cached=_PAIRS
                ),
                *_eagle(eagle, model, n_threads, options.widths, opened),
            ]
            probe = opened.enter_context(closing(CopyProbe(n_threads, options.copy_bytes)))
            progress(f"timing heads of hidden size {hidden:,}")
            yield from _measure(evaluations, probe, hidden, n_threads, options)


def _medusa(path: Path, model: Model, n_threads: int, opened: ExitStack) -> list[Evaluation]:
    head = opened.enter_context(
        closing(MedusaHead(path, model, n_threads=n_threads, ranks=[_RANKS]))
    )
    features = np.random.default_rng(0).standard_normal(model.n_embd, dtype=np.float32)
    n_bytes = sum(info.n_bytes for info in read_header(path).tensors)
    return [
        Evaluation(
            "medusa", 1, n_bytes, lambda: head.best_tokens(features), lambda: head.native_seconds
        )
    ]


def _eagle(
    path: Path, model: Model, n_threads: int, widths: Sequence[int], opened: ExitStack
) -> list[Evaluation]:
    """Return evaluations of pairs that stand side by side below `_PAIRS` cached ones, as children
    of one node do."""
    head = opened.enter_context(closing(EagleHead(path, model, ranks=_RANKS, n_threads=n_threads)))
    pairs = opened.enter_context(closing(head.cells(_PAIRS + max(widths))))
    random = np.random.default_rng(0)
    states = random.standard_normal((max(_PAIRS, *widths), model.n_embd), dtype=np.float32)
    cells = np.arange(_PAIRS, dtype=np.int64)
    pairs.evaluate(
        [0] * _PAIRS, states[:_PAIRS], cells.astype(np.int32), cells, np.tri(_PAIRS, dtype=np.bool_)
    )
    own = sum(info.n_bytes for info in read_header(path).tensors)
    of_target = {tensor.name: tensor for tensor in model.header.tensors}
    embedding = of_target["token_embd.weight"]
    row = embedding.n_bytes // embedding.shape[1]
    cached = 2 * _PAIRS * head.sizes.attention.kv_size * _FLOAT_BYTES

    def evaluation(width: int) -> Evaluation:
        sees = np.zeros((width, _PAIRS + width), np.bool_)
        sees[:, :_PAIRS] = True
        sees[:, _PAIRS:] = np.eye(width, dtype=np.bool_)
        positions, places = (
            np.full(width, _PAIRS, np.int32),
            np.arange(_PAIRS, _PAIRS + width, dtype=np.int64),
        )
        tokens = list(range(width))
        n_bytes = own + of_target["output.weight"].n_bytes + width * row + cached
        return Evaluation(
            "eagle",
            width,
            n_bytes,
            lambda: pairs.evaluate(tokens, states[:width], positions, places, sees),
            lambda: head.native_seconds,
        )

    return [evaluation(width) for width in widths]


def _measure(
    evaluations: Sequence[Evaluation],
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
        taken[arm].append((probe.measure(), *_timed(evaluations[arm])))
    for evaluation, found in zip(evaluations, taken, strict=True):
        copies, wall, native = (list(column) for column in zip(*found, strict=True))
        floors = [evaluation.n_bytes / rate for rate in copies]
        yield HeadResult(
            head=evaluation.head,
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


def _timed(evaluation: Evaluation) -> tuple[float, float]:
    """Run an evaluation and return its seconds, and those inside its graph."""
    native = evaluation.native()
    started = time.perf_counter()
    evaluation.run()
    return time.perf_counter() - started, evaluation.native() - native
