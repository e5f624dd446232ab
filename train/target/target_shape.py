"""The sizes of a target that a head must fit, read from its config.json.

Which weights something was computed from: what a cache or a checkpoint belongs to.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrun.bindings.errors import UnsupportedModelError
from specrun.bindings.gguf import read_header
from specrun.train.target.hf_model import read_config


@dataclass(frozen=True, slots=True)
class TargetShape:
    """A target's sizes; `n_heads` divides `hidden`, and `n_kv_heads` divides `n_heads`."""

    hidden: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    feed_forward: int
    rope_theta: float
    norm_eps: float
    max_positions: int

    def default_taps(self) -> tuple[int, int, int]:
        """Return the layers whose inputs EAGLE-3 reads where nothing else is said: low, middle and
        high.

        As EAGLE-3's reference: 2, n/2 and n-3. Where these would fall together, 1, n/2 and n-1.
        """
        n = self.n_layers
        usual = (2, n // 2, n - 3)
        return usual if 2 < n // 2 < n - 3 else (min(1, n - 1), n // 2, n - 1)


def target_shape(folder: Path) -> TargetShape:
    """Return the sizes of the model in a folder; raises UnsupportedModelError where config.json
    lacks one."""
    config = read_config(folder)

    def size(name: str, default: int | None = None) -> int:
        value = config.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UnsupportedModelError(
                f"config.json of {folder} has {value!r} as {name}: no head can be made for it"
            )
        return value

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    kv_heads = size("num_key_value_heads", heads)
    while (
        hidden % heads or (hidden // heads) % 2
    ):  # heads of a width of their own: take the nearest that divide
        heads -= 1
    while heads % kv_heads:
        kv_heads -= 1
    return TargetShape(
        hidden=hidden,
        n_layers=size("num_hidden_layers"),
        n_heads=heads,
        n_kv_heads=kv_heads,
        feed_forward=size("intermediate_size", 4 * hidden),
        rope_theta=_rope_theta(config),
        norm_eps=float(config.get("rms_norm_eps") or config.get("layer_norm_eps") or 1e-6),
        max_positions=size("max_position_embeddings", 2048),
    )


def _rope_theta(config: dict[str, Any]) -> float:
    rope = config.get("rope_parameters") or {}
    for values in (config, rope, rope.get("full_attention") or {}):
        if isinstance(values, dict) and isinstance(values.get("rope_theta"), int | float):
            return float(values["rope_theta"])
    return 10000.0


def source_identity(path: Path) -> dict[str, Any]:
    """Return what names the weights of a GGUF file or a folder: contents of small files, sizes and
    times of others."""
    if path.is_file():
        stat = path.stat()
        return {
            "source": [path.name, stat.st_size, stat.st_mtime_ns, read_header(path).architecture]
        }
    found = hashlib.sha256((path / "config.json").read_bytes()).hexdigest()
    weights = sorted(
        (file.name, file.stat().st_size, file.stat().st_mtime_ns)
        for file in path.glob("*.safetensors")
    )
    return {"source": [found, *([*weight] for weight in weights)]}


def source_digest(path: Path) -> str:
    """Return 16 hexadecimal digits that stand for the weights."""
    return hashlib.sha256(json.dumps(source_identity(path)).encode()).hexdigest()[:16]
