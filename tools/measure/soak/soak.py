"""Soak: sessions with random drafters, rules, prompts and faults, each answer held to a fresh one.

One process runs for as long as it is told. After every answer, whatever became of it, a runtime
that knows nothing of the past answers the same question: the tokens have to be the same, as far as
the answer got. `auto` chooses by time, so the fresh runtime replays its choices. Memory, handles
and threads of the process have to stay flat.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from measure.soak.resources import Growth, Resources, growth_of, read_resources
from measure.soak.setups import (
    CONTEXT,
    Question,
    Setup,
    random_fault,
    random_question,
    random_setup,
    with_files,
    write_files,
)
from specrun.bench.prove.faults import Fault, take_answer
from specrun.bindings.errors import OptionError, UnsupportedModelError
from specrun.runtime.engine import Runtime
from specrun.runtime.round import GenerationResult


@dataclass(frozen=True, slots=True)
class SoakOptions:
    """How long a soak runs: `seconds`, or until `sessions` were held, counted from `first`.

    Session n of a seed is the same in every run, except for what `auto` measures.
    """

    seconds: float
    seed: int = 0
    first: int = 0
    sessions: int | None = None


@dataclass(frozen=True, slots=True)
class SoakResult:
    """What a soak did, and what went wrong: `failures` name session, setup and question.

    `faults` counts the answers that met each fault (many end before it comes), `cut` those that
    were cut short by theirs; `refused` the setups that cannot be opened.
    """

    seed: int
    seconds: float
    sessions: int
    refused: int
    answers: int
    tokens: int
    cut: int
    faults: Mapping[str, int]
    drafters: Mapping[str, int]
    rules: Mapping[str, int]
    growth: tuple[Growth, ...]
    failures: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether every answer was a fresh session's, and what the process holds stayed flat."""
        return not self.failures and all(growth.is_flat for growth in self.growth)


@dataclass(slots=True)
class Tally:
    """What was counted so far."""

    sessions: int = 0
    refused: int = 0
    answers: int = 0
    tokens: int = 0
    cut: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    drafters: Counter[str] = field(default_factory=Counter)
    rules: Counter[str] = field(default_factory=Counter)
    samples: list[Resources] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def result(self, seed: int, seconds: float) -> SoakResult:
        """Return what was counted, in so many seconds."""
        return SoakResult(
            seed=seed,
            seconds=seconds,
            sessions=self.sessions,
            refused=self.refused,
            answers=self.answers,
            tokens=self.tokens,
            cut=self.cut,
            faults=dict(self.faults),
            drafters=dict(self.drafters),
            rules=dict(self.rules),
            growth=growth_of(self.samples),
            failures=tuple(self.failures),
        )


def open_runtime(setup: Setup, drafter: str, target: Path) -> Runtime:
    """Open a runtime as a soak does."""
    return Runtime(target, drafter, accept=setup.rule, **CONTEXT)


def soak(
    options: SoakOptions,
    *,
    progress: Callable[[str], None] = lambda _: None,
    opened: Callable[[Setup, str, Path], Runtime] = open_runtime,
) -> SoakResult:
    """Hold sessions until the time is over, a number of them was held, or Ctrl-C.

    `opened` makes the runtimes that meet faults; those they are compared with are always new.
    """
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="specrun-soak-") as folder:
        held = _Sessions(write_files(Path(folder)), tally, opened)
        return hold(options, tally, "sessions", held.run, progress)


def hold(
    options: SoakOptions,
    tally: Tally,
    name: str,
    run: Callable[[int, random.Random], None],
    progress: Callable[[str], None],
) -> SoakResult:
    """Run sessions, which progress calls by a `name`, as the options say; return the result."""
    started, number = time.monotonic(), options.first
    try:
        while (passed := time.monotonic() - started) < options.seconds:
            if number - options.first == options.sessions:
                break
            run(number, random.Random(f"{options.seed}/{number}"))
            number += 1
            tally.samples.append(read_resources())
            counts = f"{tally.answers:,} answers, {len(tally.failures)} failures"
            progress(f"{passed / 60:.1f} minutes, {tally.sessions:,} {name}, {counts}")
    except KeyboardInterrupt:  # the user's: what was seen so far is worth a report
        progress("stopped")
    return tally.result(options.seed, time.monotonic() - started)


