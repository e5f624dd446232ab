"""Rules of two models against plain decoding: quality, latency, rejection and deferral."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from specrun.bench.cascade.examples import Example, Quality, check_packages, quality_of
from specrun.bench.cascade.teacher import (
    StatedLaw,
    Teacher,
    TeacherForced,
    draft_law,
    stated_law,
    target_law,
)
from specrun.bench.drafters.answers import Arm
from specrun.bench.timing import Ratio, Spread, interleaved, ratio_of, require_given, spread_of
from specrun.runtime.acceptance import SequentialCascade, build_rule
from specrun.runtime.engine import Runtime
from specrun.runtime.language import parse_expression, quoted
from specrun.runtime.laws import SamplingParams
from specrun.runtime.round import GenerationResult

# == The comparison ================================================================================
#
# Every repetition answers all examples with all rules in turn, in one process. All rules of a draft
# length share the target's context and the draft model's; only the rule is exchanged. Latency is
# wall time a token, prompts included (a sequential cascade may spare the target even those), over
# that of plain decoding in the same repetition.


PLAIN_TARGET, PLAIN_SMALL, ORACLE = "plain target", "plain small", "oracle-cascade"
_ORACLE_LAW = "cascade-diff"
_DISTANCES = ("bild", "bild-star")
_WARM_UP_TOKENS = 16

Metric = Literal["rouge_2", "bleu", "exact_match", "cross_entropy", "expected_accuracy"]
LOWER_IS_BETTER: tuple[Metric, ...] = ("cross_entropy",)


def with_alphas(rules: Sequence[str], alphas: Sequence[float]) -> tuple[str, ...]:
    """Return the rules with each alpha, those without an alpha or with options of their own once.

    A distance of BiLD is that of a token of probability 1 - alpha: rollback = -log(1 - alpha).
    Raises `OptionError` for an unknown rule, or an alpha outside the range of one.
    """
    found: list[str] = []
    for text in rules:
        expression = parse_expression(text)
        rule = build_rule(text)
        if expression.is_call or not (hasattr(rule, "alpha") or expression.atom in _DISTANCES):
            found.append(rule.name)
        elif expression.atom in _DISTANCES:
            distances = (0.0 - math.log(1.0 - alpha) for alpha in alphas if alpha < 1.0)
            found += [build_rule(f"{text}(rollback={each:.4g})").name for each in distances]
        else:
            found += [build_rule(f"{text}(alpha={alpha:g})").name for alpha in alphas]
    return tuple(dict.fromkeys(found))


@dataclass(frozen=True, slots=True)
class CascadeBench:
    """The settings: `rules`, by their names for `--accept`, for all `params` and draft `lengths`.

    `target` is timed; `teacher` is read along texts, and may be a cheaper file if the target was
    padded and has the same output. `small` drafts, and answers alone. Every repetition answers all
    `examples` with the seed of `params` plus its number. `as_chat` is that of `prompt_ids`.
    """

    target: Path
    teacher: Path
    small: Path
    examples: tuple[Example, ...]
    rules: tuple[str, ...]
    params: tuple[SamplingParams, ...]
    lengths: tuple[int, ...] = (5,)
    max_tokens: int = 64
    repetitions: int = 3
    as_chat: bool | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lists = ("examples", "rules", "params", "lengths")
        require_given(self, lists, ("max_tokens", "repetitions"))

    @property
    def has_answers(self) -> bool:
        """Whether every example has an answer that texts can be compared with."""
        return all(example.is_answer for example in self.examples)


@dataclass(frozen=True, slots=True)
class CascadePoint:
    """One rule at one setting. Spreads are over repetitions, of `cross_entropy` over texts.

    `method` is the rule without its parameters, or plain decoding of one model. `latency` is
    seconds a token relative to the plain target's, `speed_up` its inverse; None if nothing ran.
    `rejection_rate` is rejected over tested drafts. `exact_match`, `rouge_2` and `bleu` are of the
    answers, None without references; `cross_entropy`, `expected_accuracy` and `deferral_rate` of
    the rule's distribution along the references (see `TeacherForced`), None if no distribution is
    stated for a place. `total_variation` and `changed_share` are those of the answers' statistics.
    """

    method: str
    rule: str
    exact: bool
    temperature: float
    top_p: float
    draft_length: int | None
    n_examples: int
    repetitions: int
    tokens: int
    seconds_per_token: Spread | None
    seconds_per_answer: Spread | None
    latency: Ratio | None
    speed_up: float | None
    rejection_rate: float | None
    deferral_rate: float | None
    exact_match: Spread | None
    rouge_2: Spread | None
    bleu: Spread | None
    cross_entropy: Spread | None
    excess_cross_entropy: Spread | None
    expected_accuracy: float | None
    total_variation: float | None
    changed_share: float | None

    def quality(self, metric: Metric) -> float | None:
        """Return a measure of quality; None if it was not measured, or has no finite value."""
        value: Spread | float | None = getattr(self, metric)
        return value.mean if isinstance(value, Spread) else value

    def doubt(self, metric: Metric) -> float:
        """Return the standard error of a measure, 0 if it was measured once.

        Of a cross-entropy it is that of its excess over the plain target's on the same texts.
        """
        name = "excess_cross_entropy" if metric == "cross_entropy" else metric
        value: Spread | float | None = getattr(self, name)
        return value.sd / math.sqrt(value.n) if isinstance(value, Spread) else 0.0


@dataclass(frozen=True, slots=True)
class _Runner:
    """The runtime that answers, for each rule in turn; a plain model has no rule."""

    method: str
    rule: str
    length: int | None
    arm: Arm
    law: StatedLaw | None

    @property
    def label(self) -> str:
        return self.method if self.length is None else f"{self.rule}, n={self.length}"

    def answer(
        self, number: int, params: SamplingParams, max_tokens: int, seed: int
    ) -> GenerationResult:
        self.arm.runtime.session.rule = build_rule(self.rule)
        return self.arm.answer(number, params, max_tokens, seed=seed)


@dataclass(slots=True)
class CascadeResults:
    """The points so far; `interrupted` by Ctrl-C, before all of them were measured."""

    points: list[CascadePoint]
    interrupted: bool = False


Progress = Callable[[int, int, str], None]
"""Called with the answers given so far, those in all, and the current measurement."""


def measure_cascades(
    bench: CascadeBench, *, progress: Progress = lambda _done, _total, _what: None
) -> CascadeResults:
    """Measure all rules at all settings; Ctrl-C ends it with the repetitions that are whole."""
    if bench.has_answers:
        check_packages()
    results = CascadeResults([])
    try:
        with ExitStack() as stack:
            _measure(bench, stack, results, progress)
    except KeyboardInterrupt:
        results.interrupted = True
    return results


def _measure(
    bench: CascadeBench, stack: ExitStack, results: CascadeResults, progress: Progress
) -> None:
    runners = _open(bench, stack)
    per_repetition = len(runners) * len(bench.examples)
    total, done = per_repetition * bench.repetitions * len(bench.params), itertools.count()
    plain = runners[0].arm
    teacher = Teacher(
        bench.teacher,
        bench.small,
        [
            plain.with_answer(number, example.reference)
            for number, example in enumerate(bench.examples)
        ],
        bench.options["context"].n_threads if "context" in bench.options else 0,
        progress=lambda what: progress(0, total, what),
    )
    for arm in dict.fromkeys(runner.arm for runner in runners):
        progress(0, total, "warming up")
        arm.answer(0, bench.params[0], min(_WARM_UP_TOKENS, bench.max_tokens), seed=0)
    for params in bench.params:
        progress(next(done), total, "weighing distributions")
        forced = teacher.force([runner.law for runner in runners], params)
        answers: list[list[list[GenerationResult]]] = [[] for _ in runners]
        try:
            for repetition, index in interleaved(len(runners), bench.repetitions):
                runner, said = runners[index], []
                for number in range(len(bench.examples)):
                    progress(next(done), total, f"{runner.label}, {_setting(params)}")
                    seed = (params.seed or 0) + repetition
                    said.append(runner.answer(number, params, bench.max_tokens, seed))
                answers[index].append(said)
        finally:
            results.points += _points(bench, params, runners, answers, forced)


def _setting(params: SamplingParams) -> str:
    return f"temperature {params.temperature:g}, top-p {params.top_p:g}"


def _open(bench: CascadeBench, stack: ExitStack) -> list[_Runner]:
    """Open plain target and plain small, then one runtime for each draft length."""

    def arm(model: Path, drafter: str = "none", accept: str = "exact") -> Arm:
        runtime = Runtime(model, drafter=drafter, accept=accept, **bench.options)
        stack.enter_context(runtime)
        return Arm(runtime, [example.prompt for example in bench.examples], bench.as_chat)

    runners = [
        _Runner(PLAIN_TARGET, "exact", None, arm(bench.target), target_law),
        _Runner(PLAIN_SMALL, "exact", None, arm(bench.small), draft_law),
    ]
    for length in bench.lengths:
        # Under a rule that is not exact nothing is chosen by the clock, for all rules alike.
        drafting = arm(bench.target, f"draft({quoted(str(bench.small))}, n={length})", "typical")
        for text in dict.fromkeys(["exact", *bench.rules]):
            method = parse_expression(text).atom
            runners.append(_Runner(method, text, length, drafting, stated_law(build_rule(text))))
    return runners


# -- results ---------------------------------------------------------------------------------------


def _points(
    bench: CascadeBench,
    params: SamplingParams,
    runners: Sequence[_Runner],
    answers: Sequence[list[list[GenerationResult]]],
    forced: Sequence[TeacherForced | None],
) -> list[CascadePoint]:
    """Return the points of a setting, from the repetitions that all runners have answered."""
    whole = min(map(len, answers))
    if not whole:
        return []
    plain = [_seconds_per_token(said) for said in answers[0][:whole]]
    points = [
        _point(bench, params, runner, own[:whole], law, plain)
        for runner, own, law in zip(runners, answers, forced, strict=True)
    ]
    deferring = [point for point in points if point.method == _ORACLE_LAW]
    own = [point for point in deferring if point.draft_length == bench.lengths[0]]
    return [*points, *map(_oracle, own)]


def _oracle(point: CascadePoint) -> CascadePoint:
    """Return the figures that an oracle cascade (algorithm 3) shares with a speculative one of the
    same deferral: its distribution. It would need the target at every position, so it has no
    latency."""
    return replace(
        point,
        method=ORACLE,
        rule=point.rule.replace(_ORACLE_LAW, ORACLE),
        draft_length=None,
        seconds_per_token=None,
        seconds_per_answer=None,
        latency=None,
        speed_up=None,
        rejection_rate=None,
    )


def _point(
    bench: CascadeBench,
    params: SamplingParams,
    runner: _Runner,
    answers: Sequence[Sequence[GenerationResult]],
    forced: TeacherForced | None,
    plain: Sequence[float],
) -> CascadePoint:
    seconds = [_seconds_per_token(said) for said in answers]
    latency = ratio_of(seconds, plain)
    together = [result for said in answers for result in said]
    scores = _scores(bench, answers) if bench.has_answers else []
    departed = [result.stats for result in together if result.stats.total_variation is not None]
    return CascadePoint(
        method=runner.method,
        rule=runner.rule,
        exact=runner.method != PLAIN_SMALL and build_rule(runner.rule).exact,
        temperature=params.temperature,
        top_p=params.top_p,
        draft_length=runner.length,
        n_examples=len(bench.examples),
        repetitions=len(answers),
        tokens=sum(len(result.token_ids) for result in together),
        seconds_per_token=spread_of(seconds),
        seconds_per_answer=spread_of([_seconds(said) / len(said) for said in answers]),
        latency=latency,
        speed_up=1.0 / latency.value,
        rejection_rate=_rejection_rate(together, build_rule(runner.rule)),
        deferral_rate=None if forced is None else forced.deferral_rate,
        exact_match=_spread([score.exact_match for score in scores]),
        rouge_2=_spread([score.rouge_2 for score in scores]),
        bleu=_spread([score.bleu for score in scores]),
        cross_entropy=None if forced is None else forced.cross_entropy,
        excess_cross_entropy=None if forced is None else forced.excess,
        expected_accuracy=None if forced is None else forced.expected_accuracy,
        total_variation=_mean([stats.total_variation or 0.0 for stats in departed]),
        changed_share=_mean([stats.changed_share or 0.0 for stats in departed]),
    )


def _scores(bench: CascadeBench, answers: Sequence[Sequence[GenerationResult]]) -> list[Quality]:
    references = [example.reference for example in bench.examples]
    return [quality_of([result.text for result in said], references) for said in answers]


def _seconds(said: Sequence[GenerationResult]) -> float:
    return sum(result.stats.wall_s for result in said)


def _seconds_per_token(said: Sequence[GenerationResult]) -> float:
    return _seconds(said) / max(1, sum(len(result.token_ids) for result in said))


def _rejection_rate(results: Sequence[GenerationResult], rule: object) -> float | None:
    """Return rejected over tested drafts; None if nothing was tested."""
    if isinstance(rule, SequentialCascade):
        return None
    tested = accepted = 0.0
    for result in results:
        pairs = zip(
            result.stats.acceptance_given_prefix, result.stats.tested_by_position, strict=True
        )
        for share, count in pairs:
            tested += count
            accepted += share * count
    return 1.0 - accepted / tested if tested else None


def _spread(values: Sequence[float]) -> Spread | None:
    return spread_of(values) if values else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


# == Best points: the fastest at the target's quality, the best at its latency =====================
#
# The table of the paper's section 6 (Narasimhan et al. 2024, table 2): of each method's points, one
# for each alpha, the fastest that is as good as the plain target, and the best that is as fast.


@dataclass(frozen=True, slots=True)
class BestPoints:
    """The best of a method's points at one setting, by one measure of quality.

    `fastest` is the point of least latency among those whose quality is the target's, within two
    standard errors of their difference; `best` that of best quality among those no slower. None
    if there is no point. `over_exact` is the speed-up of `fastest` over exact speculation.
    """

    method: str
    metric: Metric
    temperature: float
    top_p: float
    draft_length: int
    target_quality: float
    fastest: CascadePoint | None
    over_exact: float | None
    best: CascadePoint | None


def metric_of(points: Sequence[CascadePoint]) -> Metric:
    """Return the measure of quality that points are compared by.

    ROUGE-2 if there are references, else the cross-entropy of real text; if some distribution gives
    a real token no chance, that is infinite, and its expected accuracy is taken.
    """
    if all(point.rouge_2 is not None for point in points):
        return "rouge_2"
    # Those that state a distribution for a place: the others have neither.
    stated = [point for point in points if point.expected_accuracy is not None]
    finite = all(point.cross_entropy is not None for point in stated)
    return "cross_entropy" if finite else "expected_accuracy"


def settings_of(points: Sequence[CascadePoint]) -> list[tuple[float, float, int]]:
    """Return the settings (temperature, top-p, draft length) that were measured, in order."""
    keys = (
        (point.temperature, point.top_p, point.draft_length)
        for point in points
        if point.draft_length is not None
    )
    return list(dict.fromkeys(keys))


def points_at(
    points: Sequence[CascadePoint], setting: tuple[float, float, int]
) -> list[CascadePoint]:
    """Return the points of a setting, with those of plain models, which draft nothing."""
    temperature, top_p, length = setting
    return [
        point
        for point in points
        if (point.temperature, point.top_p) == (temperature, top_p)
        and point.draft_length in (None, length)
    ]


def best_points(points: Sequence[CascadePoint], metric: Metric | None = None) -> list[BestPoints]:
    """Return the best points of each method at each setting, by a metric (None: `metric_of`)."""
    found: list[BestPoints] = []
    for setting in settings_of(points):
        here = points_at(points, setting)
        by = metric or metric_of(here)
        target = next(point for point in here if point.method == PLAIN_TARGET)
        exact = next(point for point in here if point.method == "exact")
        wanted = target.quality(by)
        if wanted is None:
            continue
        left_out = (PLAIN_TARGET, PLAIN_SMALL, ORACLE)
        for method in dict.fromkeys(point.method for point in here):
            if method not in left_out:
                own = [point for point in here if point.method == method]
                found.append(_best(own, setting, by, target, wanted, exact))
    return found


def _best(
    own: Sequence[CascadePoint],
    setting: tuple[float, float, int],
    metric: Metric,
    target: CascadePoint,
    wanted: float,
    exact: CascadePoint,
) -> BestPoints:
    sign = -1.0 if metric in LOWER_IS_BETTER else 1.0
    known = [(point, sign * value) for point in own if (value := point.quality(metric)) is not None]
    as_good = [
        point
        for point, value in known
        if value >= sign * wanted - 2.0 * math.hypot(target.doubt(metric), point.doubt(metric))
    ]
    as_fast = [(point, value) for point, value in known if (point.speed_up or 0.0) >= 1.0]
    fastest = max(as_good, key=lambda point: point.speed_up or 0.0, default=None)
    best = max(as_fast, key=lambda pair: pair[1], default=(None, 0.0))[0]
    over = None
    if fastest is not None and fastest.speed_up and exact.speed_up:
        over = fastest.speed_up / exact.speed_up
    temperature, top_p, length = setting
    return BestPoints(
        own[0].method, metric, temperature, top_p, length, wanted, fastest, over, best
    )
