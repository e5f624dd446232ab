"""Measurement of what a round costs in Python, beside the time in native evaluation.

The models have random weights and almost no width, so that nearly all that is left is specrun's own
work. The drafter is the target quantized to four bits: some of its drafts are accepted and some are
not. Heads are random, so that theirs are nearly all rejected: what they propose and observe costs
the same. Each setting is measured again with a simulated device in the target's place
(`SimulatedDevice`): the share of a round that is ours is what users of a GPU notice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from measure.overhead import probes
from measure.overhead.device import SimulatedDevice, simulated_device
from measure.overhead.probes import PARTS, RoundTimes, Stopwatch
from specrun.bench.timing import Spread, spread_of
from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import OptionError, SpecrunError
from specrun.bindings.machine.placement import current_placement, resolve_placement
from specrun.bindings.models.model import Model
from specrun.runtime.acceptance import PairRule, SequentialCascade, build_rule
from specrun.runtime.drafters.build import build_drafter
from specrun.runtime.drafters.environment import DraftEnvironment
from specrun.runtime.engine import Session
from specrun.runtime.language import quoted
from specrun.runtime.laws import SamplingParams
from specrun.runtime.round import TokenEvent, target_context_options

_PROMPT_LENGTH = 64
_MOST_ROUNDS_PER_WANTED = 20
_DEVICE_WARM_UP = 5  # rows that are to be cut are so then


Shares = Mapping[int, float]
"""By the milliseconds that an evaluation takes: the most that may be ours of a round."""

CHAIN: Shares = {3: 0.10, 8: 0.05}
TREE: Shares = {3: 0.20, 8: 0.10}
EAGLE_TREE: Shares = {3: 0.30, 8: 0.13}


@dataclass(frozen=True, slots=True)
class Setting:
    """A drafter, a temperature and a rule; `most` bounds the share of a round that is ours.

    In the expression `drafter`, FILE stands for the draft model, TARGET for the target, and MEDUSA,
    HYDRA and EAGLE for heads.
    """

    name: str
    drafter: str
    params: SamplingParams
    most: Shares = dataclasses.field(default_factory=lambda: CHAIN)
    accept: str = "exact"


_GREEDY = SamplingParams(temperature=0.0)
_SAMPLED = SamplingParams(temperature=0.8, top_k=40)
_DYNAMIC = "eagle(EAGLE, depth=4, topk=4, nodes=16)"
_WITHOUT = "eagle(EAGLE, tree=4x3, sampling=without)"
SETTINGS = (
    Setting("plain, greedy", "none", _GREEDY),
    Setting("plain, temp 0.8", "none", _SAMPLED),
    Setting("prompt lookup, greedy", "prompt-lookup", _GREEDY),
    Setting("chain of 5, greedy", "draft(FILE, n=5)", _GREEDY),
    Setting("chain of 5, temp 0.8", "draft(FILE, n=5)", _SAMPLED),
    Setting("tree of 16, temp 0.8", "draft(FILE, tree=4x3)", _SAMPLED, TREE),
    Setting("medusa tree of 16, greedy", "medusa(MEDUSA, tree=4x3)", _GREEDY, TREE),
    Setting("hydra++ chain of 5, greedy", "hydra(HYDRA, n=5)", _GREEDY),
    Setting("hydra++ tree of 16, greedy", "hydra(HYDRA, tree=4x3)", _GREEDY, TREE),
    Setting("eagle chain of 5, greedy", "eagle(EAGLE, n=5)", _GREEDY),
    Setting("eagle dynamic tree of 16, greedy", _DYNAMIC, _GREEDY, EAGLE_TREE),
    Setting("eagle tree of 16, temp 0.8", _WITHOUT, _SAMPLED, EAGLE_TREE),
    # Rules that are not exact keep nearly all drafts: this is what that costs by itself.
    Setting("chain of 5, all kept", "draft(TARGET, n=5)", _SAMPLED),
    Setting("chain of 5, V3", "draft(FILE, n=5)", _SAMPLED, {}, "cascade-token-v3"),
    Setting("chain of 5, Chow", "draft(FILE, n=5)", _SAMPLED, {}, "cascade-chow"),
    Setting("chain of 5, OPT", "draft(FILE, n=5)", _SAMPLED, {}, "cascade-opt"),
)
"""What is measured, in this order."""


@dataclass(frozen=True, slots=True)
class OverheadOptions:
    """What to measure: `rounds` of every setting, after a tenth as many that are not counted.

    Half as many follow for each of `device_ms`, the milliseconds of a simulated device. With
    `backend_sampling` answers have no log-probabilities, and rows are cut to what laws need. With
    `on_gpu` the devices that are here evaluate everything, and none is simulated: native evaluation
    lasts until they are done.
    """

    vocab_sizes: tuple[int, ...] = (32_000, 128_000)
    n_ctx: int = 4096
    rounds: int = 100
    device_ms: tuple[int, ...] = (3, 8)
    width: int = 64
    layers: int = 2
    n_threads: int = 0
    backend_sampling: bool = False
    on_gpu: bool = False

    def __post_init__(self) -> None:
        for name in ("n_ctx", "rounds", "width", "layers"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} is {getattr(self, name)}: give at least 1")
        least = 2 * _PROMPT_LENGTH
        if self.n_ctx < least:
            raise OptionError(
                f"a context of {self.n_ctx} is too short to measure in: give {least} or more"
            )
        if min(self.device_ms, default=1) < 1:
            raise OptionError("a simulated device takes a millisecond or more")
        if not self.vocab_sizes or min(self.vocab_sizes) < least:
            raise OptionError(f"vocabularies of {least} tokens or more can be measured")


@dataclass(frozen=True, slots=True)
class DeviceResult:
    """A setting with a simulated device: what is ours of a round, and what reaches the host.

    `exposed_us` are the microseconds of a round in which the device waited for us, `share` is their
    share; `most` bounds it, where there is a bound. Bytes are per round: rows of logits, or what
    samplers left of them, and states of the target; of drafters logits, and what was read of heads.
    `graphs_reused` is the share of the target's evaluations that found their graph ready.
    """

    share: Spread
    exposed_us: Spread
    most: float | None
    target_bytes: float
    drafter_bytes: float
    graphs_reused: float


@dataclass(frozen=True, slots=True)
class OverheadResult:
    """One setting at one vocabulary size; all times are microseconds per round.

    `parts` are those of `RoundTimes` outside native evaluation; medians of parts need not add up to
    the median of `overhead`, their sum. `devices` are by name: "3 ms", ...
    """

    setting: str
    vocab_size: int
    n_ctx: int
    rounds: int
    overhead_us: Spread
    parts_us: dict[str, Spread]
    target_native_us: Spread
    drafter_native_us: Spread
    drafted_per_round: float
    accepted_per_round: float
    devices: dict[str, DeviceResult]


def measure_overhead(
    options: OverheadOptions,
    *,
    settings: Sequence[Setting] = SETTINGS,
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[OverheadResult]:
    """Yield one result for every vocabulary size and setting.

    Models lie in a temporary folder meanwhile; `progress` is told what is about to be measured.
    """
    if options.on_gpu and not resolve_placement(current_placement()).offload:
        advice = "leave it out, and a GPU is simulated"
        raise OptionError(f"there is no GPU that could evaluate (on_gpu, --gpu): {advice}")
    for size in options.vocab_sizes:
        with tempfile.TemporaryDirectory(prefix="specrun-bench-") as folder:
            progress(f"writing random models of {size:,} tokens")
            files = _write_models(Path(folder), size, options)
            for setting in settings:
                progress(f"{setting.name}, {size:,} tokens")
                with _open(files, setting, options) as bench:
                    yield _measure(bench, setting, size, options)


def _measure(
    bench: _Bench, setting: Setting, vocab_size: int, options: OverheadOptions
) -> OverheadResult:
    """Measure a setting as it is, then with each device."""
    logprobs = not options.backend_sampling
    warm_up = max(1, options.rounds // 10)
    rounds = _collect(bench, setting.params, warm_up, options.rounds, logprobs=logprobs)
    devices: dict[str, DeviceResult] = {}
    for milliseconds in () if options.on_gpu else options.device_ms:
        bench.device.wait_s = milliseconds / 1e3
        n = -(-options.rounds // 2)
        # As `specrun chat` does: a round is handed out while the device computes the next.
        found = _collect(bench, setting.params, _DEVICE_WARM_UP, n, logprobs=False)
        devices[f"{milliseconds} ms"] = _device_result(found, setting.most.get(milliseconds))
        bench.device.wait_s = None
    if bench.device.n_unwaited:
        raise SpecrunError("rows were read before the device was done: the shares mean nothing")
    return _summary(setting, vocab_size, options, rounds, devices)


def _write_models(folder: Path, vocab_size: int, options: OverheadOptions) -> dict[str, Path]:
    """Write target, draft model and heads; return them by their names in expressions."""
    from measure.heads.random_heads import write_eagle, write_hydra, write_medusa
    from specrun.convert.quantize import quantize_model
    from specrun.convert.random_model import RandomLlama, write_random_llama

    target, drafter = folder / "target.gguf", folder / "drafter.gguf"
    # A scale of 2 leaves some thirty tokens after the default truncations, as a text in progress
    # does.
    spec = RandomLlama(
        vocab_size=vocab_size,
        width=options.width,
        ffn=2 * options.width,
        layers=options.layers,
        context=options.n_ctx,
        scale=2.0,
    )
    write_random_llama(target, spec)
    quantize_model(target, drafter, "Q4_0", n_threads=options.n_threads)
    medusa, hydra, eagle = (folder / f"{name}.gguf" for name in ("medusa", "hydra", "eagle"))
    write_medusa(medusa, options.width, vocab_size, "F32", heads=2)
    write_hydra(hydra, options.width, vocab_size, "F32", heads=5)
    write_eagle(eagle, options.width, vocab_size, "F32")
    return {"TARGET": target, "FILE": drafter, "MEDUSA": medusa, "HYDRA": hydra, "EAGLE": eagle}


class _Bench(NamedTuple):
    """A session whose parts are timed, and the device that its target can be put on."""

    session: Session
    watch: Stopwatch
    device: SimulatedDevice


@contextmanager
def _open(
    files: Mapping[str, Path], setting: Setting, options: OverheadOptions
) -> Iterator[_Bench]:
    """Open a session as `Runtime` does, with every part behind a timing proxy."""
    context_options = ContextOptions(
        n_ctx=options.n_ctx, n_threads=options.n_threads, n_threads_batch=options.n_threads
    )
    n_gpu_layers = -1 if options.on_gpu else 0
    with Model(files["TARGET"], n_gpu_layers=n_gpu_layers) as model, simulated_device() as device:
        expression = setting.drafter
        for name, path in files.items():
            expression = expression.replace(name, quoted(str(path)))
        built = build_rule(setting.accept)
        assert not isinstance(built, SequentialCascade)  # no setting names one: they have no rounds
        environment = DraftEnvironment(
            model,
            context_options,
            n_gpu_layers=n_gpu_layers,
            by_clock=False,
            keeps_rows=isinstance(built, PairRule),
        )
        with (
            closing(build_drafter(expression, environment)) as weights,
            closing(weights.start()) as drafter,
            Context(model, target_context_options(context_options, drafter)) as context,
        ):
            device.watch(context)
            native = (lambda: context.native_seconds), (lambda: drafter.native_seconds)
            watch = Stopwatch(*native, device.counts)
            target = probes.TimedTarget(context, watch, drafter.embedding_inputs)
            rule = probes.timed_rule(built, watch)
            timed = probes.TimedDrafter(drafter, watch)
            session = Session(target, timed, rule, model.vocabulary)
            session.backend_sampling = options.backend_sampling
            yield _Bench(session, watch, device)


class _EnoughError(Exception):
    """Enough rounds were timed."""


def _collect(
    bench: _Bench, params: SamplingParams, warm_up: int, n_rounds: int, *, logprobs: bool
) -> list[RoundTimes]:
    """Answer prompts until enough rounds were timed, with or without log-probabilities.

    The last round of an answer is never counted, because no later call of `propose` ends it. Where
    a drafter found nothing to draft, the round was plain decoding and is left out.
    """
    session, watch = bench.session, bench.watch
    drafts = session.drafter.max_nodes > 0
    wanted, seen, seed = warm_up + n_rounds, 0, 0
    prompt = list(range(_PROMPT_LENGTH // 2)) * 2  # repeated, so that a lookup finds something
    kept: list[RoundTimes] = []

    def stop_when_enough(_: TokenEvent) -> None:
        if len(watch.rounds) > wanted:
            raise _EnoughError

    while len(kept) < wanted and seen < _MOST_ROUNDS_PER_WANTED * wanted:
        stream = session.stream(
            [seed % _PROMPT_LENGTH, *prompt],
            params,
            seed=seed,
            logprobs=logprobs,
        )
        with contextlib.suppress(_EnoughError):
            stream.hand_to(stop_when_enough)
        stream.close()
        watch.abandon()
        kept += [times for times in watch.rounds if times.n_drafted or not drafts]
        seen += max(1, len(watch.rounds))
        seed += 1
        watch.rounds.clear()
    if len(kept) <= warm_up:
        raise SpecrunError(
            f"{session.drafter.name} drafted nothing for the random model: take more rounds"
        )
    return kept[warm_up:wanted]


def _device_result(rounds: Sequence[RoundTimes], most: float | None) -> DeviceResult:
    n_evaluations = sum(times.device.n_evaluations for times in rounds)
    return DeviceResult(
        share=spread_of([times.share for times in rounds]),
        exposed_us=spread_of([1e6 * times.exposed for times in rounds]),
        most=most,
        target_bytes=statistics.fmean(times.device.target_bytes for times in rounds),
        drafter_bytes=statistics.fmean(times.device.drafter_bytes for times in rounds),
        graphs_reused=sum(times.device.n_reused for times in rounds) / max(1, n_evaluations),
    )


def _summary(
    setting: Setting,
    vocab_size: int,
    options: OverheadOptions,
    rounds: list[RoundTimes],
    devices: dict[str, DeviceResult],
) -> OverheadResult:
    spreads = {
        name: spread_of([1e6 * getattr(times, name) for times in rounds])
        for name in (*PARTS, "target_native", "drafter_native", "overhead")
    }
    return OverheadResult(
        setting=setting.name,
        vocab_size=vocab_size,
        n_ctx=options.n_ctx,
        rounds=len(rounds),
        overhead_us=spreads.pop("overhead"),
        target_native_us=spreads.pop("target_native"),
        drafter_native_us=spreads.pop("drafter_native"),
        parts_us=spreads,
        drafted_per_round=sum(times.n_drafted for times in rounds) / len(rounds),
        accepted_per_round=sum(times.n_accepted for times in rounds) / len(rounds),
        devices=devices,
    )
