"""Measurements of a search on this machine: sweeps of answers with all drafters in turn."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any

from specrun.bench.accelerate.candidates import Candidates, files_in
from specrun.bench.accelerate.prompts import SearchPrompts
from specrun.bench.accelerate.record import PLAIN
from specrun.bench.accelerate.target import AccelerateOptions, SearchTarget
from specrun.bench.diagnosis.diagnosis import Work, work_of
from specrun.bench.diagnosis.pair import ENOUGH, CurveBeside
from specrun.bench.drafters.answers import Arm
from specrun.bindings.errors import OutOfMemoryError, SpecrunError
from specrun.bindings.machine.other_load import OtherLoad
from specrun.bindings.machine.placement import placing
from specrun.runtime.engine import Runtime, RuntimeOptions
from specrun.runtime.planning import CostCurve
from specrun.runtime.round import GenerationResult

_log = logging.getLogger(__name__)
_WARM_UP_TOKENS = 8
_MOST_TRIES = 3
_AGAIN = {True: "it is measured again", False: "its figures may be wrong"}
_SHORTEST = 24  # tokens of an answer
_SWEEPS = 3  # of everything, that the time is to suffice for
_USUAL_PROMPT = 100  # tokens


class ThisMachine(Candidates):
    """The tools of a search, for one target; a context manager that closes its models.

    Every call takes time, about `seconds` at most, and may raise SpecrunError.
    """

    def __init__(self, options: AccelerateOptions, prompts: SearchPrompts) -> None:
        super().__init__(SearchTarget(options, prompts))
        threads = options.runtime.context.n_threads or os.cpu_count() or 1
        self._others = OtherLoad(threads)
        self._params = {params.temperature: params for params in options.params}
        # Of two sweeps at all temperatures, by all drafters each.
        self._n_prompts = 2 * len(self._params) * sum(map(len, prompts.held_out.values()))
        self._n_answered = 0
        # Tokens of an answer, and the share of the prompts: known with the compared drafters.
        self._length: tuple[int, float] | None = None
        self._beside: CurveBeside | None = None
        self._placing = ExitStack()
        self._arms: dict[str, dict[tuple[float, str], Arm]] = {}
        self._opened: dict[str, ExitStack] = {}  # the runtime of a drafter, and what it started

    def __enter__(self) -> ThisMachine:
        self._placing.enter_context(placing(self._target.options.runtime.placement))
        return self

    def __exit__(self, *_: object) -> None:
        if self._beside is not None:
            self._beside.close()
        self._close_others(())
        self._placing.close()

    def now(self) -> float:
        """Return the clock's seconds."""
        return time.perf_counter()

    def curve(self, seconds: float) -> CostCurve:
        """Return the curve that was measured with these settings, or a new one."""
        return self._target.measure(seconds)

    def curve_beside(self) -> CostCurve | None:
        """Return the curve as it was while drafters were compared, None if none were."""
        return None if self._beside is None else self._beside.curve()

    def sweep(
        self, temperature: float, workload: str, drafters: Sequence[str], seed: int, seconds: float
    ) -> dict[str, Work | str]:
        """Answer the prompts of a workload with each drafter; again if others disturbed it.

        It is not measured again if that would end after so many seconds.
        """
        if self._length is None:
            self._length = self._affordable(len(drafters), seconds)
        began = self.now()
        for left in reversed(range(1 if self._target.options.anyway else _MOST_TRIES)):
            self._others.since_last()
            tried = self.now()
            found = self._sweep(temperature, workload, drafters, seed, began + seconds)
            disturbed = self._others.disturbance()
            if not disturbed:
                return found
            now = self.now()
            again = left > 0 and 2.0 * now - tried <= began + seconds
            _log.warning("%s while drafters were compared: %s", disturbed, _AGAIN[again])
            if not again:
                break
        return found

    def _sweep(
        self, temperature: float, workload: str, drafters: Sequence[str], seed: int, ends: float
    ) -> dict[str, Work | str]:
        """Answer prompt by prompt with every drafter in turn.

        Drafters that cannot be opened within half of the time are missing; another call goes on
        with them. One prompt is answered in any case.
        """
        began = self.now()
        self._close_others(drafters)
        n_tokens, share = self._length or (_SHORTEST, 1.0)
        found: dict[str, Work | str] = {}
        arms: dict[str, Arm] = {}
        for drafter in drafters:
            if len(arms) > 1 and self.now() > began + 0.5 * (ends - began):
                break
            try:
                arms[drafter] = self._arm(drafter, temperature, workload)
            except SpecrunError as error:
                if drafter == PLAIN:
                    raise
                found[drafter] = str(error)
        results: dict[str, list[GenerationResult]] = {drafter: [] for drafter in arms}
        target, params = self._target, self._params[temperature]
        count = max(1, round(share * len(target.prompts.held_out[workload])))
        first = self.now()
        for number in range(count):
            each = (self.now() - first) / number if number else 0.0
            if each and self.now() + 0.5 * each > ends:
                break
            # In turn forwards and backwards: a machine that grows busier slows all of them alike.
            order = list(arms) if (number + seed) % 2 == 0 else list(reversed(arms))
            answers = {
                drafter: arms[drafter].answer(number, params, n_tokens, seed=seed)
                for drafter in order
            }
            # A prompt with an empty answer gives no measurement.
            if all(answer.stats.tokens_per_second for answer in answers.values()):
                self._time_beside(arms[PLAIN], list(answers.values()))
                for drafter, answer in answers.items():
                    results[drafter].append(answer)
        if not results[PLAIN]:
            problem = f"{target.path.name} answers none of the prompts ({workload})"
            raise SpecrunError(f"{problem}: give others with --prompts FILE")
        return {**found, **{drafter: work_of(answers) for drafter, answers in results.items()}}

    def _arm(self, drafter: str, temperature: float, workload: str) -> Arm:
        known, setting = self._arms.setdefault(drafter, {}), (temperature, workload)
        if setting not in known:
            opened = self._opened.setdefault(drafter, ExitStack())
            runtime = next((arm.runtime for arm in known.values()), None)
            prompts = self._target.prompts.held_out[workload]
            if runtime is None:
                runtime = opened.enter_context(self._runtime(drafter))
                opened.callback(runtime.session.drafter.close)
                warm_up = Arm(runtime, prompts, None)
                warm_up.answer(0, self._params[temperature], _WARM_UP_TOKENS, seed=0)
            own = None
            if not files_in(drafter):
                # It learns the lengths that pay on its texts, not on others: if
                # nothing repeats prompt lookup stops, and would hardly begin again for an edit.
                own = runtime.start_drafter()
                opened.callback(own.close)
            known[setting] = Arm(runtime, prompts, None, own)
        return known[setting]

    def _runtime(self, drafter: str) -> Runtime:
        target = self._target
        target.check_memory(drafter)
        names = [field.name for field in dataclasses.fields(RuntimeOptions)]
        options: dict[str, Any] = {name: getattr(target.options.runtime, name) for name in names}
        options["context"] = target.context
        return Runtime(target.path, drafter, **options)

    def _close_others(self, drafters: Sequence[str]) -> None:
        """Close drafters that are no longer compared: their memory is for the others."""
        for drafter in [name for name in self._opened if name not in drafters]:
            self._arms.pop(drafter)
            self._opened.pop(drafter).close()

    def _time_beside(self, plain: Arm, answers: Sequence[GenerationResult]) -> None:
        """Time evaluations behind a prompt's answers, if it is one of those that are enough.

        All are compared with that: a curve of another minute may be 10 % off.
        """
        target, n_prompts = self._target, self._n_prompts
        number, self._n_answered = self._n_answered, self._n_answered + 1
        if number % max(1, n_prompts // ENOUGH):
            return
        if number == 0:
            depth = int(plain.prompt_tokens) + (self._length[0] if self._length else 0) // 2
            # Without memory for one more context the curve of before has to do.
            with suppress(OutOfMemoryError):
                self._beside = CurveBeside(plain.runtime, target.curve, n_prompts, depth)
        if self._beside is not None:
            self._beside.visit(max(answers, key=lambda answer: answer.stats.drafted))

    def _affordable(self, n_drafters: int, seconds: float) -> tuple[int, float]:
        """Return the tokens of an answer, and the share of the prompts that is answered.

        Some sweeps of everything then fit the time. Answers become shorter first.
        """
        target, most = self._target, self._target.options.n_tokens
        each = seconds / (_SWEEPS * n_drafters * self._n_prompts / 2)
        reading = target.answer_seconds(_USUAL_PROMPT, 0)
        affordable = int((each - reading) / target.token_seconds)
        shortest = min(_SHORTEST, most)
        if affordable >= shortest:
            return min(most, affordable), 1.0
        return shortest, min(1.0, each / target.answer_seconds(_USUAL_PROMPT, shortest))
