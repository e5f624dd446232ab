"""A vocabulary with the control tokens of families that call tools."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from specrun.bindings.model import Model
from specrun.bindings.vocabulary import Vocabulary
from specrun.convert.random_model import RandomLlama, write_random_llama

CONTROLS = (
    "<|im_start|>",
    "<|im_end|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    "<think>",
    "<|end|>",
)


@pytest.fixture(scope="session")
def tool_vocabulary(tiny_folder: Path) -> Iterator[Vocabulary]:
    path = tiny_folder / "tools.gguf"
    write_random_llama(path, RandomLlama(vocab_size=320, controls=CONTROLS, width=16, layers=1))
    with Model(path) as model:
        yield model.vocabulary
