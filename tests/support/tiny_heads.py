"""Tiny Medusa heads as GGUF files, random or fitted, and a numpy reference of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Block = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class TinyMedusa:
    """Head k: residual blocks (weight [h, h], bias [h]), then an output matrix [vocab, h] or None
    for the target's.

    Reference: Medusa's `ResBlock` and heads (medusa/model/medusa_model.py), x + SiLU(W x + b),
    applied in turn.
    """

    blocks: Sequence[Sequence[Block]]
    outputs: Sequence[np.ndarray | None]

    def logits(self, head: int, features: np.ndarray, target_output: np.ndarray) -> np.ndarray:
        state = features.astype(np.float64)
        for weight, bias in self.blocks[head]:
            linear = state @ weight.T.astype(np.float64) + bias
            state = state + linear / (1.0 + np.exp(-linear))
        output = self.outputs[head]
        return state @ (target_output if output is None else output).T.astype(np.float64)

    def write(self, path: Path, n_vocab: int, quantization: str = "F32", **changes: Any) -> Path:
        gguf = __import__("gguf")
        hidden = self.blocks[0][0][0].shape[0]
        writer = gguf.GGUFWriter(path, changes.pop("architecture", "medusa"))
        sizes = {
            "embedding_length": hidden,
            "vocab_size": n_vocab,
            "head_count": len(self.blocks),
            "block_count": len(self.blocks[0]),
        }
        for name, value in {**sizes, **{k: v for k, v in changes.items() if k in sizes}}.items():
            writer.add_uint32(f"medusa.{name}", value)
        if "accuracy" in changes:
            writer.add_array("medusa.node_accuracy", changes["accuracy"])
        if "vocabulary" in changes:
            writer.add_string("specrun.target.vocabulary_sha256", changes["vocabulary"])
        kind = gguf.GGMLQuantizationType[quantization]
        for name, array in self.tensors().items():
            if name == changes.get("without"):
                continue
            if array.ndim == 2 and quantization != "F32":
                writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
            else:
                writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def tensors(self) -> dict[str, np.ndarray]:
        found: dict[str, np.ndarray] = {}
        for head, blocks in enumerate(self.blocks):
            for j, (weight, bias) in enumerate(blocks):
                found[f"medusa.{head}.res.{j}.weight"] = weight
                found[f"medusa.{head}.res.{j}.bias"] = bias
            output = self.outputs[head]
            if output is not None:
                found[f"medusa.{head}.output.weight"] = output
        return found


def random_medusa(
    hidden: int,
    vocab_size: int,
    *,
    heads: int = 3,
    blocks: int = 1,
    own_output: bool = True,
    seed: int = 0,
) -> TinyMedusa:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32)

    made = [[(normal(hidden, hidden), normal(hidden)) for _ in range(blocks)] for _ in range(heads)]
    return TinyMedusa(
        made, [normal(vocab_size, hidden) if own_output else None for _ in range(heads)]
    )
