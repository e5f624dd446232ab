"""Models of many shapes, and their counts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind
from support.sparse_models import FAMILIES, SMALL, Size, write_sparse
from support.tiny_mamba import write_tiny_mamba
from support.tiny_nextn import write_tiny_glm4moe, write_tiny_qwen35

from specrun.bindings.models import remember_written
from specrun.runtime.memory import MemoryCounts

LARGE = Size(vocab=16_000, width=768, layers=12, heads=12, kv_heads=4, head=64, ffn=2048)
"""100 million parameters."""


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models by a name each: every family, tied and quantized ones, NextN blocks, 100M weights."""
    folder = tmp_path_factory.mktemp("memory")
    found = {name: write_sparse(folder / f"{name}.gguf", name) for name in FAMILIES}
    more = {
        "tied": ("llama", Size(tied=True)),
        "tied gemma4": ("gemma4", Size(tied=True)),
        "q8_0": ("llama", Size(kind=Kind.Q8_0)),
        "odd": ("llama", Size(vocab=317, width=224, layers=5, heads=7, kv_heads=1, head=32)),
        "large": ("llama", LARGE),
        "large tied": ("qwen3", Size(**{**vars(LARGE), "tied": True, "kind": Kind.Q8_0})),
    }
    for name, (family, size) in more.items():
        found[name] = write_sparse(folder / f"{name}.gguf", family, size)
    found["glm4moe"] = write_tiny_glm4moe(folder / "glm4moe.gguf")
    found["qwen35"] = write_tiny_qwen35(folder / "qwen35.gguf")
    found["mamba"] = write_tiny_mamba(folder / "mamba.gguf")
    for path in found.values():
        remember_written(path)
    assert SMALL.context > 4096
    return found


@pytest.fixture(scope="module")
def counts() -> Iterator[MemoryCounts]:
    with MemoryCounts() as found:
        yield found
