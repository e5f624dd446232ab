"""A child process that does one job, so that its seconds and its peak memory are the job's own.

`python -m measure.convert.child JOB ARGUMENTS` writes a line of JSON. Peak memory is the
largest resident set, with everything that Python and its libraries take, plus that of the largest
process the job starts. On Linux it is read from VmHWM: getrusage would also count the parent, whose
pages a child shares until it becomes another program.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from specrun.bindings.errors import SpecrunError


@dataclass(frozen=True, slots=True)
class ChildRun:
    """Seconds of the job alone, without starting Python, and its peak memory in bytes."""

    seconds: float
    peak_bytes: int


def run_child(job: str, *arguments: str) -> ChildRun:
    """Run a job of `JOBS` in a new process; raises SpecrunError with its last line if it fails."""
    command = [sys.executable, "-m", "measure.convert.child", job, *arguments]
    # The checkout's tools are not installed: the child finds them in their folder.
    folders = (str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", ""))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"code {done.returncode}"]
        raise SpecrunError(f"the measurement {job!r} failed: {said[-1]}")
    return ChildRun(**json.loads(done.stdout.splitlines()[-1]))


def peak_memory() -> int:
    """Return the largest resident set of this process so far, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    return _max_rss()


def _max_rss(*, of_children: bool = False) -> int:
    import resource  # Windows has none

    who = resource.RUSAGE_CHILDREN if of_children else resource.RUSAGE_SELF
    most = resource.getrusage(who).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most  # kilobytes but on macOS


def _convert(source: str, output: str) -> Callable[[], Any]:
    from specrun.convert import convert_checkpoint

    return partial(convert_checkpoint, source, output, outtype="f16", force=True)


def _quantize(source: str, output: str, file_type: str, n_threads: str) -> Callable[[], Any]:
    from specrun.convert.quantize import quantize_model

    return partial(quantize_model, source, output, file_type, n_threads=int(n_threads))


def _quantize_directly(
    source: str, output: str, file_type: str, n_threads: str
) -> Callable[[], Any]:
    """Return llama.cpp's own call, followed by an fsync: the other jobs end on the disk too."""
    import specrun.convert.quantize  # noqa: F401 - the memory of its imports counts in both jobs
    from specrun.bindings.library import llama
    from specrun.bindings.quantizer import QuantizeOptions, quantize_file

    llama()

    def work() -> None:
        quantize_file(source, output, QuantizeOptions(file_type, n_threads=int(n_threads)))
        sync(output)

    return work


JOBS: Mapping[str, Callable[..., Callable[[], Any]]] = {
    "convert": _convert,
    "quantize": _quantize,
    "quantize directly": _quantize_directly,
}
"""What a child can do: each loads what it needs and returns the work that is timed."""


def sync(path: str | Path) -> None:
    """Wait until a file's content is on the disk."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _main(job: str, *arguments: str) -> None:
    work = JOBS[job](*arguments)
    started = time.perf_counter()
    work()
    seconds = time.perf_counter() - started
    run = ChildRun(seconds, peak_memory() + _max_rss(of_children=True))
    os.write(1, json.dumps(asdict(run)).encode() + b"\n")


if __name__ == "__main__":
    _main(*sys.argv[1:])
