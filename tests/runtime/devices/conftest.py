"""Two workers on the loopback: devices whose memory the host cannot see, and that answer late."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.workers import running_worker


@pytest.fixture(scope="session")
def workers() -> Iterator[tuple[str, str]]:
    """HOST:PORT of two workers that serve the CPU."""
    with running_worker() as (first, _), running_worker() as (second, _):
        yield first, second


@pytest.fixture(scope="session")
def worker(workers: tuple[str, str]) -> str:
    """The first of them."""
    return workers[0]
