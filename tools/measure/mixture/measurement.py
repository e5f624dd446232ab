"""Predictions for a random mixture of experts beside the clock, here and with a worker's device.

An evaluation of n tokens reads the experts that any of them chose, so T(n) rises where a dense
model's does not. Three things stand beside what rounds of n tokens take: the curve that the product
measured when it loaded the file, the bytes that are read if every token chooses for itself, and
what `auto` makes of it. One arm has the experts on this machine's processors and all else on a
device, a worker on the loopback (`-ot ffn_.*_exps=CPU`).
"""

from __future__ import annotations

import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrun.bench.timing import Ratio, interleaved, ratio_of
from specrun.bindings.errors import OptionError, SpecrunError
from specrun.bindings.machine.worker_process import WorkerOptions
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.planning import memory_traffic

_EXPERTS_HERE = (("ffn_.*_exps", "CPU"),)
_WIDTH, _FFN, _VOCAB = 1024, 512, 4096
_PROMPT = [*range(2, 18)]
_GREEDY = SamplingParams(temperature=0.0)
_STARTING_S = 30.0


@dataclass(frozen=True, slots=True)
class MixtureOptions:
    """A mixture of about `n_bytes` in F16, and how it is measured.

    `widths` are how many tokens rounds evaluate, `predict` the tokens of an answer.
    """

    n_bytes: int = 1_200_000_000
    experts: int = 32
    experts_used: int = 4
    widths: tuple[int, ...] = (1, 2, 4, 8)
    predict: int = 32
    repetitions: int = 3
    n_threads: int = 0
    no_worker: bool = False
    """Leave out the arm with a worker."""
    folder: Path | None = None

    def __post_init__(self) -> None:
        if min(self.widths, default=0) < 1 or self.predict < 2 or self.repetitions < 1:
            raise OptionError("widths and repetitions are 1 or more, tokens of answers 2 or more")

    @property
    def model(self) -> RandomLlama:
        """The mixture: as many layers as its size takes."""
        layer = 2 * (3 * self.experts * _WIDTH * _FFN + 4 * _WIDTH * _WIDTH)
        layers = max(1, round((self.n_bytes - 4 * _VOCAB * _WIDTH) / layer))
        own = {"experts": self.experts, "experts_used": self.experts_used, "layers": layers}
        sizes = {"vocab_size": _VOCAB, "width": _WIDTH, "ffn": _FFN, "heads": 16, "kv_heads": 8}
        return RandomLlama(**sizes, **own, file_type="F16", context=2048)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class MixtureResult:
    """Rounds of `width` tokens on one arm, in milliseconds; `width` 0: those of `auto`.

    `measured_ms` is what the clock says, of `auto` for a token; `times` how many times as long as a
    plain round that is. `curve` is what the product's curve says of it, of the kind `source`
    ("typical" if the machine was too busy to measure one). `by_bytes` is how many times the bytes
    of one token are read by chance.
    """

    arm: str
    n_bytes: int
    width: int
    drafter: str
    measured_ms: float
    times: Ratio
    curve: float
    source: str
    by_bytes: float


def measure_mixture(
    options: MixtureOptions, *, progress: Callable[[str], None] = lambda _: None
) -> Iterator[MixtureResult]:
    """Yield the results of each arm; the model is removed again."""
    with tempfile.TemporaryDirectory(prefix="specrun-mixture-", dir=options.folder) as folder:
        path = Path(folder) / "mixture.gguf"
        progress(f"writing a random mixture of {options.n_bytes / 1e9:.1f} GB")
        write_random_llama(path, options.model)
        yield from _arm("this machine", path, options, {"n_gpu_layers": 0}, progress)
        if not options.no_worker:
            with _worker(options.n_threads) as worker:
                placed = {"rpc": (worker,), "override_tensors": _EXPERTS_HERE}
                values = {**placed, "n_gpu_layers": "all"}
                yield from _arm("worker, experts here", path, options, values, progress)


