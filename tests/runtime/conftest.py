"""Files of every drafter and a vocabulary, written and opened once a session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

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
