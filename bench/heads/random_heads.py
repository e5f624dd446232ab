"""Files of heads with random weights, of any size: what one evaluation reads, nobody trained."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from specrun.convert.metadata import Metadata
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.convert.random_tensors import random_matrix, random_vector
from specrun.convert.writer import write_gguf

__all__ = ["EAGLE_FEED_FORWARD", "write_eagle", "write_medusa", "write_target"]

EAGLE_FEED_FORWARD = 2.6875
"""The width between, over the hidden size, of the Llama layers that EAGLE's published heads have (11008 / 4096)."""


def write_target(path: Path, hidden: int, words: int, type_name: Literal["F32", "F16", "Q8_0"]) -> None:
    """Write a target of one small layer with its own output matrix: heads only read its embedding and output."""
    heads = _n_heads(hidden)
    spec = RandomLlama(
        vocab_size=words, width=hidden, layers=1, heads=heads, kv_heads=1, ffn=32, context=512, file_type=type_name
    )
    write_random_llama(path, spec)


def write_medusa(path: Path, hidden: int, words: int, type_name: str) -> None:
    """Write one Medusa head of one residual block with its own output matrix."""
    metadata = _sizes("medusa", hidden, words)
    metadata.count("medusa.head_count", 1)
    metadata.count("medusa.block_count", 1)
    spread = hidden**-0.5
    tensors = [
        random_matrix("medusa.0.res.0", (hidden, hidden), type_name, seed=0, spread=spread),
        random_vector("medusa.0.res.0", hidden, seed=1, mean=0.0, spread=spread, part="bias"),
        random_matrix("medusa.0.output", (words, hidden), type_name, seed=0, spread=spread),
    ]
    write_gguf(path, "medusa", metadata, tensors)


def write_eagle(path: Path, hidden: int, words: int, type_name: str) -> None:
    """Write an EAGLE head: fc and one layer without shared keys, as EAGLE-1 and EAGLE-2 have for LLaMA-2-7B."""
    heads = _n_heads(hidden)
    wide = int(EAGLE_FEED_FORWARD * hidden) // 32 * 32
    metadata = _sizes("eagle", hidden, words)
    metadata.count("eagle.attention.head_count", heads)
    metadata.count("eagle.attention.head_count_kv", heads)
    metadata.count("eagle.feed_forward_length", wide)
    metadata.number("eagle.rope.freq_base", 10000.0)
    metadata.number("eagle.attention.layer_norm_rms_epsilon", 1e-5)
    shapes = {
        "fc": (hidden, 2 * hidden),
        **{f"attn_{name}": (hidden, hidden) for name in ("q", "k", "v", "output")},
        "ffn_gate": (wide, hidden),
        "ffn_up": (wide, hidden),
        "ffn_down": (hidden, wide),
    }
    tensors = [
        random_matrix(f"eagle.{name}", shape, type_name, seed=0, spread=shape[1] ** -0.5)
        for name, shape in shapes.items()
    ]
    tensors.append(random_vector("eagle.ffn_norm", hidden, seed=0, mean=1.0, spread=0.1))
    write_gguf(path, "eagle", metadata, tensors)


def _n_heads(hidden: int) -> int:
    return hidden // (64 if hidden % 128 else 128)


def _sizes(kind: str, hidden: int, words: int) -> Metadata:
    metadata = Metadata()
    metadata.text("general.name", f"random {kind}")
    metadata.count(f"{kind}.embedding_length", hidden)
    metadata.count(f"{kind}.vocab_size", words)
    return metadata
