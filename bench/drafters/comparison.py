"""Drafters against plain decoding: same target, prompts and process, measured in turn.

The time is that of generation as a user gets it: evaluation, drafting, sampling, verification and
text; without the prompt, which all arms have to evaluate alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from specrun.bench.diagnosis.diagnosis import diagnose, work_of
from specrun.bench.drafters.answers import Answers, Arm, timed_speed
from specrun.bench.drafters.prompts import Prompt, Question
from specrun.bench.drafters.scores import Scorer
from specrun.bench.timing import Ratio, Spread, interleaved, ratio_of, require_given, spread_of
from specrun.bindings.errors import OptionError
from specrun.bindings.machine.devices import devices
from specrun.bindings.models import Model
from specrun.runtime.acceptance import SequentialCascade, build_rule
from specrun.runtime.engine import Runtime
from specrun.runtime.language import Expression, parse_expression
from specrun.runtime.laws import SamplingParams
from specrun.runtime.planning import CostCurve, load_curve, mixture
from specrun.runtime.round import GenerationResult, common_prefix
from specrun.runtime.tuning import measure_alpha, require_law

PLAIN, EXACT = "none", "exact"
_WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class DrafterBench:
    """The settings: `drafters` against plain decoding, for all `params` (one a temperature).

    `drafters` are expressions of the drafter language, with their files; each runs with all
    acceptance `rules`. Every repetition answers all prompts, with the seed of `params` plus the
    number of the repetition. `as_chat` None puts prompts into a conversation for models with a chat
    template and lets others continue the text. `options` are those of `Runtime`. `workload` is the
    kind of prompts, and the drafters' knowledge of their answers. With `alpha` all prompts are
    answered once more, untimed, for the mean of sum min(p, q). With `run_code` the programs that
    answers hold are run, to score them.
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
    alpha: bool = False
    run_code: bool = False

    def __post_init__(self) -> None:
        lists = ("drafters", "prompts", "params", "rules")
        require_given(self, lists, ("max_tokens", "repetitions"))
        for name in self.rules:
            if isinstance(build_rule(name), SequentialCascade):
                problem = "verifies nothing, so that it may have no rounds to compare"
                raise OptionError(f"{name} {problem}: specrun bench cascade measures it")


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """The target as loaded; `padded_parameters` of `n_params` are there for their cost alone."""

    model: str
    n_bytes: int
    n_params: int
    padded_parameters: int
    backend: str
    n_gpu_layers: int


@dataclass(frozen=True, slots=True)
class TextComparison:
    """How many greedy answers are plain decoding's own.

    `first_difference` is the token, from 0, at which the answer that departs earliest does so.
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
    `tested_by_position[n]` drafts that reached it; of a chain, EAGLE's n-alpha. Under rules that
    are not exact `total_variation` and `changed_share` are those of `SpecStats`. `alpha` is the
    mean of sum min(p, q), None if it was not measured or a drafter has no distribution. `reason` is
    the largest cost if drafting does not pay, if the target's cost curve was measured before. Of a
    suite there is a result for each `category`, and one for all with category "". `score` is the
    mean of the answers' scores (0 to 1) by a `metric`, None if nothing is known of them.
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
    total_variation: float | None = None
    changed_share: float | None = None
    alpha: float | None = None
    reason: str | None = None
    category: str = ""
    metric: str = ""
    score: float | None = None

    @property
    def label(self) -> str:
        """The drafter, and the acceptance rule if it is not the usual one."""
        if self.rule == EXACT:
            return self.drafter
        return f"{self.drafter}, {'' if self.exact else 'not exact: '}{self.rule}"

    @property
    def advice(self) -> str | None:
        """The advice if drafting did not pay; None if it did."""
        if self.speed_up is None or self.speed_up.value >= 1.0:
            return None
        slower = (
            f"{self.label} at temperature {self.temperature:g} is slower than plain decoding "
            f"({self.speed_up.value:.2f}x)"
        )
        if self.reason is not None:
            return f"{slower}: {self.reason} (specrun why shows more)"
        return f"{slower}: draft fewer tokens (a lower n), or drop the drafter"


Progress = Callable[[int, int, str], None]
"""Called with the answers given so far, those in all, and the current measurement."""


def measure_drafters(
    bench: DrafterBench, *, progress: Progress = lambda _done, _total, _what: None
) -> list[DrafterResult]:
    """Return one result for plain decoding and each drafter at each temperature, plain first.

    All runtimes are open at once (weights are mapped, so shared), and every repetition visits all.
    """
    drafting = [(name, rule) for name in bench.drafters if name != PLAIN for rule in bench.rules]
    with ExitStack() as stack:
        arms = []
        for drafter, rule in dict.fromkeys([(PLAIN, EXACT), *drafting]):
            runtime = Runtime(bench.target, drafter=drafter, accept=rule, **bench.options)
            stack.enter_context(runtime)
            arms.append(Arm(runtime, bench.prompts, bench.as_chat))
        arms[0].require_room(bench.max_tokens)
        facts = target_facts(arms[0].runtime.model)
        curve = _stored_curve(arms[0].runtime)
        total = len(arms) * bench.repetitions * len(bench.params) * len(bench.prompts)
        done = itertools.count()

        def step(what: str) -> None:
            progress(next(done), total, what)

        for arm in arms:
            progress(0, total, f"warming up {arm.label}")
            arm.answer(0, bench.params[0], min(_WARM_UP_TOKENS, bench.max_tokens), seed=0)
        results = []
        groups, scorer = _groups(bench, arms[0]), Scorer(bench.run_code)
        for params in bench.params:
            measured = _measure(arms, params, bench, step)
            for group, (arm, own) in itertools.product(groups, zip(arms, measured, strict=True)):
                runs, plain = (
                    [_together(run, group) for run in each] for each in (own, measured[0])
                )
                if not all(each.tokens for each in (*runs, *plain)):
                    continue  # a category with nothing but empty answers has no speed
                plain = runs if own is measured[0] else plain
                result = _result(bench, facts, arm, params, runs, plain, curve, group)
                progress(0, total, f"scoring {arm.label}")
                result = _scored(result, arm, bench, own, group, scorer)
                if bench.alpha and not group.category:
                    progress(0, total, f"alpha of {arm.label}")
                    result = replace(result, alpha=_alpha(arm, params, bench.max_tokens))
                results.append(result)
    return results


_Run = dict[int, list[GenerationResult]]
"""The answers of a repetition: those to each turn, by the prompt's number."""


