"""Layers on a worker behind a slow line: `specrun bench drafters` with a worker of its own.

    python .../offloaded.py --ngl 20 --delay-ms 2.5 --mbit 100 -m target.gguf --drafter ...

A worker and the line (tests/support/slow_link.py) are started, and all further arguments are those
of `specrun bench drafters`, whose output is passed on.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

_SPECRUN = (sys.executable, "-c", "from specrun.cli.entry import main; main()")
_LINK = Path(__file__).resolve().parents[3] / "tests" / "support" / "slow_link.py"
_WAIT_S = 30.0


@contextlib.contextmanager
def _running(*command: str) -> Iterator[None]:
    """Run a program until the block ends."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _await(port: int) -> None:
    """Return when something listens on a port."""
    until = time.monotonic() + _WAIT_S
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        time.sleep(0.1)
    sys.exit(f"nothing listens on port {port}")


def main() -> None:
    """Start the worker and the line, and measure."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--ngl", required=True, help="layers on the worker")
    parser.add_argument("--delay-ms", default="0", help="half of a round trip")
    parser.add_argument("--mbit", default="0", help="the line's rate; 0: no line between")
    line, bench = parser.parse_known_args()
    worker, link = _free_port(), _free_port()
    with ExitStack() as stack:
        stack.enter_context(_running(*_SPECRUN, "worker", "--port", str(worker), "-t", "1"))
        _await(worker)
        address = f"127.0.0.1:{worker}"
        if line.mbit != "0":
            arguments = (address, str(link), "--delay-ms", line.delay_ms, "--mbit", line.mbit)
            stack.enter_context(_running(sys.executable, str(_LINK), *arguments))
            address = f"127.0.0.1:{link}"
            time.sleep(1.0)  # the worker serves one client at a time, so nothing may look
        remote = ("--rpc", address, "-ngl", line.ngl, "-devd", "none")
        done = subprocess.run((*_SPECRUN, "bench", "drafters", *bench, *remote), check=False)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
