"""A server in a thread, on a port of this machine, over any engine."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from specrun.cli.serve.app import create_app
from specrun.cli.serve.server import server_of
from specrun.cli.serve.settings import ServeSettings


@contextmanager
def serving(engine: Any, **settings: Any) -> Iterator[str]:
    """Serve until the block ends; gives the address, without /v1."""
    chosen = ServeSettings(**{"model": "tiny", "drain_seconds": 0.5, **settings})
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        ready = threading.Event()
        server = server_of(create_app(engine, chosen), chosen, ready.set)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        assert ready.wait(20)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()
