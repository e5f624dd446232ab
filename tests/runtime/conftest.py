"""Files of every drafter, a vocabulary and two workers, once a session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.workers import running_worker

from specrun.bindings.models import Model, Vocabulary


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models, heads and stores by name, for the drafters of `support.every_drafter`."""
    from support.every_drafter import write_all  # torch, which few of the tests need

    return write_all(tmp_path_factory.mktemp("every drafter"))


@pytest.fixture(scope="session")
def vocabulary(tiny_model: Path) -> Iterator[Vocabulary]:
    """The vocabulary of the tiny model."""
    with Model(tiny_model) as model:
        yield model.vocabulary


@pytest.fixture(scope="session")
def workers() -> Iterator[tuple[str, str]]:
    """HOST:PORT of two workers that serve the CPU."""
    with running_worker() as (first, _), running_worker() as (second, _):
        yield first, second


@pytest.fixture(scope="session")
def worker(workers: tuple[str, str]) -> str:
    """The first of them."""
    return workers[0]
