"""`specrun why`: measures a pair on prompts, in turn with plain decoding, and diagnoses it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specrun.bench.diagnosis.diagnosis import Diagnosis, Work, diagnose, work_of
from specrun.bench.diagnosis.experts import ExpertReads, expert_reads
from specrun.bench.drafters.answers import Arm
from specrun.bench.drafters.prompts import Prompt
from specrun.bench.timing import Budget, Progress, Ratio, ratio_of
from specrun.bindings.contexts.context import Context
from specrun.bindings.errors import OptionError
from specrun.bindings.gguf import read_header
from specrun.bindings.machine.placement import placing
from specrun.runtime.engine import Runtime, parse_options
from specrun.runtime.language import parse_expression
from specrun.runtime.laws import SamplingParams
from specrun.runtime.planning import (
    MEASURED_SIZES,
    CostCurve,
    EvaluationTimes,
    mixture,
    sized_to_measure,
    target_curve,
)
from specrun.runtime.round import GenerationResult

# == The cost curve, measured between the answers that are compared with it ========================
#
# A machine that others use, or that grows warm, is not as fast as it was when its curve was
# measured, and not alike for all sizes: a curve of another minute may be 10 % off, which looks like
# costs that rounds do not have. So evaluations are timed behind each answer, and their medians
# count, not their least: the answers have met the same disturbances.


_ALWAYS = tuple(size for size in MEASURED_SIZES if size <= 8)
ENOUGH = 16
"""Visits of each size whose median counts."""


class CurveBeside:
    """Times evaluations of a runtime's target, in a small context of their own, behind each answer.

    `known` is the curve of another minute, which has larger sizes. `n_answers` will be timed,
    whose middle lies behind `depth` tokens: attention to them is a part of a token's cost.
    """

    def __init__(self, runtime: Runtime, known: CostCurve, n_answers: int, depth: int) -> None:
        self._known = known
        self._passes = math.ceil(ENOUGH / n_answers)
        model = runtime.model
        options = sized_to_measure(runtime.options.context, model)
        n_ctx = min(options.n_ctx, depth + max(MEASURED_SIZES))
        options = dataclasses.replace(options, n_ctx=n_ctx, n_outputs=max(MEASURED_SIZES))
        self._context = Context(model, options)
        depth = min(depth, self._context.n_ctx - max(MEASURED_SIZES))
        try:
            self._times = EvaluationTimes(self._context, max(0, depth))
        except BaseException:  # nobody enters a context that was never made
            self._context.close()
            raise
        self._is_backwards = False

    def close(self) -> None:
        """Free the context; measured sizes stay."""
        self._context.close()

    def visit(self, answer: GenerationResult) -> None:
        """Time the smallest sizes, and those of the rounds of an answer that was just timed."""
        sizes = sorted({*_ALWAYS, *_widths(answer, max(MEASURED_SIZES))})
        for _ in range(self._passes):
            for size in reversed(sizes) if self._is_backwards else sizes:
                self._times.visit(size)
            self._is_backwards = not self._is_backwards

    def curve(self) -> CostCurve:
        """Return the times, and for larger sizes the known curve, in proportion."""
        here, known = self._times.typical(), self._known
        last = here.sizes[-1]
        beyond = [place for place, size in enumerate(known.sizes) if size > last]
        by = here.seconds(last) / known.seconds(last)
        return CostCurve(
            (*here.sizes, *(known.sizes[place] for place in beyond)),
            (*here.reused, *(by * known.reused[place] for place in beyond)),
            (*here.rebuilt, *(by * known.rebuilt[place] for place in beyond)),
        )


def _widths(answer: GenerationResult, most: int) -> tuple[int, ...]:
    """Return the whole numbers of tokens beside the mean of an answer's rounds with drafts."""
    stats = answer.stats
    tested = stats.tested_by_position
    if not tested or not tested[0]:
        return ()
    mean = 1.0 + (stats.drafted + stats.non_candidates) / tested[0]
    return tuple(min(most, width) for width in {math.floor(mean), math.ceil(mean)})


# == The pair ======================================================================================


PLAIN = "none"
_USUAL_WIDTH = 4  # of rounds, if nothing was drafted
_WARM_UP_TOKENS = 8
_CURVE, _CURVE_SECONDS = 0.2, 10.0  # of the time, and the most, for a curve
_SHORTEST = 24  # tokens of an answer
_VISIT = 30  # tokens that take about as long as a visit of `CurveBeside`


@dataclass(frozen=True, slots=True)
class PairOptions:
    """The pair to diagnose: a `drafter` for a target, on `prompts`.

    All takes about `seconds`: the target's cost curve, if none was measured with these settings,
    and answers of at most `max_tokens`, at most `repetitions` times each. `as_chat` is that of
    `prompt_ids`. `options` are those of `Runtime`.
    """

    target: Path
    drafter: str
    prompts: tuple[Prompt, ...]
    params: SamplingParams
    max_tokens: int = 128
    repetitions: int = 100
    as_chat: bool | None = None
    seconds: float = 60.0
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.prompts:
            raise OptionError("no prompts are given: there is nothing to measure")
        for name in ("max_tokens", "repetitions"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} is {getattr(self, name)}: give at least 1")
        if parse_expression(self.drafter).atom == PLAIN:
            problem = "drafting is compared with plain decoding"
            raise OptionError(f"{problem}: name a drafter with --drafter or -md")


