"""A network between a client and a worker on this machine: bytes arrive late, and at a rate.

    python tests/support/slow_link.py 127.0.0.1:50052 50053 --delay-ms 2.5 --mbit 100

Every piece waits for the delay, half of a round trip, and for its turn at the rate; nothing is
lost. It stands in for a network where the system has no queueing discipline that does it (netem).
"""

from __future__ import annotations

import argparse
import queue
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["slow_link"]

_PIECE = 1 << 16
_PARALLEL = 4  # pieces that are under way while others wait


def _forward(source: socket.socket, sink: socket.socket, delay: float, rate: float) -> None:
    """Send on what comes, each byte `delay` seconds after its turn; `rate` in bytes a second."""
    waiting: queue.Queue[tuple[float, bytes]] = queue.Queue()

    def send() -> None:
        while True:
            due, piece = waiting.get()
            if not piece:
                break
            pause = due - time.monotonic()
            if pause > 0:
                time.sleep(pause)
            with suppress(OSError):
                sink.sendall(piece)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    turn = 0.0
    while True:
        try:
            piece = source.recv(_PIECE)
        except OSError:
            piece = b""
        turn = max(turn, time.monotonic()) + len(piece) / rate
        waiting.put((turn + delay, piece))
        if not piece:
            break
        # Not to hold a whole model: as a sender on a network has to wait, too.
        if waiting.qsize() > _PARALLEL:
            time.sleep(max(0.0, turn - time.monotonic()))
    sender.join()


def _serve(server: socket.socket, worker: str, delay: float, rate: float) -> None:
    host, _, port = worker.rpartition(":")
    while True:
        try:
            client, _ = server.accept()
        except OSError:
            return
        upstream = socket.create_connection((host, int(port)))
        threading.Thread(target=_join, args=(client, upstream, delay, rate), daemon=True).start()


def _join(client: socket.socket, upstream: socket.socket, delay: float, rate: float) -> None:
    """Send both ways until both have ended."""
    with client, upstream:
        for end in (client, upstream):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        back = threading.Thread(target=_forward, args=(upstream, client, delay, rate), daemon=True)
        back.start()
        _forward(client, upstream, delay, rate)
        back.join()


@contextmanager
def slow_link(
    worker: str, delay_s: float, mbit: float = 1e6, port: int = 0
) -> Iterator[tuple[str, int]]:
    """Give HOST:PORT of a listener from which a worker is reached slowly, and its port."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port))
        server.listen()
        arguments = (server, worker, delay_s, mbit * 1e6 / 8)
        threading.Thread(target=_serve, args=arguments, daemon=True).start()
        port = server.getsockname()[1]
        yield f"127.0.0.1:{port}", port
        with suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("worker")
    parser.add_argument("port", type=int)
    parser.add_argument("--delay-ms", type=float, default=2.5, help="half of a round trip")
    parser.add_argument("--mbit", type=float, default=100.0)
    given = parser.parse_args()
    with slow_link(given.worker, given.delay_ms / 1e3, given.mbit, given.port):
        threading.Event().wait()


if __name__ == "__main__":
    main()
