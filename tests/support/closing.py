"""A process in which a runtime is closed while it answers: at a line, from a thread, by a signal.

    python -m support.closing TARGET DRAFTER MOMENT ...

Closes once for each moment: "line 12" runs `close()` before the 12th line of an answer, as a
signal's handler would, "thread 3" in another thread after 3 ms, "signal 3" in a real handler, and
"direct 3" closes a model and its context, which other threads use, after 3 ms. "close 3" interrupts
`close()` before its third line.

Prints what each answer came to, one a line, and ends with "all freed" where no native memory is
left. A call in freed memory would end the process.
"""

from __future__ import annotations

import contextlib
import gc
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from specrun.bindings.contexts.batch import Batch
from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.library import NativeHandle
from specrun.bindings.models.model import Model
from specrun.runtime import ClosedError, Runtime, SamplingParams
from support.interrupts import Interrupted
from support.tiny_models import F32

PROMPT = list(b"the quick brown fox, the quick")
LENGTH = 12
END = {319: float("-inf"), 318: float("-inf"), 317: float("-inf")}  # no answer ends before


class ClosedAt(Interrupted):
    """Closes a runtime before a line, in the place of an interrupt."""

    def __init__(self, runtime: Runtime, at: int) -> None:
        super().__init__(at)
        self._runtime = runtime

    def interrupt(self) -> None:
        self._runtime.close()


def answer(runtime: Runtime, *, close: bool = True) -> str:
    """What an answer comes to whose runtime may be closed, and then closed again."""
    kept = []
    try:
        stream = runtime.stream(
            PROMPT, SamplingParams(temperature=0.7, logit_bias=END, seed=7), max_tokens=LENGTH
        )
        for event in stream:
            kept.append(event)
            _ = event.logprob
        ending = "finished" if len(kept) == LENGTH else f"{len(kept)} tokens"
        assert list(stream) == []
    except ClosedError as error:
        ending = f"ClosedError: {error}"
    if close:
        runtime.close()
    return ending


def closed_at(runtime: Runtime, how: str, when: float) -> str:
    if how == "line":
        with ClosedAt(runtime, int(when)):
            return answer(runtime)
    if how == "close":
        ending = answer(runtime, close=False)
        with contextlib.suppress(ClosedError), Interrupted(int(when)):
            runtime.close()  # a model whose context was not closed says so
        runtime.close()
        return ending
    if how == "signal":

        def close(_: int, __: FrameType | None) -> None:
            runtime.close()

        signal.signal(signal.SIGALRM, close)
        signal.setitimer(signal.ITIMER_REAL, when / 1e3)
        ending = answer(runtime)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        return ending

    def close_later() -> None:
        time.sleep(when / 1e3)
        runtime.close()

    closing = threading.Thread(target=close_later)
    closing.start()
    ending = answer(runtime)
    closing.join()
    return ending


def used_directly(target: str, when: float) -> str:
    """What threads come to that evaluate and tokenize while context and model are closed."""
    endings: list[str] = []
    model = Model(target)
    context = Context(model, ContextOptions(**F32))
    batch = Batch(32, 1)
    batch.fill_chain(list(range(32)), 0, [0], 1)

    def until_closed(use: Callable[[], object]) -> None:
        try:
            while True:
                use()
        except ClosedError as error:
            endings.append(type(error).__name__)

    def evaluate() -> None:
        context.memory.clear()
        assert context.decode(batch).logits(0).max() < 1e9

    uses = [evaluate, lambda: model.vocabulary.tokenize("some words " * 50), model.metadata]
    threads = [threading.Thread(target=until_closed, args=(use,)) for use in uses]
    for thread in threads:
        thread.start()
    time.sleep(when / 1e3)
    context.close()
    model.close()
    for thread in threads:
        thread.join()
    return ", ".join(endings)


def report(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def natives() -> list[NativeHandle]:
    """What native memory there is, without what was there at the last `gc.freeze()`."""
    gc.collect()
    return [thing for thing in gc.get_objects() if isinstance(thing, NativeHandle)]


def main(target: str, drafter: str, *moments: str) -> None:
    sys.setswitchinterval(1e-5)
    with Runtime(target, drafter, **F32) as runtime, Interrupted() as counting:
        answer(runtime)
    report(str(counting.lines))
    left = natives()
    gc.freeze()  # what was imported is looked through once
    for moment in moments:
        how, _, when = moment.partition(" ")
        if how == "direct":
            report(used_directly(target, float(when)))
            continue
        runtime: Runtime | None = Runtime(target, drafter, **F32)
        report(closed_at(runtime, how, float(when)))
        if how == "close":
            runtime = None  # what an interrupt in it left open goes with it
        left += natives()
    report(f"left: {left}" if left else "all freed")


if __name__ == "__main__":
    main(*sys.argv[1:])
