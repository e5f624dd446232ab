"""Online speculative decoding in an engine: its drafter swapped while no answer is being made.

Liu et al. 2024: what drafts changes between answers. Each draw is tested with the law that it was
drawn from, so a swap waits until no conversation is in the middle of an answer; requests that come
meanwhile wait, too. Whoever swaps waits for both.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

from specrun.runtime.drafter import close_all
from specrun.runtime.engine.choices import Choices
from specrun.runtime.engine.schedule import Schedule


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
