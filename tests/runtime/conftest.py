"""Files of every drafter, written once a session."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models, heads and stores by name, for the drafters of `support.every_drafter`."""
    from support.every_drafter import write_all  # torch, which few of the tests need

    return write_all(tmp_path_factory.mktemp("every drafter"))
