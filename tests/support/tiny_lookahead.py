"""Tiny files of look-ahead embeddings (PaSS, SPACE), random or given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


def write_lookahead(
    path: Path, embeddings: np.ndarray, n_vocab: int, *, kind: str = "pass", **changes: Any
) -> Path:
    """Write embeddings [rows, h] as the file of a kind; `changes` overrule what it says."""
    gguf = __import__("gguf")
    writer = gguf.GGUFWriter(path, changes.get("architecture", kind))
    sizes = {
        "embedding_length": embeddings.shape[1],
        "vocab_size": n_vocab,
        "position_count": len(embeddings),
    }
    for name, value in {**sizes, **{k: v for k, v in changes.items() if k in sizes}}.items():
        writer.add_uint32(f"{kind}.{name}", value)
    if "vocabulary" in changes:
        writer.add_string("specrun.target.vocabulary_sha256", changes["vocabulary"])
    stored = np.ascontiguousarray(embeddings, changes.get("dtype", np.float32))
    writer.add_tensor(f"{kind}.embedding.weight", stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_embeddings(hidden: int, rows: int, *, scale: float = 1.0, seed: int = 0) -> np.ndarray:
    """Return embeddings [rows, hidden] about the size of a tiny model's."""
    return scale * np.random.default_rng(seed).standard_normal((rows, hidden)).astype(np.float32)
