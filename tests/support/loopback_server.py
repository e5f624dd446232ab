"""A server in a thread, on a port of this machine, over any engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from specrun.cli.serve.app import create_app
from specrun.cli.serve.server import serving_here
from specrun.cli.serve.settings import ServeSettings


@contextmanager
def serving(engine: Any, **settings: Any) -> Iterator[str]:
    """Serve until the block ends; gives the address, without /v1."""
    chosen = ServeSettings(**{"model": "tiny", "drain_seconds": 0.5, **settings})
    with serving_here(create_app(engine, chosen), chosen) as address:
        yield address