@dataclass(frozen=True, slots=True)
class _Group:
    """The prompts of a category, by their numbers; category "" has all."""

    category: str
    numbers: tuple[int, ...]


_LENGTHS = (1, 2, 4, 8, 16, 32, 64, 128)  # thousands of tokens
_SHORTEST = 700


def _groups(bench: DrafterBench, arm: Arm) -> list[_Group]:
    """Return all prompts, then those of each category of a suite."""
    by_category: dict[str, list[int]] = {}
    for number, prompt in enumerate(bench.prompts):
        if isinstance(prompt, Question):
            category, n_tokens = prompt.category, len(arm.prompts[number])
            if prompt.by_length and n_tokens >= _SHORTEST:
                nearest = min(_LENGTHS, key=lambda length: abs(length - n_tokens / 1000))
                category = f"{category}, {nearest}k"
            by_category.setdefault(category, []).append(number)
    groups = [_Group("", tuple(range(len(bench.prompts))))]
    return groups + [_Group(name, tuple(numbers)) for name, numbers in by_category.items()]


def _together(run: _Run, group: _Group) -> Answers:
    answers = Answers()
    for number in group.numbers:
        for result in run[number]:
            answers.add(result)
    return answers


def _scored(
    result: DrafterResult,
    arm: Arm,
    bench: DrafterBench,
    runs: Sequence[_Run],
    group: _Group,
    scorer: Scorer,
) -> DrafterResult:
    """Return the result with the mean score of the answers, if all have one metric."""
    scores: dict[str, list[float]] = {}
    for number in group.numbers:
        prompt = bench.prompts[number]
        if isinstance(prompt, Question):
            said = itertools.chain.from_iterable(
                zip(prompt.references, run[number], strict=False) for run in runs
            )
            for reference, answer in said:
                score = scorer.score(reference, arm.content(answer))
                if reference is not None and score is not None:
                    scores.setdefault(reference.metric, []).append(score)
    if len(scores) != 1:
        return result
    ((metric, values),) = scores.items()
    return replace(result, metric=metric, score=sum(values) / len(values))


def _alpha(arm: Arm, params: SamplingParams, max_tokens: int) -> float | None:
    """Return the mean of sum min(p, q) over an arm's answers; None without distributions."""
    runtime = arm.runtime
    try:
        require_law(runtime.environment, runtime.drafter)
    except OptionError:
        return None
    found = measure_alpha(
        runtime.environment, runtime.drafter, arm.prompts, params, max_tokens=max_tokens
    )
    return found.alpha if found.n_places else None


def with_files(text: str, files: Mapping[str, Path]) -> str:
    """Return a drafter expression with the files it left out, given by the drafter's name."""

    def filled(part: Expression) -> Expression:  # values of options are no drafters
        arguments = tuple(map(filled, part.arguments))
        if not arguments and part.atom in files:
            arguments = (Expression(str(files[part.atom])),)
        return replace(part, arguments=arguments, is_call=part.is_call or bool(arguments))

    return str(filled(parse_expression(text)))


