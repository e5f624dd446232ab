"""Online speculative decoding in an engine: its drafter swapped while no answer is being made.

Liu et al. 2023: what drafts changes between answers. Each draw is tested with the law that it was
drawn from, so a swap waits until no conversation is in the middle of an answer; requests that come
meanwhile wait, too. Whoever swaps waits for both.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

from specrun.bindings.machine.placement import placing
from specrun.bindings.models.trial import trusting_files
from specrun.runtime.drafter import close_all
from specrun.runtime.engine.choices import Choices
from specrun.runtime.engine.schedule import Schedule
from specrun.runtime.opening import RuntimeOptions


class DrafterSwap:
    """One swap that is asked for: the new expression, and how it ended."""

    def __init__(self, drafter: str, files: Mapping[str, Path] | None) -> None:
        self._drafter, self._files = drafter, files
        self._ended, self._problem = threading.Event(), list[BaseException]()

    def make(self, choices: Choices, schedule: Schedule) -> None:
        """Swap now, in the engine's thread, where no answer is being made."""
        try:
            replaced = choices.swap(self._drafter, self._files)
            try:
                for seat in schedule.seats:
                    if seat.session.drafter in replaced:
                        seat.session.draft_with(seat.drafters.get(choices.own))
            finally:
                close_all(replaced)
        except BaseException as problem:  # whoever waits is told
            self.end(problem)
            return
        self._ended.set()

    def end(self, problem: BaseException) -> None:
        """Tell whoever waits why there was no swap."""
        self._problem.append(problem)
        self._ended.set()

    def wait(self) -> None:
        """Wait for it; raises why it could not be."""
        self._ended.wait()
        if self._problem:
            raise self._problem[0]


class DrafterSwaps:
    """The swaps that are asked for; whoever asks and whoever makes them are different threads."""

    def __init__(self) -> None:
        self.asked: list[DrafterSwap] = []

    def ask(self, drafter: str, files: Mapping[str, Path] | None) -> DrafterSwap:
        """Note a swap, for whoever waits for it."""
        swap = DrafterSwap(drafter, files)
        self.asked.append(swap)
        return swap

    def make_if_idle(self, choices: Choices, schedule: Schedule, options: RuntimeOptions) -> None:
        """Admit no more answers while a swap is asked for; make it once none is under way."""
        schedule.admits = not self.asked
        if schedule.admits or any(not seat.is_idle for seat in schedule.seats):
            return
        trust = trusting_files() if options.trust else nullcontext()
        with trust, placing(options.placement):
            while self.asked:
                self.asked.pop(0).make(choices, schedule)
        schedule.admits = True

    def end(self, problem: BaseException) -> None:
        """Tell all that wait why there is no swap."""
        while self.asked:
            self.asked.pop(0).end(problem)
