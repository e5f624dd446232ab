"""Measurement of what a round costs in Python, beside the time in native evaluation.

The models have random weights and almost no width, so that nearly all that is left is specrun's own
work. The drafter is the target quantized to four bits: some of its drafts are accepted and some are
not. Heads are random, so that theirs are nearly all rejected: what they propose and observe costs
the same.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from specrun.bench.overhead import probes
from specrun.bench.overhead.probes import RoundTimes, Stopwatch
from specrun.bench.timing import Spread, spread_of
from specrun.bindings.context import Context
from specrun.bindings.context_options import ContextOptions
from specrun.bindings.errors import OptionError, SpecrunError
from specrun.bindings.model import Model
from specrun.runtime.acceptance import build_rule
from specrun.runtime.drafters.build import build_drafter
from specrun.runtime.drafters.environment import DraftEnvironment
from specrun.runtime.language import quoted
from specrun.runtime.sampling import SamplingParams
from specrun.runtime.session import Session
from specrun.runtime.target import target_context_options

BUDGET_N_CTX = 4096
"""The context size up to which the budgets hold: memory operations walk all of its cells."""

_BUDGET_VOCAB = 32_768  # budgets hold up to here, and twice of them up to four times as many tokens
_PROMPT_LENGTH = 64
_MOST_ROUNDS_PER_WANTED = 20


@dataclass(frozen=True, slots=True)
class Setting:
    """A drafter and a temperature; `budget_us` is for a round at a vocabulary of 32k tokens.

    In the expression `drafter`, FILE stands for the draft model, MEDUSA, HYDRA and EAGLE for heads.
    """

    name: str
    drafter: str
    params: SamplingParams
    budget_us: float | None = None

    def budget(self, vocab_size: int, n_ctx: int) -> float | None:
        """Return the budget for this vocabulary in microseconds, None where none was set."""
        if self.budget_us is None or n_ctx > BUDGET_N_CTX or vocab_size > 4 * _BUDGET_VOCAB:
            return None
        return self.budget_us * (1 if vocab_size <= _BUDGET_VOCAB else 2)


_GREEDY = SamplingParams(temperature=0.0)
_SAMPLED = SamplingParams(temperature=0.8, top_k=40)
SETTINGS = (
    Setting("plain, greedy", "none", _GREEDY),
    Setting("plain, temp 0.8", "none", _SAMPLED),
    Setting("prompt lookup, greedy", "prompt-lookup", _GREEDY),
    Setting("chain of 5, greedy", "draft(FILE, n=5)", _GREEDY, 250.0),
    Setting("chain of 5, temp 0.8", "draft(FILE, n=5)", _SAMPLED),
    Setting("tree of 16, temp 0.8", "draft(FILE, tree=4x3)", _SAMPLED, 600.0),
    Setting("medusa tree of 16, greedy", "medusa(MEDUSA, tree=4x3)", _GREEDY),
    Setting("hydra++ chain of 5, greedy", "hydra(HYDRA, n=5)", _GREEDY, 250.0),
    Setting("hydra++ tree of 16, greedy", "hydra(HYDRA, tree=4x3)", _GREEDY),
    Setting("eagle chain of 5, greedy", "eagle(EAGLE, n=5)", _GREEDY, 250.0),
    Setting("eagle dynamic tree of 16, greedy", "eagle(EAGLE, depth=4, topk=4, nodes=16)", _GREEDY),
    Setting(
        "eagle tree of 16, temp 0.8", "eagle(EAGLE, tree=4x3, sampling=without)", _SAMPLED, 600.0
    ),
)
"""What is measured, in this order."""


@dataclass(frozen=True, slots=True)
class OverheadOptions:
    """What to measure: `rounds` of every setting, after `warm_up` that are not counted."""

    vocab_sizes: tuple[int, ...] = (32_000, 128_000)
    n_ctx: int = BUDGET_N_CTX
    rounds: int = 300
    warm_up: int = 30
    width: int = 64
    layers: int = 2
    n_threads: int = 0

    def __post_init__(self) -> None:
        for name in ("n_ctx", "rounds", "width", "layers"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} is {getattr(self, name)}: give at least 1")
        least = 2 * _PROMPT_LENGTH
        if self.n_ctx < least:
            raise OptionError(
                f"a context of {self.n_ctx} is too short to measure in: give {least} or more"
            )
        if not self.vocab_sizes or min(self.vocab_sizes) < least:
            raise OptionError(f"vocabularies of {least} tokens or more can be measured")


@dataclass(frozen=True, slots=True)
class OverheadResult:
    """One setting at one vocabulary size; all times are microseconds per round.

    `parts` are those of `RoundTimes` outside native evaluation; medians of parts need not add up to
    the median of `overhead`, their sum.
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
    budget_us: float | None

    @property
    def within_budget(self) -> bool | None:
        """Whether the median keeps the budget; None without a budget."""
        return None if self.budget_us is None else self.overhead_us.median <= self.budget_us


