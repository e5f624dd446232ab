"""The target of a search: options, its cost curve, and a context that fits the prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from specrun.bench.accelerate.prompts import SearchPrompts
from specrun.bench.accelerate.record import PLAIN
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import OptionError, OutOfMemoryError
from specrun.bindings.models.model import Model
from specrun.runtime.chat import prompt_tokens
from specrun.runtime.engine import RuntimeOptions
from specrun.runtime.laws import SamplingParams
from specrun.runtime.memory import (
    MemoryCounts,
    PlanRequest,
    PlanSettings,
    count_plan,
    parts_of,
    size_text,
)
from specrun.runtime.planning import CostCurve, target_curve

USUAL_SECONDS, MOST_SWEEPS = 150.0, 50
CURVE_SECONDS = 10.0  # the most for a curve
FITTED_TOKENS = 64
"""Tokens written at each temperature, to plan and to judge cuts by."""

_STEP = 256  # contexts are as long as texts need, in such steps
_FEWEST_TOKENS = 8


@dataclass(frozen=True, slots=True)
class AccelerateOptions:
    """The file to make faster, and the time for it.

    The profile has choices for each of `params`, one a temperature. `prompts` is a file, one a
    line or JSON lines; without one there are built-in ones. Answers have at most `n_tokens`; all
    takes about `seconds`, in at most `repetitions` sweeps of each workload at each temperature.
    `hours` trains a head, in addition. `memory` is how many bytes a target and its drafter may
    take. `drafts` are files to try beside those that are found. `again` discards earlier results.
    `anyway` measures whatever other programs do; without it a comparison that they disturb is
    made again.
    """

    target: Path
    params: tuple[SamplingParams, ...]
    prompts: Path | None = None
    hours: float | None = None
    memory: int | None = None
    drafts: tuple[Path, ...] = ()
    n_tokens: int = 64
    repetitions: int = MOST_SWEEPS
    seconds: float = USUAL_SECONDS
    again: bool = False
    anyway: bool = False
    runtime: RuntimeOptions = field(default_factory=RuntimeOptions)

    def __post_init__(self) -> None:
        if not self.params:
            raise OptionError("there is nothing to compare: give temperatures")
        if self.n_tokens < _FEWEST_TOKENS:
            problem = f"answers of {self.n_tokens} tokens are too short to measure"
            raise OptionError(f"{problem}: give {_FEWEST_TOKENS} or more")
        if self.memory is not None and self.memory < 1:
            raise OptionError(f"{self.memory} bytes of memory hold nothing")
        if self.repetitions < 1:
            raise OptionError(f"{self.repetitions} repetitions measure nothing: give at least 1")
        if not self.seconds > 0.0:
            raise OptionError(f"{self.seconds} seconds are no time to search in")
        if self.hours is not None and not 0.0 < self.hours <= 24 * 365:
            raise OptionError(f"{self.hours:g} hours are no time to train in: give more than 0")

    @property
    def temperatures(self) -> tuple[float, ...]:
        """Those that there are to be choices for."""
        return tuple(params.temperature for params in self.params)


class SearchTarget:
    """A target file, with the options of a search for it and its prompts.

    `context` is as given until `measure` fits it to the prompts, and finds `curve`.
    """

    curve: CostCurve

    def __init__(self, options: AccelerateOptions, prompts: SearchPrompts) -> None:
        self.path, self.options, self.prompts = options.target, options, prompts
        self.context: ContextOptions = options.runtime.context

    def measure(self, seconds: float) -> CostCurve:
        """Return the curve that was measured with these settings, or a new one."""
        options, seconds = self.options, min(CURVE_SECONDS, seconds)
        self.curve = target_curve(self.path, options.runtime, seconds=seconds, again=options.again)
        self._fit()
        return self.curve

    def _fit(self) -> None:
        """Choose a context that holds the longest prompt and its answer."""
        with Model(self.path, vocab_only=True) as model:
            prompts = [text for texts in self.prompts.held_out.values() for text in texts]
            longest = max(map(len, prompt_tokens(model, [*prompts, *self.prompts.fitting])))
        needed = longest + max(self.options.n_tokens, FITTED_TOKENS) + _STEP // 4
        rounded = -(-needed // _STEP) * _STEP
        given = self.context.n_ctx
        fitting = rounded if given == 0 else min(given, rounded)
        self.context = dataclasses.replace(self.context, n_ctx=fitting)

    @property
    def token_seconds(self) -> float:
        """Seconds of one token."""
        return self.curve.seconds(1)

    def answer_seconds(self, prompt_tokens: float, n_tokens: int) -> float:
        """Return about how long plain decoding takes for a prompt and so many tokens."""
        widest = self.curve.sizes[-1]
        return n_tokens * self.token_seconds + prompt_tokens * self.curve.seconds(widest) / widest

    def fitting_tokens(self, model: Model) -> Sequence[Sequence[int]]:
        """Return the prompts that drafters are fitted to, as tokens."""
        return prompt_tokens(model, self.prompts.fitting)

    def check_memory(self, drafter: str) -> None:
        """Raise if the target and this drafter take more memory than is allowed."""
        allowed = self.options.memory
        if allowed is None:
            return
        needed = needed_bytes(self.path, drafter, self.context)
        if needed > allowed:
            what = self.path.name if drafter == PLAIN else "it"
            problem = f"{what} needs {size_text(needed)} of memory"
            raise OutOfMemoryError(f"{problem}, and {size_text(allowed)} are allowed")


def needed_bytes(target: Path, drafter: str, context: ContextOptions) -> int:
    """Return the bytes that a target and its drafter take on this machine, with their caches."""
    parts = tuple(parts_of(target, drafter, context))
    with MemoryCounts() as counts:
        settings = PlanSettings(context.n_ctx, 0, 0)
        plan = count_plan(PlanRequest(parts, (), (), ()), settings, counts)
    return sum(sum(row.by_place.values()) for row in plan.rows)
