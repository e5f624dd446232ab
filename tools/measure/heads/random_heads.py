"""Files of Medusa, Hydra and EAGLE heads with random weights, of any size, and of their target.

What an evaluation reads and computes does not depend on the weights, so cost needs no training.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from specrun.convert.gguf import Metadata, PlannedTensor, write_gguf
from specrun.convert.random_model import (
    RandomLlama,
    random_matrix,
    random_vector,
    write_random_llama,
)

HeadType = Literal["F32", "F16", "Q8_0"]

LAYER_FEED_FORWARD = 2.6875
"""Feed-forward width over hidden size, in the Llama layers of published EAGLE and Hydra heads
(11008 / 4096)."""


def write_target(path: Path, hidden: int, vocab_size: int, type_name: HeadType) -> None:
    """Write a target of one small layer: heads only read its embedding and output matrices."""
    spec = RandomLlama(
        vocab_size=vocab_size,
        width=hidden,
        layers=1,
        heads=_n_heads(hidden),
        kv_heads=1,
        ffn=32,
        context=512,
        file_type=type_name,
    )
    write_random_llama(path, spec)


def write_medusa(
    path: Path, hidden: int, vocab_size: int, type_name: HeadType, *, heads: int = 1
) -> None:
    """Write Medusa heads of one residual block, each with its own output matrix."""
    metadata = _sizes("medusa", hidden, vocab_size)
    metadata.count("medusa.head_count", heads)
    metadata.count("medusa.block_count", 1)
    tensors: list[PlannedTensor] = []
    for head in range(heads):
        block = f"medusa.{head}.res.0"
        tensors += [
            _matrix(block, (hidden, hidden), type_name),
            _bias(block, hidden),
            _matrix(f"medusa.{head}.output", (vocab_size, hidden), type_name),
        ]
    write_gguf(path, "medusa", metadata, tensors)


def write_hydra(
    path: Path, hidden: int, vocab_size: int, type_name: HeadType, *, heads: int = 1
) -> None:
    """Write Hydra++ heads: one residual block and an output matrix each, and a prefix layer."""
    metadata = _sizes("hydra", hidden, vocab_size)
    metadata.count("hydra.head_count", heads)
    metadata.count("hydra.block_count", 1)
    metadata.flag("hydra.prefix_layer", True)
    _describe_layer("hydra", hidden, metadata)
    tensors: list[PlannedTensor] = []
    for head in range(heads):
        # Head i reads the hidden state and the embeddings of i + 1 tokens, side by side.
        for name in (f"hydra.{head}.res.0", f"hydra.{head}.skip"):
            tensors += [
                _matrix(name, (hidden, (head + 2) * hidden), type_name),
                _bias(name, hidden),
            ]
        tensors.append(_matrix(f"hydra.{head}.output", (vocab_size, hidden), type_name))
    for name, shape in _layer_shapes(hidden).items():
        tensors.append(_matrix(f"hydra.prefix.{name}", shape, type_name))
    for name in ("attn_norm", "ffn_norm", "output_norm"):
        tensors.append(_norm(f"hydra.prefix.{name}", hidden))
    write_gguf(path, "hydra", metadata, tensors)


def write_eagle(path: Path, hidden: int, vocab_size: int, type_name: HeadType) -> None:
    """Write an EAGLE head (fc and one layer without grouped keys) as those for LLaMA-2-7B are."""
    metadata = _sizes("eagle", hidden, vocab_size)
    _describe_layer("eagle", hidden, metadata)
    shapes = {"fc": (hidden, 2 * hidden), **_layer_shapes(hidden)}
    tensors = [_matrix(f"eagle.{name}", shape, type_name) for name, shape in shapes.items()]
    write_gguf(path, "eagle", metadata, [*tensors, _norm("eagle.ffn_norm", hidden)])


def _sizes(kind: str, hidden: int, vocab_size: int) -> Metadata:
    metadata = Metadata()
    metadata.text("general.name", f"random {kind}")
    metadata.count(f"{kind}.embedding_length", hidden)
    metadata.count(f"{kind}.vocab_size", vocab_size)
    return metadata


def _describe_layer(kind: str, hidden: int, metadata: Metadata) -> None:
    metadata.count(f"{kind}.attention.head_count", _n_heads(hidden))
    metadata.count(f"{kind}.attention.head_count_kv", _n_heads(hidden))
    metadata.count(f"{kind}.feed_forward_length", _wide(hidden))
    metadata.number(f"{kind}.rope.freq_base", 10000.0)
    metadata.number(f"{kind}.attention.layer_norm_rms_epsilon", 1e-5)


def _layer_shapes(hidden: int) -> dict[str, tuple[int, int]]:
    """Return the shapes [rows, columns] of a Llama layer's matrices."""
    wide = _wide(hidden)
    attention = {f"attn_{name}": (hidden, hidden) for name in ("q", "k", "v", "output")}
    up = {"ffn_gate": (wide, hidden), "ffn_up": (wide, hidden)}
    return {**attention, **up, "ffn_down": (hidden, wide)}


def _wide(hidden: int) -> int:
    return int(LAYER_FEED_FORWARD * hidden) // 32 * 32  # a whole number of Q8_0's blocks


def _n_heads(hidden: int) -> int:
    return hidden // (64 if hidden % 128 else 128)


def _matrix(name: str, shape: tuple[int, int], type_name: HeadType) -> PlannedTensor:
    return random_matrix(name, shape, type_name, seed=0, spread=shape[1] ** -0.5)


def _bias(name: str, hidden: int) -> PlannedTensor:
    return random_vector(name, hidden, seed=1, mean=0.0, spread=hidden**-0.5, part="bias")


def _norm(name: str, hidden: int) -> PlannedTensor:
    return random_vector(name, hidden, seed=0, mean=1.0, spread=0.1)
