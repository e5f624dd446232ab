"""Where a client runs: a server with a scripted model, a home, and a repository."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.client_desk import Desk

from tests.real.conftest import published

__all__ = ["desk", "published"]


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    """A desk with one faulty file in its repository."""
    return Desk.laid_out(tmp_path)