def _arm(
    name: str,
    path: Path,
    options: MixtureOptions,
    values: dict[str, Any],
    progress: Callable[[str], None],
) -> Iterator[MixtureResult]:
    """Measure fixed widths and `auto` in turn on one placement."""
    drafters = ["none" if n == 1 else f"jacobi(n={n - 1}, always=yes)" for n in options.widths]
    drafters = [*dict.fromkeys(["none", *drafters, "auto"])]
    seconds: list[list[float]] = [[] for _ in drafters]
    rounds: list[float] = [1.0] * len(drafters)
    values |= {"n_ctx": 1024, "n_threads": options.n_threads or None, "trust": True}
    given = {key: value for key, value in values.items() if value is not None}
    opened: list[Runtime] = []
    try:
        for drafter in drafters:
            progress(f"{name}: loading for {drafter}")
            opened.append(Runtime(path, drafter, **given))
        curve = opened[-1].environment.known
        traffic = memory_traffic(opened[0].model, opened[0].options.context)
        for repetition, place in interleaved(len(drafters), options.repetitions):
            progress(f"{name}: repetition {repetition + 1}, {drafters[place]}")
            per_token = drafters[place] == "auto"
            spent, rounds[place] = _answer(opened[place], options, per_token=per_token)
            seconds[place].append(spent)
        plain = seconds[0]
        for place, drafter in enumerate(drafters):
            width = 0 if drafter == "auto" else round(rounds[place])
            n = max(1, width)
            yield MixtureResult(
                arm=name,
                n_bytes=path.stat().st_size,
                width=width,
                drafter=drafter,
                measured_ms=1e3 * min(seconds[place]),
                times=ratio_of(seconds[place], plain),
                curve=curve.seconds(n) / curve.seconds(1),
                source=curve.source,
                by_bytes=traffic.weights(n) / traffic.weights(1),
            )
    finally:
        for runtime in opened:
            runtime.close()


def _answer(runtime: Runtime, options: MixtureOptions, *, per_token: bool) -> tuple[float, float]:
    """Return the seconds of a round, or of a token, and the tokens that a round evaluated."""
    runtime.session.forget()
    result = runtime.generate(_PROMPT, _GREEDY, max_tokens=options.predict)
    stats = result.stats
    if stats.tokens_per_second is None or not stats.rounds:
        raise SpecrunError("an answer of no rounds: its first token ends it; give another size")
    token = 1.0 / stats.tokens_per_second
    tokens = len(result.token_ids) / stats.rounds
    return token * (1.0 if per_token else tokens), 1.0 + stats.drafted / stats.rounds


@contextmanager
def _worker(n_threads: int) -> Iterator[str]:
    """Run a worker on the loopback, which serves this machine's processors as a device."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    address = f"127.0.0.1:{port}"
    options = WorkerOptions(address, 0, "", n_threads=n_threads or 1)
    process = subprocess.Popen(options.command(), stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + _STARTING_S
        while not _is_listening(port):
            if process.poll() is not None or time.monotonic() > end:
                raise SpecrunError("the worker on the loopback did not start")
            time.sleep(0.05)
        yield address
    finally:
        process.kill()
        process.wait()
        assert process.stdin is not None
        process.stdin.close()


def _is_listening(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
    except OSError:
        return False
    return True


def rows_of(results: Sequence[MixtureResult]) -> list[dict[str, str]]:
    """Return the rows of a table."""
    return [
        {
            "arm": result.arm,
            "drafter": result.drafter,
            "tokens": "auto" if not result.width else str(result.width),
            "ms": f"{result.measured_ms:.1f}",
            "times plain": f"{result.times.value:.2f}x {result.times.extent}",
            "curve": "" if not result.width else f"{result.curve:.2f}x, {result.source}",
            "by bytes": "" if not result.width else f"{result.by_bytes:.2f}x",
        }
        for result in results
    ]
