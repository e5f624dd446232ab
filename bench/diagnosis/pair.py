"""`specrun why`: measures a pair on prompts, in turn with plain decoding, and diagnoses it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specrun.bench.diagnosis.curve_beside import CurveBeside
from specrun.bench.diagnosis.diagnosis import Diagnosis, diagnose
from specrun.bench.diagnosis.work import work_of
from specrun.bench.drafters.comparison import Arm
from specrun.bench.drafters.prompts import Prompt
from specrun.bench.timing import interleaved, ratio_of
from specrun.bindings.errors import OptionError
from specrun.bindings.gguf import read_header
from specrun.bindings.machine.placement import placing
from specrun.runtime.engine import Runtime, parse_options
from specrun.runtime.language import parse_expression
from specrun.runtime.laws import SamplingParams
from specrun.runtime.planning import (
    mixture,
    target_curve,
)
from specrun.runtime.round import GenerationResult

PLAIN = "none"
_WARM_UP_TOKENS = 8

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class PairOptions:
    """What to diagnose: a `drafter` for a target, on `prompts` answered `repetitions` times each.

    `as_chat` is that of `prompt_ids`. `curve_seconds` are spent on the target's cost curve where
    none was measured with these settings. `options` are those of `Runtime`.
    """

    target: Path
    drafter: str
    prompts: tuple[Prompt, ...]
    params: SamplingParams
    max_tokens: int = 128
    repetitions: int = 3
    as_chat: bool | None = None
    curve_seconds: float = 10.0
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.prompts:
            raise OptionError("no prompts are given: there is nothing to measure")
        for name in ("max_tokens", "repetitions"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} is {getattr(self, name)}: give at least 1")
        if parse_expression(self.drafter).atom == PLAIN:
            problem = "plain decoding is what drafting is compared with"
            raise OptionError(f"{problem}: name a drafter with --drafter or -md")


def diagnose_pair(
    options: PairOptions, progress: Progress = lambda _what, _share: None
) -> Diagnosis:
    """Measure plain decoding and the drafter in turn, and say what stands in the way.

    Raises as `Runtime` does, and SpecrunError where the target answers nothing.
    """
    opening = parse_options(dict(options.options))
    with placing(opening.placement):
        curve = target_curve(
            options.target,
            opening.context,
            n_gpu_layers=opening.n_gpu_layers,
            seconds=options.curve_seconds,
            use_mmap=opening.use_mmap,
            progress=lambda share: progress("measuring what evaluations cost", 0.3 * share),
        )
    plain = {name: value for name, value in options.options.items() if name != "accept"}
    with ExitStack() as stack:
        arms = []
        for drafter, given in ((PLAIN, plain), (options.drafter, options.options)):
            runtime = stack.enter_context(Runtime(options.target, drafter, **given))
            arms.append(Arm(runtime, options.prompts, options.as_chat))
        n_answers = 2 * options.repetitions * len(options.prompts)
        middle = int(arms[0].prompt_tokens) + options.max_tokens // 2
        beside = stack.enter_context(CurveBeside(arms[0].runtime, curve, n_answers, middle))
        results = _answers(arms, beside, options, progress)
        label, curve = arms[1].label, beside.curve()
    return diagnose(
        label,
        options.params.temperature,
        work_of(results[0]),
        work_of(results[1]),
        curve,
        speed_up=_speed_up(results, len(options.prompts)),
        mixture=mixture(read_header(options.target)),
    )


def _answers(
    arms: Sequence[Arm], beside: CurveBeside, options: PairOptions, progress: Progress
) -> tuple[list[GenerationResult], list[GenerationResult]]:
    """Return both arms' answers to all prompts, one repetition after the other.

    The arms take turns prompt by prompt, and evaluations are timed behind each answer: machines
    that others use change their speed within seconds.
    """
    results: tuple[list[GenerationResult], list[GenerationResult]] = ([], [])
    for arm in arms:
        arm.answer(0, options.params, _WARM_UP_TOKENS, seed=0)
    n_prompts = len(options.prompts)
    n_turns = options.repetitions * n_prompts
    for done, (turn, index) in enumerate(interleaved(len(arms), n_turns)):
        progress(f"answering with {arms[index].label}", 0.3 + 0.35 * done / n_turns)
        repetition, number = divmod(turn, n_prompts)
        seed = (options.params.seed or 0) + repetition
        answer = arms[index].answer(number, options.params, options.max_tokens, seed=seed)
        beside.visit(answer)
        results[index].append(answer)
    return results


def _speed_up(
    results: tuple[Sequence[GenerationResult], Sequence[GenerationResult]], n_prompts: int
) -> float:
    """Return how much faster the second arm answered all prompts of a repetition."""
    speeds = [
        [
            work_of(answers[start : start + n_prompts]).tokens_per_second
            for start in range(0, len(answers), n_prompts)
        ]
        for answers in results
    ]
    return ratio_of(speeds[1], speeds[0]).value
