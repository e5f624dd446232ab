"""The hours of a training: how long answers may take, and how many steps fit into the rest.

Answers take a third at most, or half where their states come with them; the states of the target
what they take, and the training the rest, with as many steps as fit, which is known once the first
of them were timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specrun.train.trainer import TrainingStatus

ASKS, _ANSWERS = "the target asks", "the target answers"  # as the training names them
_ASKING = 0.1  # of the time, at most
ANSWERING, ANSWERING_WITH_STATES = 0.33, 0.5
"""Of the time, at most, asking included: without the answers' states, and with them."""
FEWEST_PROMPTS = 16
# At least: six steps alone say little where other programs run.
_TIMED_STEPS, _TIMED_SECONDS, _TIMED_SHARE = 12, 30.0, 0.01
_FEWEST_STEPS = 20
_TRAINING = 0.9  # of the time that is left: measures and writing take the rest

Stage = Callable[[str, float], None]
"""Told what is done and which share of the hours is over."""


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """What a training was begun with: another call with the same hours goes on with it.

    `n_tries` are those at prompts of the target's own, `n_prompts` and `steps` 0: not known yet.
    `spent` are the seconds of earlier calls, `earlier` the head's file that is learnt on from, if
    any.
    """

    kind: str
    hours: float
    n_tries: int
    n_prompts: int = 0
    steps: int = 0
    spent: float = 0.0
    earlier: str = ""


class EnoughTries(Exception):
    """So many prompts of the target's own were tried, and the time for them is over."""

    def __init__(self, count: int) -> None:
        super().__init__(f"{count} prompts were tried")
        self.count = count


class EnoughAnswers(Exception):
    """So many prompts are answered, and the time for answers is over."""

    def __init__(self, count: int) -> None:
        super().__init__(f"{count} prompts are answered")
        self.count = count


class StepsKnown(Exception):
    """So many steps fit into the time that is left."""

    def __init__(self, count: int) -> None:
        super().__init__(f"{count} steps fit")
        self.count = count


class Hours:
    """Hears how a training goes, and says when answers are enough and how many steps fit.

    A `RunListener`. `clock` returns seconds. An average step takes `dearer` times as long as one of
    the first, which are timed. Answers are enough when the share `answering` of the time is over.
    """

    def __init__(
        self,
        seconds: float,
        plan: TrainingPlan,
        tell: Stage,
        clock: Callable[[], float] = time.monotonic,
        dearer: float = 1.0,
        answering: float = ANSWERING,
    ) -> None:
        self.plan = plan
        self._seconds, self._tell, self._clock = seconds, tell, clock
        self._dearer, self._answering = dearer, answering
        self._started = clock() - plan.spent
        self._timed: list[float] = []

    @property
    def spent(self) -> float:
        """Seconds of all calls."""
        return self._clock() - self._started

    def note(self, text: str) -> None:
        """Hear a fact, of which nothing is shown."""

    def stage(self, what: str, done: int, total: int) -> None:
        """Hear of work before the training; raises when its time is over.

        That is EnoughTries or EnoughAnswers.
        """
        self._say(f"{what}, {done:,} done")
        if what == ASKS and self.spent > _ASKING * self._seconds and done < total:
            raise EnoughTries(done)
        late = self.spent > self._answering * self._seconds
        if what == _ANSWERS and late and FEWEST_PROMPTS <= done < total:
            raise EnoughAnswers(done)

    def status(self, status: TrainingStatus) -> None:
        """Hear of the training; raises StepsKnown once the first steps were timed."""
        self._say(f"step {status.step:,}, loss {status.loss:.3f}")
        if self.plan.steps:
            return
        self._timed.append(self._clock())
        # The first ones are slower: memory is allocated.
        counted = self._timed[_TIMED_STEPS // 2 - 1 :]
        n_steps = len(self._timed) - _TIMED_STEPS // 2
        enough = min(_TIMED_SECONDS, _TIMED_SHARE * self._seconds)
        if n_steps >= _TIMED_STEPS // 2 and counted[-1] - counted[0] >= enough:
            each = self._dearer * (counted[-1] - counted[0]) / n_steps
            left = _TRAINING * (self._seconds - self.spent)
            self._timed.clear()
            raise StepsKnown(max(_FEWEST_STEPS, int(left / max(each, 1e-6))))

    def _say(self, what: str) -> None:
        self._tell(what, min(1.0, self.spent / self._seconds))
