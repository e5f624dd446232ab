"""Processes that grammars live in, as their users see them: see `worker`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any

from specrun.runtime.grammar.grammar import GrammarError

STACK = 512 << 20
"""Bytes of stack that a grammar's compiler may take: references in a row take some kB each."""
MEMORY = 3 << 30
"""Bytes that a process may take, of which the stack is a part."""
_WORKER = Path(__file__).with_name("worker.py")


class ProcessEnded(Exception):
    """A process ended before it replied; `in_time`: by an error, not because it took long."""

    def __init__(self, *, in_time: bool) -> None:
        super().__init__()
        self.in_time = in_time


class GrammarProcess:
    """One process: it answers a request at a time, and ends when it is closed or dropped."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._late, self._pid = 0.0, 0
        self._is_busy = False

    @property
    def closed(self) -> bool:
        """Whether it was closed, by us or because it ended."""
        return self._connection.closed

    def ask(self, name: str, seconds: float, *arguments: object) -> None:
        """Send a request, which may take so long; raises `ProcessEnded`."""
        self._late = time.monotonic() + seconds
        self._is_busy = True
        try:
            self._connection.send((name, seconds, *arguments))
        except OSError:
            self.close()
            raise ProcessEnded(in_time=True) from None

    def reply(self, wait: float | None = None) -> Any:  # noqa: ANN401 - of any request
        """Return the reply, None if it has not come within so many seconds (None: wait).

        Raises `ProcessEnded`.
        """
        try:
            if wait is None or self._connection.poll(wait):
                reply = self._connection.recv()
                self._is_busy = False
                return reply
        except (EOFError, OSError):
            self._is_busy = False
            self.close()
            raise ProcessEnded(in_time=time.monotonic() < self._late) from None
        return None

    def fork(self) -> GrammarProcess:
        """Return another process that goes on from here; raises `ProcessEnded`."""
        ours, theirs = Pipe()
        forked = GrammarProcess(ours)
        whole = False
        try:
            with theirs, self._lock:
                self.ask("fork", 0.0)
                send_handle(self._connection, theirs.fileno(), None)
                self._is_busy = False
            forked._pid = ours.recv()
            whole = True
        except (OSError, EOFError):
            raise ProcessEnded(in_time=True) from None
        finally:
            if not whole:  # an interrupt, maybe: half of a request makes no sense to it
                self.close()
                forked.close()
        return forked

    def close(self) -> None:
        """End it, in the middle of a request, too."""
        self._interrupt()
        self._connection.close()

    def _interrupt(self) -> None:
        """Kill it if it is busy; else it ends itself when its connection closes."""
        if self._is_busy and self._pid:
            self._is_busy = False
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    __del__ = _interrupt  # the connection closes itself


def start(
    spelled: Sequence[bytes], ends: Sequence[int], special: Sequence[int], bos: int | None
) -> GrammarProcess:
    """Return a process with a vocabulary, to be forked for grammars.

    Raises `GrammarError` if there is no llguidance, or no process can be started.
    """
    ours, theirs = Pipe()
    process = GrammarProcess(ours)
    # The working folder may hold anything, so nothing is imported from there.
    paths = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"}
    try:
        with theirs:
            started = subprocess.Popen(
                [sys.executable, os.fspath(_WORKER), str(theirs.fileno()), str(MEMORY)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for whoever started it
            )
        weakref.finalize(process, _end, ours, started)
        ours.send((spelled, ends, special, bos))
        problem = ours.recv()
    except (OSError, EOFError, ValueError) as error:
        process.close()
        raise GrammarError(f"grammars need a process of their own, which ended: {error}") from None
    if problem:
        process.close()
        advice = "install it, or give no grammar"
        raise GrammarError(f"grammars need llguidance, which {problem}: {advice}")
    return process


def _end(connection: Connection, started: subprocess.Popen[bytes]) -> None:
    connection.close()
    started.kill()  # others may have copies of the connection: forks of this process
    started.wait()
