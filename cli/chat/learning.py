"""A draft model that learns between answers (`--learn`), and the texts about it.

torch is needed to learn, and is imported only for a chat that needs it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from specrun.bindings.errors import ClosedError, SpecrunError
from specrun.cli.options.drafting import LearnSettings
from specrun.cli.terminal.terminal import Terminal
from specrun.runtime import GenerationResult

if TYPE_CHECKING:
    from specrun.runtime.engine import Engine
    from specrun.runtime.engine.core import EngineCore
    from specrun.train.online import OnlineDrafter
    from specrun.train.trainer import TrainingStatus


class ChatLearning:
    """Counts answers, and lets the draft model learn after so many, or at /learn."""

    def __init__(self, runtime: EngineCore, settings: LearnSettings, terminal: Terminal) -> None:
        from specrun.train.online import OnlineSettings, open_online_drafter

        self._settings, self._terminal = settings, terminal
        online = OnlineSettings(learning_rate=settings.learn_rate)
        self._drafter: OnlineDrafter = open_online_drafter(
            runtime, online, keep=settings.learn_keep
        )
        self._answers = 0
        self._n_begun = self._n_kept
        # Of the drafts since the last update, and of those before it: drafted, accepted.
        self._since, self._before = (0, 0), (0, 0)
        every = settings.learn_every
        when = f"after every {every} answers" if every else "at /learn"
        store, kept = runtime.rejections, ""
        if store is not None and store.path is not None:
            kept = f"; {store.buffer.n_places:,} rejected drafts are kept in {store.path.parent}"
        terminal.note(f"the drafter learns from rejected drafts {when}{kept}")

    def close(self) -> None:
        """Delete the learnt drafters, unless --learn-keep was given."""
        self._drafter.close()

    def after_answer(self, result: GenerationResult) -> None:
        """Count an answer, and learn if it is time."""
        drafted, accepted = self._since
        self._since = (drafted + result.stats.drafted, accepted + result.stats.accepted)
        self._answers += 1
        every = self._settings.learn_every
        if every and self._answers >= every and self._drafter.can_update:
            self.update()

    def after_only_answer(self) -> None:
        """Learn after the only answer of a command, if the kept answers are enough."""
        every, kept = self._settings.learn_every, self._n_kept
        if every and kept > self._n_begun and kept % every == 0 and self._drafter.can_update:
            self.update()

    @property
    def _n_kept(self) -> int:
        store = self._drafter.runtime.rejections
        return 0 if store is None else len(store.buffer)

    def update(self) -> None:
        """Learn now; Ctrl-C stops it and leaves the drafter as it was."""
        started = time.monotonic()
        self._answers = 0
        with self._terminal.meanwhile("learning ... (Ctrl-C leaves the drafter as it is)"):
            update = self._drafter.update(self._show)
        seconds = time.monotonic() - started
        texts = "the answers learnt" if update.measured_on_training else "answers not learnt"
        what = f"{update.n_places:,} rejected drafts of {update.n_answers:,} answers"
        self._terminal.note(
            f"learnt from {what} in {seconds:.1f} s: alpha at rejected drafts of {texts} "
            f"{update.before.rate:.3f} before, {update.after.rate:.3f} after"
        )
        if not update.swapped:
            self._terminal.note("that is worse: the drafter stays as it was")
            return
        self._terminal.note(f"the new drafter drafts from the next answer on; {self._rates()}")
        self._before, self._since = self._since, (0, 0)

    def lines(self) -> list[str]:
        """Return the lines of /stats about learning."""
        updates = self._drafter.updates
        swapped = sum(update.swapped for update in updates)
        found = [f"learning  {len(updates)} updates, {swapped} of them in use; {self._rates()}"]
        store = self._drafter.runtime.rejections
        if store is not None:
            place = f" in {store.path}" if store.path else ", in memory"
            buffer = store.buffer
            found.append(f"rejected  {buffer.n_places:,} drafts of {len(buffer):,} answers{place}")
        return found

    def _show(self, status: TrainingStatus) -> None:
        self._terminal.passing(
            f"learning: step {status.step} of {status.steps} (Ctrl-C leaves the drafter as it is)"
        )

    def _rates(self) -> str:
        (drafted, accepted), (drafted_before, accepted_before) = self._since, self._before
        parts = []
        if drafted_before:
            share = accepted_before / drafted_before
            parts.append(f"{share:.1%} of drafts accepted before the last update")
        if drafted:
            parts.append(f"{accepted / drafted:.1%} {'since' if parts else 'accepted so far'}")
        return ", ".join(parts) or "nothing drafted yet"


def open_learning(
    closed_last: ExitStack, runtime: EngineCore, settings: LearnSettings, terminal: Terminal
) -> ChatLearning | None:
    """Return the learning of the chat's drafter, None without --learn.

    `closed_last` closes it after the runtime, which reads its files.
    """
    if not settings.wanted:
        return None
    learning = ChatLearning(runtime, settings, terminal)
    closed_last.callback(learning.close)
    return learning


# -- The server: the draft model learns in a thread while answers are made -------------------------
#
# Answers go on meanwhile, with the drafter there was; the new one is swapped in when none is being
# made, and requests that come in that moment wait for it.


Observer = Callable[[GenerationResult], None]


@contextmanager
def serve_learning(
    closed_last: ExitStack, engine: Engine, settings: LearnSettings, terminal: Terminal
) -> Iterator[list[Observer]]:
    """Yield the observers to notify of finished answers; none unless `--learn` is set.

    An update that is under way at the end is given up: the drafter stays as it is. `closed_last`
    deletes temporary files after the engine is closed, which drafts with them.
    """
    if not settings.wanted:
        yield []
        return
    learning = ServeLearning(engine, settings, terminal)
    closed_last.callback(learning.close)
    worker = threading.Thread(target=learning.run, name="specrun learning", daemon=True)
    worker.start()
    try:
        yield [learning.answered.put]
    finally:
        learning.stopped.set()
        learning.answered.put(None)
        worker.join()


class ServeLearning(ChatLearning):
    """Learning after every so many of the `answered`, in the thread that calls `run`."""

    def __init__(self, engine: Engine, settings: LearnSettings, terminal: Terminal) -> None:
        super().__init__(engine, settings, terminal)
        self.answered: queue.SimpleQueue[GenerationResult | None] = queue.SimpleQueue()
        self.stopped = threading.Event()

    def run(self) -> None:
        """Count answers and learn from them, until it is stopped."""
        while (result := self.answered.get()) is not None and not self.stopped.is_set():
            try:
                self.after_answer(result)
            except ClosedError:
                return
            except SpecrunError as problem:  # the drafter stays, and so does the server
                self._terminal.warn(f"nothing was learnt: {problem}")

    def _show(self, status: TrainingStatus) -> None:
        if self.stopped.is_set():
            raise ClosedError("the server ended while its drafter learnt")