def _measure(
    arms: Sequence[Arm], params: SamplingParams, bench: DrafterBench, step: Callable[[str], None]
) -> list[list[_Run]]:
    """Return each arm's repetitions, in order; the arms take turns prompt by prompt.

    Machines that others use change their speed within seconds: no arm is to have a minute of its
    own.
    """
    measured: list[list[_Run]] = [[{} for _ in range(bench.repetitions)] for _ in arms]
    n_prompts = len(bench.prompts)
    for turn, index in interleaved(len(arms), bench.repetitions * n_prompts):
        arm, (repetition, number) = arms[index], divmod(turn, n_prompts)
        step(f"{arm.label}, temperature {params.temperature:g}")
        seed = (params.seed or 0) + repetition
        said = arm.answer_turns(number, params, bench.max_tokens, seed=seed)
        if not isinstance(bench.prompts[number], Question):
            timed_speed(said[0])
        measured[index][repetition][number] = said
    return measured


def _result(
    bench: DrafterBench,
    facts: TargetFacts,
    arm: Arm,
    params: SamplingParams,
    own: Sequence[Answers],
    plain: Sequence[Answers],
    curve: CostCurve | None,
    group: _Group,
) -> DrafterResult:
    speeds, plain_speeds = ([run.tokens_per_second for run in runs] for runs in (own, plain))
    together = Answers.together(own)
    given_prefix, tested = together.acceptance_given_prefix()
    drafter, rule = arm.runtime.session.drafter, arm.runtime.session.rule
    distance, changed = together.departures() or (None, None)
    return DrafterResult(
        target=facts,
        drafter=arm.label,
        rule=rule.name,
        temperature=params.temperature,
        n_prompts=len(group.numbers),
        max_tokens=bench.max_tokens,
        repetitions=bench.repetitions,
        tokens=together.tokens,
        tokens_per_second=spread_of(speeds),
        speed_up=None if own is plain else ratio_of(speeds, plain_speeds),
        time_to_first_token_s=spread_of([run.time_to_first_token_s for run in own]),
        acceptance_rate=together.accepted / together.drafted if together.drafted else None,
        mean_accepted_length=together.tokens / together.rounds,
        acceptance_by_position=together.acceptance_by_position(),
        round_us=spread_of([1e6 * run.decoding_s / run.rounds for run in own]),
        overhead_us_per_round=spread_of([1e6 * run.overhead_s / run.rounds for run in own]),
        text=_compare(own[0], plain[0]) if params.is_greedy and own is not plain else None,
        prompt_tokens=sum(len(arm.prompts[each]) for each in group.numbers) / len(group.numbers),
        workload=bench.workload,
        exact=rule.exact,
        is_chain=drafter.max_nodes > 0 and drafter.max_leaves == 1,
        acceptance_given_prefix=given_prefix,
        tested_by_position=tested,
        total_variation=distance,
        changed_share=changed,
        category=group.category,
        reason=None if own is plain or curve is None else _reason(arm, params, own, plain, curve),
    )


def _stored_curve(runtime: Runtime) -> CostCurve | None:
    """Return the target's curve, if it was measured with these settings."""
    model = runtime.model
    return load_curve(model.path, runtime.options.context, model.n_gpu_layers)


def _reason(
    arm: Arm,
    params: SamplingParams,
    own: Sequence[Answers],
    plain: Sequence[Answers],
    curve: CostCurve,
) -> str | None:
    """Return the reason why a drafter does not pay."""
    works = [work_of(result for run in runs for result in run.results) for runs in (plain, own)]
    experts = mixture(arm.runtime.model.header)
    found = diagnose(arm.label, params.temperature, works[0], works[1], curve, mixture=experts)
    return found.reasons[0].text if found.reasons and not found.pays else None


def _compare(own: Answers, plain: Answers) -> TextComparison:
    pairs = list(zip(own.token_ids, plain.token_ids, strict=True))
    parted = [common_prefix(ours, theirs) for ours, theirs in pairs if ours != theirs]
    return TextComparison(len(pairs), len(pairs) - len(parted), min(parted, default=None))


def target_facts(model: Model) -> TargetFacts:
    """Return a target's facts for tables."""
    gpus = [device.name for device in devices() if device.kind in ("gpu", "igpu")]
    return TargetFacts(
        model=model.path.name,
        n_bytes=model.n_bytes,
        n_params=model.n_params,
        padded_parameters=model.header.n_padded,
        backend=(model.n_gpu_layers and ", ".join(gpus)) or "CPU",
        n_gpu_layers=model.n_gpu_layers,
    )
