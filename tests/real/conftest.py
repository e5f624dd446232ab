"""The published model, for the tests that `make test-real` runs."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def published() -> Path:
    """The model as it was published; without it (a bare `pytest -m real`) there is no test."""
    path = os.environ.get("SPECRUN_REAL_MODEL", "")
    if not path:
        pytest.skip("needs the published model: run `make test-real`")
    return Path(path)
