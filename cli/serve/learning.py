"""Online speculative decoding while a server answers: the draft model learns in a thread.

Answers go on meanwhile, with the drafter there was; the new one is swapped in when none is being
made, and requests that come in that moment wait for it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from specrun.bindings.errors import ClosedError, SpecrunError
from specrun.cli.chat.learning import ChatLearning
from specrun.cli.options.drafting import LearnSettings
from specrun.cli.terminal.terminal import Terminal
from specrun.runtime.engine import Engine
from specrun.runtime.round import GenerationResult

if TYPE_CHECKING:
    from specrun.train.trainer.listener import TrainingStatus

Observer = Callable[[GenerationResult], None]


@contextmanager
def serve_learning(
    closed_last: ExitStack, engine: Engine, settings: LearnSettings, terminal: Terminal
) -> Iterator[list[Observer]]:
    """Yield whom answers are to be told to, nobody where nothing is to be learnt.

    At the end an update that is under way is given up: the drafter stays as it is. `closed_last`
    deletes what nobody keeps, after the engine: it still drafts with it.
    """
    if not settings.wanted:
        yield []
        return
    learning = ServeLearning(engine, settings, terminal)
    closed_last.callback(learning.close)
    worker = threading.Thread(target=learning.run, name="specrun learning", daemon=True)
    worker.start()
    try:
        yield [learning.tell]
    finally:
        learning.stop()
        worker.join()


class ServeLearning(ChatLearning):
    """Learns after so many answers, in the thread that runs it."""

    def __init__(self, engine: Engine, settings: LearnSettings, terminal: Terminal) -> None:
        super().__init__(engine, settings, terminal)
        self._answered: queue.SimpleQueue[GenerationResult | None] = queue.SimpleQueue()
        self._stopped = threading.Event()

    def tell(self, result: GenerationResult) -> None:
        """Note an answer that has ended."""
        self._answered.put(result)

    def stop(self) -> None:
        """Let `run` return soon."""
        self._stopped.set()
        self._answered.put(None)

    def run(self) -> None:
        """Count answers and learn from them, until it is stopped."""
        while (result := self._answered.get()) is not None and not self._stopped.is_set():
            try:
                self.after_answer(result)
            except ClosedError:
                return
            except SpecrunError as problem:  # the drafter stays, and so does the server
                self._terminal.warn(f"nothing was learnt: {problem}")

    def _show(self, status: TrainingStatus) -> None:
        if self._stopped.is_set():
            raise ClosedError("the server ended while its drafter learnt")