class _Sessions:
    """Holds sessions over the same files and counts what they do."""

    def __init__(
        self,
        files: Mapping[str, Path],
        tally: Tally,
        opened: Callable[[Setup, str, Path], Runtime],
    ) -> None:
        self._files = files
        self._tally = tally
        self._opened = opened

    def run(self, number: int, source: random.Random) -> None:
        """Hold one session: a few questions to one runtime."""
        setup = random_setup(source)
        about = f"session {number} ({setup.drafter}, {setup.rule})"
        drafter = with_files(setup.drafter, self._files)
        try:
            runtime = self._opened(setup, drafter, self._files["TARGET"])
        except (OptionError, UnsupportedModelError):  # not every pair can be combined
            self._tally.refused += 1
            return
        self._tally.sessions += 1
        self._tally.drafters[setup.drafter.partition("(")[0]] += 1
        self._tally.rules[setup.rule.partition("(")[0]] += 1
        text: tuple[int, ...] = ()
        with runtime:
            for turn in range(source.randrange(2, 9)):
                question = random_question(source, setup, text)
                fault = random_fault(source)
                try:
                    result, ended = _ask(runtime, question, fault, source)
                    fresh = self._fresh(setup, question, result)
                # Whatever it is, it is what a soak is for; Ctrl-C alone ends it.
                except Exception as error:
                    what = f"{type(error).__name__}: {error}"
                    self._tally.failures.append(f"{about}, turn {turn}, {fault}: {what}")
                    return
                self._count(result, fault, ended)
                problem = difference(result, fresh, ended)
                if problem is not None:
                    self._tally.failures.append(f"{about}, turn {turn}, {fault}: {problem}")
                text = (*question.prompt, *result.token_ids)
                if fault == "closed" and not ended:
                    return

    def _count(self, result: GenerationResult, fault: Fault, ended: bool) -> None:
        self._tally.answers += 1
        self._tally.tokens += len(result.token_ids)
        self._tally.cut += not ended
        self._tally.faults[fault] += 1

    def _fresh(
        self, setup: Setup, question: Question, result: GenerationResult
    ) -> GenerationResult:
        """Return what a runtime without a past answers; `auto` makes the same choices again."""
        drafter = with_files(setup.drafter, self._files)
        if setup.is_auto:
            log = self._files["TARGET"].with_name("choices.json")
            log.write_text(json.dumps(dict(result.stats.drafting)), encoding="utf-8")
            drafter = with_files(f"{setup.drafter[:-1]}, replay=LOG)", {**self._files, "LOG": log})
        with open_runtime(setup, drafter, self._files["TARGET"]) as runtime:
            return runtime.generate(
                question.prompt, question.params, max_tokens=question.max_tokens
            )


def _ask(
    runtime: Runtime, question: Question, fault: Fault, source: random.Random
) -> tuple[GenerationResult, bool]:
    """Ask, meet the fault; return the answer as far as it got, and whether it came to its end."""
    stream = runtime.stream(question.prompt, question.params, max_tokens=question.max_tokens)
    ended = take_answer(runtime, stream, fault, source)
    # A dropped stream is dropped here, where its last reference goes.
    return stream.result, ended


def difference(result: GenerationResult, fresh: GenerationResult, ended: bool) -> str | None:
    """Return how an answer differs from a fresh session's, None if it does not."""
    tokens, wanted = result.token_ids, fresh.token_ids
    if not ended:
        wanted = wanted[: len(tokens)]
    if tokens != wanted:
        place = _first_difference(tokens, wanted)
        return f"token {place} of the answer is not a fresh session's: {tokens}, not {wanted}"
    if ended and result.finish_reason != fresh.finish_reason:
        return f"it ended by {result.finish_reason}, a fresh session's by {fresh.finish_reason}"
    return None


def _first_difference(tokens: Sequence[int], wanted: Sequence[int]) -> int:
    pairs = enumerate(zip(tokens, wanted, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(tokens), len(wanted)))
