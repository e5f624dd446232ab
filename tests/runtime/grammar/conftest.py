"""The demo's vocabulary, for which grammars are compiled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from specrun.bindings.models import Model
from specrun.runtime.demo import demo_target


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    """The embedded target without its weights; each module has its own processes."""
    with Model(demo_target(), vocab_only=True) as model:
        yield model
