"""Drafters against plain decoding: same target, same prompts, same process, measured in turn.

What is timed is generation as a user gets it: evaluation, drafting, sampling, verification and
text; without the prompt, which all arms have to evaluate alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specrun.bench.drafters.answers import Answers, Arm
from specrun.bench.drafters.prompts import Prompt
from specrun.bench.timing import Ratio, Spread, interleaved, ratio_of, spread_of
from specrun.bindings.devices import devices
from specrun.bindings.errors import OptionError
from specrun.runtime.language import Expression, parse_expression
from specrun.runtime.runtime import Runtime
from specrun.runtime.sampling import SamplingParams

PLAIN, EXACT = "none", "exact"
_WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class DrafterBench:
    """What to compare: `drafters` against plain decoding, for all of `params` (one a temperature).

    `drafters` are expressions of the drafter language, with their files; each runs with all
    acceptance `rules`. Every repetition answers all prompts, with the seed of `params` plus the
    number of the repetition. `as_chat` None asks models with a chat template in a conversation and
    lets others continue the text. `options` are those of `Runtime`. `workload` says what the
    prompts are and what the drafters know of their answers.
    """

    target: Path
    drafters: tuple[str, ...]
    prompts: tuple[Prompt, ...]
    params: tuple[SamplingParams, ...]
    rules: tuple[str, ...] = (EXACT,)
    max_tokens: int = 128
    repetitions: int = 5
    as_chat: bool | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    workload: str = ""

    def __post_init__(self) -> None:
        for name in ("drafters", "prompts", "params", "rules"):
            if not getattr(self, name):
                raise OptionError(f"no {name} are given: there is nothing to measure")
        for name in ("max_tokens", "repetitions"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} is {getattr(self, name)}: give at least 1")


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """The target as it was loaded; `padded_parameters` of `n_params` are there for their cost
    alone."""

    model: str
    n_bytes: int
    n_params: int
    padded_parameters: int
    backend: str
    n_gpu_layers: int


@dataclass(frozen=True, slots=True)
class TextComparison:
    """Whether greedy answers are plain decoding's own: in how many of the prompts, and where the
    first differs.

    `first_difference` counts tokens from 0, within the prompt where the texts part earliest.
    """

    n_prompts: int
    n_same: int
    first_difference: int | None


@dataclass(frozen=True, slots=True)
class DrafterResult:
    """One drafter at one temperature; spreads are over repetitions, times in seconds.

    `speed_up` compares with plain decoding at the same temperature, `text` too (at temperature 0
    only). `acceptance_rate` and `mean_accepted_length` are of all repetitions together. `round_us`
    is a whole round, `overhead_us_per_round` its part outside native evaluation, in microseconds.
    `prompt_tokens` is the mean length of a prompt. `exact` is whether the rule keeps the target's
    distribution. `acceptance_given_prefix[n]` is the acceptance at depth n + 1 of the
    `tested_by_position[n]` drafts that reached it; of a chain, EAGLE's n-alpha.
    """

    target: TargetFacts
    drafter: str
    rule: str
    temperature: float
    n_prompts: int
    max_tokens: int
    repetitions: int
    tokens: int
    tokens_per_second: Spread
    speed_up: Ratio | None
    time_to_first_token_s: Spread
    acceptance_rate: float | None
    mean_accepted_length: float
    acceptance_by_position: tuple[float, ...]
    round_us: Spread
    overhead_us_per_round: Spread
    text: TextComparison | None
    prompt_tokens: float = 0.0
    workload: str = ""
    exact: bool = True
    is_chain: bool = False
    acceptance_given_prefix: tuple[float, ...] = ()
    tested_by_position: tuple[int, ...] = ()

    @property
    def label(self) -> str:
        """The drafter, and the acceptance rule where it is not the usual one."""
        if self.rule == EXACT:
            return self.drafter
        return f"{self.drafter}, {self.rule}" + ("" if self.exact else " (not exact)")

    @property
    def advice(self) -> str | None:
        """What to do if drafting did not pay; None if it did."""
        if self.speed_up is None or self.speed_up.value >= 1.0:
            return None
        return (
            f"{self.label} at temperature {self.temperature:g} is slower than plain decoding "
            f"({self.speed_up.value:.2f}x): draft fewer tokens (a lower n), or drop the drafter"
        )


Progress = Callable[[int, int, str], None]
"""Called with the answers given so far, those in all, and what is measured now."""


def measure_drafters(
    bench: DrafterBench, *, progress: Progress = lambda _done, _total, _what: None
) -> list[DrafterResult]:
    """Return one result for plain decoding and each drafter at each temperature, plain first.

    All runtimes are open at once (weights are mapped, so shared), and each repetition visits every
    arm.
    """
    with ExitStack() as stack:
        arms = [stack.enter_context(_open(*names, bench)) for names in _arm_names(bench)]
        facts = _facts(arms[0].runtime)
        steps = _Steps(
            progress, len(arms) * bench.repetitions * len(bench.params) * len(bench.prompts)
        )
        for arm in arms:
            steps.say(f"warming up {arm.label}")
            arm.answer(0, bench.params[0], min(_WARM_UP_TOKENS, bench.max_tokens), seed=0)
        results = []
        for params in bench.params:
            measured = _measure(arms, params, bench, steps)
            results += [
                _result(bench, facts, arm, params, own, measured[0])
                for arm, own in zip(arms, measured, strict=True)
            ]
    return results


def with_files(text: str, files: Mapping[str, Path]) -> str:
    """Return a drafter expression with the paths that were left out of it, by the drafter's
    name."""

    def filled(expression: Expression) -> Expression:
        arguments = tuple(map(filled, expression.arguments))
        if not arguments and expression.atom in files:
            arguments = (Expression(str(files[expression.atom])),)
        options = tuple((name, value) for name, value in expression.options)
        return Expression(
            expression.atom,
            arguments,
            options,
            expression.count,
            expression.is_call or bool(arguments),
        )

    return str(filled(parse_expression(text)))


class _Steps:
    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0

    def say(self, what: str) -> None:
        self._progress(self._done, self._total, what)

    def next(self, what: str) -> None:
        self.say(what)
        self._done += 1


def _arm_names(bench: DrafterBench) -> list[tuple[str, str]]:
    """Return drafters with their rules, plain decoding first; it has no drafts to accept."""
    drafting = [(name, rule) for name in bench.drafters if name != PLAIN for rule in bench.rules]
    return list(dict.fromkeys([(PLAIN, EXACT), *drafting]))


def _open(drafter: str, rule: str, bench: DrafterBench) -> Arm:
    runtime = Runtime(bench.target, drafter=drafter, accept=rule, **bench.options)
    return Arm(runtime, bench.prompts, bench.as_chat)


def _measure(
    arms: Sequence[Arm], params: SamplingParams, bench: DrafterBench, steps: _Steps
) -> list[list[Answers]]:
    """Return each arm's repetitions, in order."""
    measured: list[list[Answers]] = [[] for _ in arms]
    for repetition, index in interleaved(len(arms), bench.repetitions):
        answers = Answers()
        for number in range(len(bench.prompts)):
            steps.next(f"{arms[index].label}, temperature {params.temperature:g}")
            answers.add(
                arms[index].answer(
                    number, params, bench.max_tokens, seed=(params.seed or 0) + repetition
                )
            )
        measured[index].append(answers)
    return measured


