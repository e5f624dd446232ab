"""Heads with random weights: real files, for measuring what a head costs whatever it has learnt."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import OptionError
from specrun.convert.metadata import Metadata
from specrun.convert.writer import PlannedTensor, write_gguf

__all__ = ["RandomEagle", "RandomMedusa", "write_random_head"]


@dataclass(frozen=True, slots=True)
class RandomMedusa:
    """Medusa heads for a target of this hidden size and vocabulary; `own_output` gives each an output matrix."""

    hidden: int
    words: int
    heads: int = 4
    blocks: int = 1
    own_output: bool = True
    seed: int = 0

    architecture = "medusa"

    def counts(self) -> dict[str, int]:
        """Return the sizes that the file states."""
        return {
            "embedding_length": self.hidden,
            "vocab_size": self.words,
            "head_count": self.heads,
            "block_count": self.blocks,
        }

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the tensors' names and shapes, rows first."""
        for head in range(self.heads):
            for block in range(self.blocks):
                yield f"medusa.{head}.res.{block}.weight", (self.hidden, self.hidden)
                yield f"medusa.{head}.res.{block}.bias", (self.hidden,)
            if self.own_output:
                yield f"medusa.{head}.output.weight", (self.words, self.hidden)


@dataclass(frozen=True, slots=True)
class RandomEagle:
    """An EAGLE-1 or EAGLE-2 head for a target of this hidden size and vocabulary."""

    hidden: int
    words: int
    n_heads: int = 4
    n_kv_heads: int = 2
    feed_forward: int = 0  # 0: twice the hidden size
    seed: int = 0

    architecture = "eagle"

    def counts(self) -> dict[str, int]:
        """Return the sizes that the file states."""
        return {
            "embedding_length": self.hidden,
            "vocab_size": self.words,
            "attention.head_count": self.n_heads,
            "attention.head_count_kv": self.n_kv_heads,
            "feed_forward_length": self.feed_forward or 2 * self.hidden,
        }

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the tensors' names and shapes, rows first."""
        hidden, wide = self.hidden, self.feed_forward or 2 * self.hidden
        kv = hidden // self.n_heads * self.n_kv_heads
        yield "eagle.fc.weight", (hidden, 2 * hidden)
        yield "eagle.fc.bias", (hidden,)
        for name, rows in (("q", hidden), ("k", kv), ("v", kv), ("output", hidden)):
            yield f"eagle.attn_{name}.weight", (rows, hidden)
        yield "eagle.ffn_norm.weight", (hidden,)
        yield "eagle.ffn_gate.weight", (wide, hidden)
        yield "eagle.ffn_up.weight", (wide, hidden)
        yield "eagle.ffn_down.weight", (hidden, wide)


def write_random_head(path: str | os.PathLike[str], spec: RandomMedusa | RandomEagle, *, force: bool = False) -> Path:
    """Write the head in F32, weights from its seed; same spec, same bytes. Quantize it with `quantize_head`.

    Raises OptionError for sizes that are none, or if `path` exists and `force` is not given.
    """
    for name, value in spec.counts().items():
        if value < 1:
            raise OptionError(f"{name} is {value}: it must be at least 1")
    metadata = Metadata()
    metadata.text("general.name", f"random {spec.architecture} {spec.seed}")
    metadata.count("general.file_type", 0)
    for name, value in spec.counts().items():
        metadata.count(f"{spec.architecture}.{name}", value)
    tensors = [_tensor(name, shape, spec.seed) for name, shape in spec.shapes()]
    write_gguf(path, spec.architecture, metadata, tensors, force=force)
    return Path(path)


def _tensor(name: str, shape: tuple[int, ...], seed: int) -> PlannedTensor:
    def load() -> npt.NDArray[Any]:
        # Seeded by name too, so that a tensor does not depend on which were drawn before it.
        drawn = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape, dtype=np.float32)
        if "norm" in name:
            return np.float32(1.0) + np.float32(0.1) * drawn
        return drawn * np.float32(shape[-1] ** -0.5)

    return PlannedTensor(name, shape, "F32", load)