def diagnose_pair(
    options: PairOptions, progress: Progress = lambda _what, _share, _left: None
) -> Diagnosis:
    """Measure plain decoding and the drafter in turn, and name the causes of lost speed.

    Raises as `Runtime` does, and SpecrunError if the target answers nothing.
    """
    opening = parse_options(dict(options.options))
    budget = Budget(options.seconds)
    progress("measuring the cost of evaluations", *budget.progress())
    with placing(opening.placement):
        seconds = min(_CURVE_SECONDS, _CURVE * options.seconds)
        curve = target_curve(options.target, opening, seconds=seconds)
    plain = {name: value for name, value in options.options.items() if name != "accept"}
    with ExitStack() as stack:
        arms = []
        for drafter, given in ((PLAIN, plain), (options.drafter, options.options)):
            runtime = stack.enter_context(Runtime(options.target, drafter, **given))
            arms.append(Arm(runtime, options.prompts, options.as_chat))
        n_tokens, n_answers = _lengths(options, budget.left, curve.seconds(1))
        middle = int(arms[0].prompt_tokens) + n_tokens // 2
        beside = CurveBeside(arms[0].runtime, curve, n_answers, middle)
        stack.callback(beside.close)
        results = _answers(options, arms, n_tokens, budget, beside, progress)
        label, curve = arms[1].label, beside.curve()
        works = (work_of(results[0]), work_of(results[1]))
        experts = _experts(arms[0], results[0], works[1])
    return diagnose(
        label,
        options.params.temperature,
        *works,
        curve,
        speed_up=_speed_up(results, len(options.prompts)),
        mixture=mixture(read_header(options.target)),
        experts=experts,
    )


def _experts(arm: Arm, answers: Sequence[GenerationResult], drafted: Work) -> ExpertReads | None:
    """Return the experts that rounds read in the answers' texts, if the target is a mixture."""
    runtime = arm.runtime
    width = _USUAL_WIDTH
    if drafted.drafting_rounds:
        width = max(2, round(1 + drafted.nodes / drafted.drafting_rounds))
    texts = [answer.token_ids for answer in answers]
    return expert_reads(runtime.model, runtime.options.context, texts, width)


def _answers(
    options: PairOptions,
    arms: Sequence[Arm],
    n_tokens: int,
    budget: Budget,
    beside: CurveBeside,
    progress: Progress,
) -> tuple[list[GenerationResult], list[GenerationResult]]:
    """Return both arms' answers; every turn answers one prompt by each, while there is time.

    Evaluations are timed behind each answer: machines that others use change their speed within
    seconds. One turn is taken in any case.
    """
    results: tuple[list[GenerationResult], list[GenerationResult]] = ([], [])
    for arm in arms:
        arm.answer(0, options.params, _WARM_UP_TOKENS, seed=0)
    n_prompts = len(options.prompts)
    n_turns, before = options.repetitions * n_prompts, budget.left
    names = " and ".join(arm.label for arm in arms)
    for turn in range(n_turns):
        each = (before - budget.left) / turn if turn else None
        if each is not None and not budget.has(each):
            break
        ahead = None if each is None else each * (n_turns - turn)
        progress(f"answering by turns: {names}", *budget.progress(ahead))
        repetition, number = divmod(turn, n_prompts)
        seed = (options.params.seed or 0) + repetition
        for index in (0, 1) if turn % 2 == 0 else (1, 0):
            answer = arms[index].answer(number, options.params, n_tokens, seed=seed)
            beside.visit(answer)
            results[index].append(answer)
    return results


def _lengths(options: PairOptions, seconds: float, token_seconds: float) -> tuple[int, int]:
    """Return the tokens of an answer, and about how many answers whose curve is timed fit."""
    once, tokens = 2 * len(options.prompts), seconds / token_seconds
    n_tokens = min(options.max_tokens, max(_SHORTEST, int(tokens / once) - _VISIT))
    repetitions = int(tokens / once / (n_tokens + _VISIT))
    n_answers = once * max(1, min(options.repetitions, repetitions))
    # Evaluations behind the answers take at most a quarter of the time.
    visits = max(1, min(ENOUGH, int(tokens / 4 / _VISIT)))
    return n_tokens, math.ceil(n_answers * ENOUGH / visits)


def _speed_up(
    results: tuple[Sequence[GenerationResult], Sequence[GenerationResult]], n_prompts: int
) -> Ratio:
    """Return how much faster the second arm answered all prompts of a repetition.

    A repetition that the time did not suffice for counts only if it is the first.
    """
    whole = len(results[0]) // n_prompts * n_prompts or len(results[0])
    speeds = [
        [
            work_of(answers[start : start + n_prompts]).tokens_per_second
            for start in range(0, whole, n_prompts)
        ]
        for answers in results
    ]
    return ratio_of(speeds[1], speeds[0])