def _result(
    bench: DrafterBench,
    facts: TargetFacts,
    arm: Arm,
    params: SamplingParams,
    own: Sequence[Answers],
    plain: Sequence[Answers],
) -> DrafterResult:
    speeds = [run.tokens_per_second for run in own]
    together = Answers.together(own)
    drafter = arm.runtime.session.drafter
    return DrafterResult(
        target=facts,
        drafter=arm.label,
        rule=arm.runtime.session.rule.name,
        temperature=params.temperature,
        n_prompts=len(bench.prompts),
        max_tokens=bench.max_tokens,
        repetitions=bench.repetitions,
        tokens=together.tokens,
        tokens_per_second=spread_of(speeds),
        speed_up=None
        if own is plain
        else ratio_of(speeds, [run.tokens_per_second for run in plain]),
        time_to_first_token_s=spread_of([run.time_to_first_token_s for run in own]),
        acceptance_rate=together.accepted / together.drafted if together.drafted else None,
        mean_accepted_length=together.tokens / together.rounds,
        acceptance_by_position=together.acceptance_by_position,
        round_us=spread_of([1e6 * run.decoding_s / run.rounds for run in own]),
        overhead_us_per_round=spread_of([1e6 * run.overhead_s / run.rounds for run in own]),
        text=_compare(own[0], plain[0]) if params.is_greedy and own is not plain else None,
        prompt_tokens=arm.prompt_tokens,
        workload=bench.workload,
        exact=arm.runtime.session.rule.exact,
        is_chain=drafter.max_nodes > 0 and drafter.max_leaves == 1,
        acceptance_given_prefix=together.acceptance_given_prefix,
        tested_by_position=together.tested_by_position,
    )


def _compare(own: Answers, plain: Answers) -> TextComparison:
    pairs = list(zip(own.token_ids, plain.token_ids, strict=True))
    parted = [
        next(
            (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
            min(len(ours), len(theirs)),
        )
        for ours, theirs in pairs
        if ours != theirs
    ]
    return TextComparison(len(pairs), len(pairs) - len(parted), min(parted, default=None))


def _facts(runtime: Runtime) -> TargetFacts:
    from specrun.convert.cut import PADDED_PARAMETERS

    model = runtime.model
    padded = model.header.metadata.get(PADDED_PARAMETERS, 0)
    gpus = (
        [device.name for device in devices() if device.kind in ("gpu", "igpu")]
        if model.n_gpu_layers
        else []
    )
    return TargetFacts(
        model=model.path.name,
        n_bytes=model.n_bytes,
        n_params=model.n_params,
        padded_parameters=padded if isinstance(padded, int) else 0,
        backend=", ".join(gpus) or "CPU",
        n_gpu_layers=model.n_gpu_layers,
    )
