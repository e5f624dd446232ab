"""The engine: a target and drafters that answer several conversations at once, in a thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from specrun.bindings.errors import ClosedError
from specrun.runtime.engine.answer import Answer, Request
from specrun.runtime.engine.core import EngineCore
from specrun.runtime.engine.streams import GenerationStream
from specrun.runtime.round.drafter import close_all

if TYPE_CHECKING:
    from concurrent.futures import Future
    from typing import Unpack

    from specrun.runtime.engine.keywords import RuntimeKeywords

_Result = TypeVar("_Result")


class Engine(EngineCore):
    """Answers several conversations at once. Any thread, and any event loop, may `submit`.

    `n_ctx` tokens are shared by all slots: a conversation takes the cells that it needs, at most
    the length that the model was trained for, and cells of idle ones are dropped when others need
    them; 0 is that length for every slot, or as much of it as there is memory for
    (`memory_line`). Names of targets, expressions of drafters and further options are as for
    `Runtime`. Every slot drafts with a drafter of its own, all with the same weights. Close it, or
    use it as a context manager.
    """

    def __init__(
        self,
        target: str | os.PathLike[str],
        drafter: str | None = None,
        *,
        slots: int = 4,
        **options: Unpack[RuntimeKeywords],
    ) -> None:
        self._open(target, drafter, options, slots)
        self._start()

    @classmethod
    def demo(
        cls, drafter: str = "draft", *, slots: int = 4, **options: Unpack[RuntimeKeywords]
    ) -> Engine:
        """Open the embedded family; paths may be left out of drafters, as in "draft(n=3)"."""
        engine = cls.__new__(cls)
        engine._open(None, drafter, options, slots)
        engine._start()
        return engine

    def _start(self) -> None:
        for session in self._sessions:
            session.settles = True  # readers are other threads: no round of others waits for them
        self._changed = threading.Condition()
        # Work between answers, and where the thread that waits for it finds its result or error.
        self._tasks: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="specrun engine", daemon=True)
        self._thread.start()

    def _submit(self, request: Request) -> GenerationStream:
        answer = Answer(request, self.vocabulary)  # here, where nobody else waits for its grammar
        stream = GenerationStream(answer)
        with self._changed:
            self._require_open()
            self._requests.append(answer)
            self._changed.notify()
        return stream

    def _require_open(self) -> None:
        if self._closing:
            raise ClosedError("the engine is closed")

    def require_idle(self) -> None:
        """Do nothing: work between answers waits until none is being made."""

    def _when_idle(self, work: Callable[[], _Result]) -> _Result:
        """Do something when no answer is being made; requests that come meanwhile wait."""
        from concurrent.futures import Future

        ended: Future[_Result] = Future()
        with self._changed:
            self._require_open()
            self._tasks.append((work, ended))
            self._changed.notify()
        return ended.result()

    # -- its state ---------------------------------------------------------------------------------

    @property
    def drafter(self) -> str:
        """The expression of the drafter of requests that choose none."""
        return self._choices.own_drafter

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closing

    def close(self) -> None:
        """End all answers with `ClosedError` and free the native memory; again does nothing."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not threading.current_thread():
            self._thread.join()

    # -- its thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        """Step until the engine is closed."""
        why: BaseException = ClosedError("the engine was closed while an answer was being made")
        try:
            while self._take_requests():
                self._step()
        except BaseException as problem:  # a defect: no reader may wait for ever
            why = problem
            raise
        finally:
            with self._changed:
                self._closing = True
                self._schedule.queue.extend(self._requests)
                self._requests = []
            for _, ended in self._tasks:
                ended.set_exception(ClosedError("the engine was closed before that was done"))
            self._schedule.close(why)
            close_all(self._owned)

    def _step(self) -> None:
        """Let every answer go on by a round at most; do the work that waits for idle slots.

        While there is such work, no more requests are admitted.
        """
        schedule = self._schedule
        schedule.admits = not self._tasks
        if self._tasks and all(session.is_idle for session in self._sessions):
            while self._tasks:
                work, ended = self._tasks.pop(0)
                try:
                    ended.set_result(work())
                except BaseException as problem:  # raised where its end is waited for
                    ended.set_exception(problem)
            schedule.admits = True
        schedule.turn()

    def _take_requests(self) -> bool:
        """Wait until there is something to do; return False if the engine is to be closed."""
        schedule = self._schedule
        with self._changed:
            self._changed.wait_for(
                lambda: self._closing or self._requests or self._tasks or not schedule.is_idle
            )
            taken, self._requests = self._requests, []
            schedule.queue.extend(taken)
            return not self._closing
