"""llama.cpp's quantizer in a process of its own.

The native call cannot be interrupted, and a failed assertion in it ends the process it runs in. In
another process both are harmless: Ctrl-C ends that one at once, and a crash becomes an error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from specrun.bindings.errors import ModelError, OutOfMemoryError
from specrun.bindings.quantizer.quantizer import QuantizeOptions

logger = logging.getLogger("specrun.llama")


class QuantizerProcess:
    """One quantization: `plan()`, then `write()`; a context manager that ends the process.

    Both yield llama.cpp's log line by line as it comes. Should this process be killed before
    `close()`, the other one removes what it wrote; so a file should get its final name before.
    Raises ModelError if llama.cpp fails or crashes, OutOfMemoryError if the other process was
    killed for its memory.
    """

    def __init__(self, source: str | os.PathLike[str], options: QuantizeOptions) -> None:
        self._source, self._options = os.fspath(source), options
        path = os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "specrun.bindings.quantizer.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, "GGML_NO_BACKTRACE": "1"},
        )

    def __enter__(self) -> QuantizerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process, whatever it is doing; calling it again does nothing."""
        self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                # What was still to be sent has no reader any more.
                with contextlib.suppress(OSError):
                    stream.close()
        self._process.wait()

    def plan(self) -> Iterator[str]:
        """Let llama.cpp say what it would do, line by line; nothing is written."""
        names = [entry.name for entry in dataclasses.fields(self._options)]
        values = {name: getattr(self._options, name) for name in names}
        importance = values.pop("importance")
        values["metadata"] = dict(values["metadata"])
        sizes = [(name, int(np.size(numbers))) for name, numbers in importance.items()]
        job = {"source": self._source, "options": values, "importance": sizes}
        self._send(json.dumps(job).encode() + b"\n", *importance.values())
        return self._lines_until("planned")

    def write(self, output: str | os.PathLike[str]) -> Iterator[str]:
        """Write the file `output` over what is there, yielding llama.cpp's log line by line.

        A partial file is left behind on failure.
        """
        self._send(json.dumps(os.fspath(output)).encode() + b"\n")
        return self._lines_until("written")

    def _send(self, *parts: Any) -> None:  # noqa: ANN401 - bytes or arrays
        stream = self._process.stdin
        assert stream is not None
        try:
            for part in parts:
                if not isinstance(part, bytes):
                    part = np.ascontiguousarray(part, np.float32).tobytes()
                stream.write(part)
            stream.flush()
        except BrokenPipeError:
            pass  # it ended: its last words say why

    def _lines_until(self, step: str) -> Iterator[str]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            if "log" in event:
                logger.log(event["level"], "%s", event["log"])
                yield event["log"]
            elif event.get("step") == step:
                return
            elif event.get("memory"):
                raise OutOfMemoryError(f"no memory to quantize {self._source}")
            else:
                raise ModelError(event["error"])
        raise self._ended()

    def _ended(self) -> Exception:
        code = self._process.wait()
        if code == -getattr(signal, "SIGKILL", 9):
            problem = f"the process that quantizes {self._source} was killed"
            return OutOfMemoryError(f"{problem}, perhaps for its memory")
        return ModelError(f"llama.cpp crashed while quantizing {self._source} (exit code {code})")
