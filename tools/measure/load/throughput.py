"""Load: the throughput of an engine by how many conversations go on, drafted and plain.

Every load answers the same prompts, so many at a time, with the same seeds; a repetition visits all
drafters and loads. Beside what was measured stands what the cost curve of the target allows.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measure.load.first_token import FirstToken, measure_first_token
from specrun.bench.drafters.answers import prompt_ids
from specrun.bench.drafters.comparison import TargetFacts, target_facts
from specrun.bench.drafters.prompts import Prompt
from specrun.bench.timing import Ratio, Spread, interleaved, ratio_of, require_given, spread_of
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import OptionError
from specrun.runtime.engine import Engine
from specrun.runtime.language import parse_expression, short_label
from specrun.runtime.laws import SamplingParams
from specrun.runtime.memory import LoadOptions
from specrun.runtime.planning import CostCurve, measure_target_costs
from specrun.runtime.round import GenerationResult

PLAIN = "none"
_WARM_UP = 8  # tokens


@dataclass(frozen=True, slots=True)
class LoadBench:
    """What to measure: `drafters` and plain decoding, with so many `conversations` at a time.

    Every repetition answers all prompts with the seed of `params` plus its number. The cost curve
    is measured for `curve_s` seconds. A prompt of `long_prompt` tokens is read while a short one
    waits; 0 leaves that out. `options` are those of `Engine`.
    """

    target: Path
    drafters: tuple[str, ...]
    conversations: tuple[int, ...]
    prompts: tuple[Prompt, ...]
    params: SamplingParams
    max_tokens: int = 64
    repetitions: int = 5
    long_prompt: int = 4000
    curve_s: float = 6.0
    as_chat: bool | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_given(self, ("conversations", "prompts"))
        most = max(self.conversations)
        if len(self.prompts) < most:
            problem = f"{len(self.prompts)} prompts for {most} conversations at a time"
            raise OptionError(f"{problem}: give at least as many prompts (--questions)")

    @property
    def loads(self) -> tuple[int, ...]:
        """The loads to measure, rising; one conversation after the other among them."""
        return (*sorted({1, *self.conversations}),)

    @property
    def expressions(self) -> tuple[str, ...]:
        """The drafters to measure, plain decoding first."""
        return (*dict.fromkeys([PLAIN, *self.drafters]),)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """One drafter at one load; spreads are over repetitions.

    `tokens_per_second` is of all conversations together. `over_plain` compares it with plain
    decoding at the same load, `over_plain_alone` with plain decoding one after the other,
    `over_alone` with the same drafter one after the other; `allowed` is what the target's costs
    allow for the last, `width` how many tokens a conversation has evaluated at once, on average.
    `n_same` of the answers are those of plain decoding one after the other, at temperature 0.
    """

    target: TargetFacts
    drafter: str
    conversations: int
    n_prompts: int
    max_tokens: int
    repetitions: int
    temperature: float
    tokens_per_second: Spread
    over_plain: Ratio
    over_plain_alone: Ratio
    over_alone: Ratio
    allowed: float
    width: float
    texts_per_evaluation: float
    n_same: int | None
    first_token: FirstToken | None


@dataclass(frozen=True, slots=True)
class _Run:
    """The answers of one repetition, by prompt, and the wall time of all together."""

    results: list[GenerationResult]
    seconds: float
    texts_per_evaluation: float

    @property
    def tokens_per_second(self) -> float:
        return sum(len(each.token_ids) for each in self.results) / self.seconds

    @property
    def rounds(self) -> int:
        return sum(each.stats.rounds for each in self.results)

    @property
    def width(self) -> float:
        stats = [each.stats for each in self.results]
        nodes = sum(each.drafted + each.non_candidates for each in stats)
        return 1.0 + nodes / max(1, self.rounds)


def measure_load(
    bench: LoadBench, *, progress: Callable[[str], None] = lambda _: None
) -> list[LoadResult]:
    """Measure all drafters at all loads; raises as opening an engine does."""
    progress("measuring the cost of evaluations")
    options = bench.options
    context = options.get("context", ContextOptions(n_ctx=4096))
    loading = LoadOptions(context, n_gpu_layers=options.get("n_gpu_layers", "auto"))
    curve = measure_target_costs(bench.target, loading, seconds=bench.curve_s)
    first_tokens = _first_tokens(bench, progress)
    loads, names = bench.loads, bench.expressions
    arms = [(name, n) for name in names for n in loads]
    runs: dict[tuple[str, int], list[_Run]] = {arm: [] for arm in arms}
    with ExitStack() as stack:
        engines = {name: stack.enter_context(_open(bench, name)) for name in names}
        facts = target_facts(engines[PLAIN].model)
        tokens = {name: _tokens(engine, bench) for name, engine in engines.items()}
        for name, engine in engines.items():
            engine.generate_many(tokens[name], bench.params, max_tokens=_WARM_UP)
        for repetition, arm in interleaved(len(arms), bench.repetitions):
            name, n = arms[arm]
            progress(f"repetition {repetition + 1} of {bench.repetitions}: {name}, {n} at a time")
            seed = (bench.params.seed or 0) + repetition
            params = bench.params.replace(seed=seed)
            runs[name, n].append(_answer(engines[name], tokens[name], params, bench.max_tokens, n))
    return [_result(bench, facts, curve, runs, name, n, first_tokens.get(name)) for name, n in arms]


def _first_tokens(bench: LoadBench, progress: Callable[[str], None]) -> dict[str, FirstToken]:
    if not bench.long_prompt:
        return {}
    found = {}
    for name in bench.expressions:
        progress(f"a short prompt beside a long one: {name}")
        found[name] = measure_first_token(
            bench.target, name, bench.long_prompt, bench.repetitions, bench.options
        )
    return found


def _open(bench: LoadBench, drafter: str) -> Engine:
    """Open an engine with a slot for each of the most conversations, and room for their texts."""
    slots, options = max(bench.loads), dict(bench.options)
    # Generously: a prompt's tokens are only known when the model is open.
    longest = max(len(prompt) if isinstance(prompt, str) else 2000 for prompt in bench.prompts)
    options["n_ctx"] = slots * (256 * -(-(longest + bench.max_tokens + 128) // 256))
    return Engine(bench.target, drafter, slots=slots, **options)


def _tokens(engine: Engine, bench: LoadBench) -> list[list[int]]:
    return [prompt_ids(engine, prompt, bench.as_chat) for prompt in bench.prompts]


def _answer(
    engine: Engine, prompts: Sequence[list[int]], params: SamplingParams, max_tokens: int, n: int
) -> _Run:
    """Answer all prompts, n at a time."""

    def answer(prompt: list[int]) -> GenerationResult:
        return engine.submit(prompt, params, max_tokens=max_tokens).result

    before = dataclasses.replace(engine.statistics().load)
    started = time.perf_counter()
    with ThreadPoolExecutor(n) as users:
        results = list(users.map(answer, prompts))
    seconds = time.perf_counter() - started
    load = engine.statistics().load
    evaluations = load.evaluations - before.evaluations
    return _Run(results, seconds, (load.texts - before.texts) / max(1, evaluations))


def _result(
    bench: LoadBench,
    facts: TargetFacts,
    curve: CostCurve,
    runs: Mapping[tuple[str, int], list[_Run]],
    name: str,
    n: int,
    first_token: FirstToken | None,
) -> LoadResult:
    def speeds(name: str, n: int) -> list[float]:
        return [run.tokens_per_second for run in runs[name, n]]

    own, alone, plain_alone = runs[name, n], runs[name, 1], runs[PLAIN, 1]
    n_same = None
    if bench.params.is_greedy:
        pairs = zip(own[0].results, plain_alone[0].results, strict=True)
        n_same = sum(ours.token_ids == theirs.token_ids for ours, theirs in pairs)
    return LoadResult(
        target=facts,
        drafter=short_label(parse_expression(name)),
        conversations=n,
        n_prompts=len(bench.prompts),
        max_tokens=bench.max_tokens,
        repetitions=bench.repetitions,
        temperature=bench.params.temperature,
        tokens_per_second=spread_of(speeds(name, n)),
        over_plain=ratio_of(speeds(name, n), speeds(PLAIN, n)),
        over_plain_alone=ratio_of(speeds(name, n), speeds(PLAIN, 1)),
        over_alone=ratio_of(speeds(name, n), speeds(name, 1)),
        allowed=allowed(curve, alone[0].width, spread_of(_round_s(alone)).median, n),
        width=sum(run.width for run in own) / len(own),
        texts_per_evaluation=sum(run.texts_per_evaluation for run in own) / len(own),
        n_same=n_same,
        first_token=first_token,
    )


def _round_s(runs: Sequence[_Run]) -> list[float]:
    return [run.seconds / max(1, run.rounds) for run in runs]


def allowed(curve: CostCurve, width: float, round_s: float, n: int) -> float:
    """Return how often n conversations together may be as fast as one after the other.

    A round of `width` tokens took `round_s` seconds alone: T(width), and what is not shared, such
    as drafting. Together n rounds take T(n width) and n times the rest.
    """

    def seconds(tokens: float) -> float:
        below = int(tokens)
        low, high = curve.seconds(max(1, below)), curve.seconds(below + 1)
        return low + (high - low) * (tokens - below)

    rest = max(0.0, round_s - seconds(width))
    return n * round_s / (seconds(n * width) + n * rest) if n > 1 else 1.0
