"""The Python interface: open a target with a drafter, generate, stream and chat."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from specrun.runtime.engine.answer import Request
from specrun.runtime.engine.core import EngineCore
from specrun.runtime.engine.streams import GenerationStream
from specrun.runtime.round.drafter import Drafter

if TYPE_CHECKING:
    from typing import Unpack

    from specrun.runtime.engine.keywords import RuntimeKeywords

_Result = TypeVar("_Result")


class Runtime(EngineCore):
    """An engine of one slot, stepped in the caller's thread. Not for several threads at once.

    `target` is a path, an unambiguous name of a model that the hub, llama.cpp, ollama or LM Studio
    keep on this disk, or `hf:OWNER/REPO:QUANT`, which is fetched from the hub. `drafter` is an
    expression of the drafter language (`"none"`, `"prompt-lookup"`, `"draft(small.gguf, n=5)"`,
    ...); None takes the choice of `specrun accelerate` for this file, else `"auto"`, as
    `specrun chat` does. Further options are those of `RuntimeOptions`, of its `context` and its
    `placement`, such as `n_ctx=8192` or `devices=["CUDA0"]`; an unknown one raises `OptionError`
    naming the nearest. Close it, or use it as a context manager.
    """

    def __init__(
        self,
        target: str | os.PathLike[str],
        drafter: str | None = None,
        **options: Unpack[RuntimeKeywords],
    ) -> None:
        self._open(target, drafter, options)

    @classmethod
    def demo(cls, drafter: str = "draft", **options: Unpack[RuntimeKeywords]) -> Runtime:
        """Open the embedded family; paths may be left out of `drafter`, as in "draft(n=3)"."""
        runtime = cls.__new__(cls)
        runtime._open(None, drafter, options)
        return runtime

    def __repr__(self) -> str:
        if self.closed:
            return "<Runtime, closed>"
        path = self.model.path.name
        return f"<Runtime of {path}: drafter {self.drafter!r}, n_ctx {self.n_ctx}>"

    def _submit(self, request: Request) -> GenerationStream:
        return self._schedule.stream(request)

    # -- the session -------------------------------------------------------------------------------

    def require_idle(self) -> None:
        """Raise `BusyError` while an answer is being streamed."""
        self.session.require_idle()

    def _when_idle(self, work: Callable[[], _Result]) -> _Result:
        self.session.require_idle()  # before anything is loaded
        return work()

    def start_drafter(self) -> Drafter:
        """Return another drafter of the same expression, which has learnt nothing yet.

        It shares all weights. `session.draft_with` takes it for the next answer. The runtime closes
        the one that is in use; close all others before.
        """
        self.session.require_open()
        return self._choices.weights[self._choices.own].start()

    @property
    def drafter(self) -> str:
        """The expression of the drafter in use."""
        return self.session.drafter.name

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return not self._sessions

    def close(self) -> None:
        """Free the native memory of drafter, context, weights and target; again does nothing.

        In another thread or a signal's handler, while an answer is being made: that ends with
        `ClosedError`, and the memory that it uses is freed then.
        """
        if self._sessions:
            try:
                self._sessions[0].close()
            finally:
                self._sessions = ()
