"""A Llama in numpy as Hugging Face defines it: the reference for converted files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def reference_logits(
    config: dict[str, Any],
    tensors: dict[str, npt.NDArray[Any]],
    tokens: Sequence[int],
    frequencies: Array | None = None,
) -> Array:
    """Return the logits after each token; `frequencies` replaces the plain rope frequencies."""
    weights = {name: array.astype(np.float64) for name, array in tensors.items()}
    hidden = weights["model.embed_tokens.weight"][list(tokens)]
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        normed = _norm(hidden, weights[f"{name}.input_layernorm.weight"], config)
        hidden = hidden + _attention(config, weights, f"{name}.self_attn", normed, frequencies)
        normed = _norm(hidden, weights[f"{name}.post_attention_layernorm.weight"], config)
        gate, up = (normed @ weights[f"{name}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        hidden = (
            hidden + (gate / (1 + np.exp(-gate)) * up) @ weights[f"{name}.mlp.down_proj.weight"].T
        )
    hidden = _norm(hidden, weights["model.norm.weight"], config)
    output = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    return np.asarray(hidden @ weights[output].T)


def _norm(hidden: Array, weight: Array, config: dict[str, Any]) -> Array:
    mean = np.mean(hidden**2, axis=-1, keepdims=True)
    return np.asarray(hidden / np.sqrt(mean + config["rms_norm_eps"]) * weight)


def _attention(
    config: dict[str, Any],
    weights: dict[str, Array],
    name: str,
    normed: Array,
    frequencies: Array | None,
) -> Array:
    heads, shared, n = config["num_attention_heads"], config["num_key_value_heads"], len(normed)
    head = config.get("head_dim", config["hidden_size"] // heads)
    if frequencies is None:
        frequencies = 1 / config["rope_theta"] ** (np.arange(0, head, 2) / head)

    def project(part: str, inputs: Array) -> Array:
        return inputs @ weights[f"{name}.{part}_proj.weight"].T + weights.get(
            f"{name}.{part}_proj.bias", 0.0
        )

    query = _rotate(project("q", normed).reshape(n, heads, head), frequencies)
    key = _rotate(project("k", normed).reshape(n, shared, head), frequencies).repeat(
        heads // shared, axis=1
    )
    value = project("v", normed).reshape(n, shared, head).repeat(heads // shared, axis=1)
    scores = np.einsum("qhd,khd->hqk", query, key) / np.sqrt(head)
    scores = np.where(np.tri(n, dtype=bool), scores, -np.inf)
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    scores /= scores.sum(axis=-1, keepdims=True)
    return project("o", np.einsum("hqk,khd->qhd", scores, value).reshape(n, heads * head))


def _rotate(rows: Array, frequencies: Array) -> Array:
    """Rotate element i with element i + half, as Hugging Face stores them."""
    angles = np.arange(len(rows))[:, None, None] * frequencies
    low, high = np.split(rows, 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