def measure_overhead(
    options: OverheadOptions,
    *,
    settings: Sequence[Setting] = SETTINGS,
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[OverheadResult]:
    """Yield one result for every vocabulary size and setting.

    Models lie in a temporary folder meanwhile; `progress` is told what is about to be measured.
    """
    for size in options.vocab_sizes:
        with tempfile.TemporaryDirectory(prefix="specrun-bench-") as folder:
            progress(f"writing random models of {size:,} tokens")
            files = _write_models(Path(folder), size, options)
            for setting in settings:
                progress(f"{setting.name}, {size:,} tokens")
                with _open(files, setting, options) as (session, watch):
                    rounds = _collect(session, watch, setting.params, options)
                yield _summary(setting, size, options, rounds)


def _write_models(folder: Path, vocab_size: int, options: OverheadOptions) -> dict[str, Path]:
    """Write target, draft model and heads; return them by their names in expressions."""
    from specrun.bench.heads.random_heads import write_eagle, write_hydra, write_medusa
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


@contextmanager
def _open(
    files: Mapping[str, Path], setting: Setting, options: OverheadOptions
) -> Iterator[tuple[Session, Stopwatch]]:
    """Open a session as `Runtime` does, with every part behind a timing proxy."""
    context_options = ContextOptions(
        n_ctx=options.n_ctx, n_threads=options.n_threads, n_threads_batch=options.n_threads
    )
    with Model(files["TARGET"]) as model:
        expression = setting.drafter
        for name, path in files.items():
            expression = expression.replace(name, quoted(str(path)))
        environment = DraftEnvironment(model, context_options, n_gpu_layers=0, by_clock=False)
        with (
            closing(build_drafter(expression, environment)) as weights,
            closing(weights.start()) as drafter,
            Context(model, target_context_options(context_options, drafter)) as context,
        ):
            watch = Stopwatch(lambda: context.native_seconds, lambda: drafter.native_seconds)
            target = probes.TimedTarget(context, watch)
            rule = probes.TimedRule(build_rule("exact"), watch)
            timed = probes.TimedDrafter(drafter, watch)
            yield Session(target, timed, rule, model.vocabulary), watch


def _collect(
    session: Session, watch: Stopwatch, params: SamplingParams, options: OverheadOptions
) -> list[RoundTimes]:
    """Answer prompts until enough rounds were timed.

    The last round of an answer is never counted, because no later call of `propose` ends it. Where
    a drafter found nothing to draft, the round was plain decoding and is left out.
    """
    drafts = session.drafter.max_nodes > 0
    wanted, seen, seed = options.warm_up + options.rounds, 0, 0
    prompt = list(range(_PROMPT_LENGTH // 2)) * 2  # repeated, so that a lookup finds something
    kept: list[RoundTimes] = []
    while len(kept) < wanted and seen < _MOST_ROUNDS_PER_WANTED * wanted:
        stream = session.stream([seed % _PROMPT_LENGTH, *prompt], params, seed=seed)
        for _ in stream:
            if len(watch.rounds) > wanted:
                break
        stream.close()
        watch.abandon()
        kept += [times for times in watch.rounds if times.n_drafted or not drafts]
        seen += max(1, len(watch.rounds))
        seed += 1
        watch.rounds.clear()
    if len(kept) <= options.warm_up:
        raise SpecrunError(
            f"{session.drafter.name} drafted nothing for the random model: take more rounds"
        )
    return kept[options.warm_up : wanted]


def _summary(
    setting: Setting, vocab_size: int, options: OverheadOptions, rounds: list[RoundTimes]
) -> OverheadResult:
    names = [field.name for field in dataclasses.fields(RoundTimes)] + ["overhead"]
    spreads = {
        name: spread_of([1e6 * getattr(times, name) for times in rounds])
        for name in names
        if not name.startswith("n_")
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
        budget_us=setting.budget(vocab_size, options.n_ctx),
    )
