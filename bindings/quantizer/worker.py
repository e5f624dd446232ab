"""The process in which llama.cpp quantizes: started by `QuantizerProcess`, one job, then it ends.

It reads a line of JSON and the importance matrices' numbers from its input, plans, and reports; the
next line is the path to write. Every line of its output is one JSON object: a line of llama.cpp's
log, or the end of a step. Then it stays until it is ended: when its input ends, its parent is
gone, killed before the file had its name, and the file is removed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from specrun.bindings.errors import SpecrunError
from specrun.bindings.functions import call
from specrun.bindings.library import llama
from specrun.bindings.quantizer.quantizer import QuantizeOptions, quantize_file

_INPUT, _OUTPUT, _ERRORS = 0, 1, 2  # the standard descriptors


class _Reports(logging.Handler):
    """Writes events as lines of JSON."""

    def __init__(self, output: BinaryIO) -> None:
        super().__init__(logging.DEBUG)
        self.output = output

    def report(self, **event: object) -> None:
        """Write one event at once."""
        self.output.write(json.dumps(event).encode() + b"\n")
        self.output.flush()

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line of the log."""
        self.report(log=record.getMessage(), level=record.levelno)


def main() -> None:
    """Do the job from standard input."""
    # Ctrl-C reaches the whole group of processes: the parent of this one decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    job_input, reports = os.fdopen(_INPUT, "rb"), _Reports(os.fdopen(os.dup(_OUTPUT), "wb"))
    os.dup2(_ERRORS, _OUTPUT)  # whatever native code prints is no report
    log = logging.getLogger("specrun.llama")
    log.addHandler(reports)
    log.setLevel(logging.DEBUG)
    try:
        keep = _report_aborts(reports)
        job = json.loads(job_input.readline())
        options = _options(job, job_input)
        quantize_file(job["source"], None, options)
        reports.report(step="planned")
        line = job_input.readline()
        if line:
            output = json.loads(line)
            watch = threading.Thread(target=_end_with_parent, args=(job_input, output), daemon=True)
            watch.start()
            quantize_file(job["source"], output, options)
            reports.report(step="written")
            watch.join()
        del keep
    except SpecrunError as error:
        reports.report(error=str(error))
    except MemoryError:
        reports.report(error="out of memory", memory=True)
    reports.output.close()
    # The thread that waits for the input to end would make Python wait, too.
    os._exit(0)


def _options(job: dict[str, Any], job_input: BinaryIO) -> QuantizeOptions:
    values = job["options"]
    importance = {
        name: np.frombuffer(job_input.read(4 * size), np.float32)
        for name, size in job["importance"]
    }
    values["tensor_types"] = tuple((pattern, kind) for pattern, kind in values["tensor_types"])
    return QuantizeOptions(**values, importance=importance)


def _end_with_parent(job_input: BinaryIO, output: str) -> None:
    if not job_input.read(1):
        with contextlib.suppress(OSError):
            Path(output).unlink()
        os._exit(1)


def _report_aborts(reports: _Reports) -> object:
    """Report the message of a failed assertion in ggml, which then ends the process."""

    def report(message: bytes | None) -> None:
        reports.report(error=(message or b"an assertion failed").decode("utf-8", "replace"))

    callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(report)
    llama()
    call("ggml_set_abort_callback")(callback)
    return callback


if __name__ == "__main__":
    main()
