"""The patience of llama.cpp's threads: how long they spin before they sleep, by the machine's load.

ggml's threads meet after every operation of a graph. To sleep there and to be woken takes a few per
cent of an evaluation on an idle machine. To spin takes processors from other programs that want
them, and an evaluation is then several times as slow: a thread that is needed waits for them.

libgomp has two counts of looks before a thread sleeps, `SPINS` and `SPINS_BUSY`. It takes the
second while it manages more threads than there are processors. Beside other programs a team is
therefore added, whose threads sleep. It ends with the thread that made it.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time

from specrun.bindings.functions import call
from specrun.bindings.library import has_function
from specrun.bindings.machine.other_load import OtherLoad
from specrun.bindings.threads import are_spins_ours

_LOOK_SECONDS = 0.5
_AT_WORK = 0.1  # of a processor: less is no evaluation


class Patience:
    """Watches the machine's load in a thread, as long as this process evaluates.

    `is_unwatched` is looked at before every evaluation with several threads. The thread that
    watches adds the sleepers, and ends when they are to end.
    """

    is_unwatched = True

    def watch(self, n_threads: int) -> None:
        """Begin to watch, for evaluations with so many threads, if that can change anything."""
        self.is_unwatched = False
        # LLVM's OpenMP answers to GNU's names, too.
        has_libgomp = has_function("GOMP_parallel") and not has_function("__kmpc_fork_call")
        if are_spins_ours() and has_libgomp:
            thread = threading.Thread(target=self.run, args=(n_threads,), daemon=True)
            thread.name = "specrun patience"
            thread.start()

    def run(self, n_threads: int) -> None:
        """Add sleepers while other programs are at work; end with them, or with evaluations."""
        load, is_short, worked = OtherLoad(n_threads), False, time.process_time()
        while True:
            time.sleep(_LOOK_SECONDS)
            is_busy = bool(load.disturbance())
            before, worked = worked, time.process_time()
            is_idle = worked - before < _AT_WORK * _LOOK_SECONDS
            if is_idle or (is_short and not is_busy):
                break
            if is_busy and not is_short:
                add_sleepers(n_threads)
                is_short = True
        self.is_unwatched = True


def add_sleepers(n_threads: int) -> None:
    """Let libgomp manage more threads than processors until the calling thread ends.

    `n_threads` are those of evaluations.
    """
    surplus = max(2, len(os.sched_getaffinity(0)) - n_threads + 2)
    does_nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)  # of no pointer
    call("GOMP_parallel")(does_nothing, None, surplus, 0)


PATIENCE = Patience()
