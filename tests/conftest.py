"""Tiny models with byte-level tokens and a chat template, written once a session."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.tiny_models import CHAT

from specrun.convert.random_model import RandomLlama, write_random_llama


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny models")  # with a space, as paths may have


@pytest.fixture(scope="session")
def tiny_model(tiny_folder: Path) -> Path:
    """A target of 320 tokens: 256 bytes, some pairs of letters, three control tokens."""
    path = tiny_folder / "target.gguf"
    write_random_llama(path, RandomLlama(**CHAT))
    return path


@pytest.fixture(scope="session")
def tiny_deep_model(tiny_folder: Path) -> Path:
    """The target's vocabulary in six layers, of which drafters may read some."""
    path = tiny_folder / "six layers.gguf"
    write_random_llama(path, RandomLlama(**{**CHAT, "layers": 6}))
    return path


@pytest.fixture(scope="session")
def tiny_drafter(tiny_folder: Path) -> Path:
    """The target's vocabulary, smaller and of another seed: it agrees by chance only."""
    path = tiny_folder / "drafter.gguf"
    write_random_llama(path, RandomLlama(**{**CHAT, "width": 16, "layers": 1, "seed": 1}))
    return path


@pytest.fixture(scope="session")
def tiny_flat_twin(tiny_folder: Path) -> Path:
    """The target with flatter laws: as a drafter it is accepted often, not always."""
    path = tiny_folder / "twin.gguf"
    write_random_llama(path, RandomLlama(**{**CHAT, "scale": 2.0}))
    return path


@pytest.fixture(scope="session")
def tiny_small_vocab(tiny_folder: Path) -> Path:
    """A model of 64 tokens without template, which fits none of the others."""
    path = tiny_folder / "small vocab.gguf"
    write_random_llama(path, RandomLlama(vocab_size=64, scale=3.0))
    return path


def pytest_unconfigure() -> None:
    """Close what llama-cpp-python leaves open: a run is to end without its ResourceWarning."""
    module = sys.modules.get("llama_cpp._utils")
    for name in ("outnull_file", "errnull_file"):
        opened = getattr(module, name, None)
        if opened is not None:
            opened.close()
