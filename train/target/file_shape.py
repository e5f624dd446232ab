"""A GGUF target by its header: its sizes, and whether heads can be made for it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from specrun.bindings.contexts.rows import LAYER_INPUT_ARCHITECTURES
from specrun.bindings.errors import UnsupportedModelError
from specrun.bindings.gguf import ArrayValue, GGUFHeader, read_header
from specrun.bindings.models.model import Model
from specrun.convert.gguf import GGUFSource, require_whole
from specrun.runtime.language import method_of_head
from specrun.runtime.models import check_rollback
from specrun.train.target.target_shape import ModelShape, dividing_heads
from specrun.train.target.teacher import check_logits


def check_file_target(path: Path) -> None:
    """Raise UnsupportedModelError unless heads can be trained for the model in a GGUF file.

    Raises FileMissingError and MalformedFileError for what is no model file. Reads no weights.
    """
    header = read_header(path)
    if method_of_head(header.architecture) is not None:
        raise UnsupportedModelError(
            f"{path} is itself a head ({header.architecture}): give the target that is to be "
            "drafted for"
        )
    require_whole(path, header)
    check_logits(path, header)
    with Model(path, vocab_only=True) as model:
        if not model.can_generate:
            raise UnsupportedModelError(
                f"{path} is no left-to-right decoder ({header.architecture}): nothing drafts for it"
            )
        check_rollback(model)


def check_taps(path: Path) -> None:
    """Raise UnsupportedModelError unless llama.cpp hands out the inputs of a file's layers."""
    architecture = read_header(path).architecture
    if architecture not in LAYER_INPUT_ARCHITECTURES:
        raise UnsupportedModelError(
            f"{path} is a {architecture} model, whose layer inputs llama.cpp does not hand out, "
            "and EAGLE-3 reads them: train eagle, medusa or hydra, which read its final states"
        )


def expert_count(path: Path) -> int:
    """Return how many experts a layer has, 0 where it has none."""
    header = read_header(path)
    count = header.metadata.get(f"{header.architecture}.expert_count")
    return count if isinstance(count, int) else 0


def file_shape(path: Path) -> ModelShape:
    """Return the sizes of the model in a GGUF file; raises UnsupportedModelError for missing ones.

    Where layers differ, the largest number stands for all: heads are one layer of their own.
    """
    source = GGUFSource(path)
    own, metadata = f"{source.header.architecture}.", source.header.metadata
    hidden, heads = source.count(f"{own}embedding_length"), _largest(source, "attention.head_count")
    heads, kv_heads = dividing_heads(
        hidden, heads, _largest(source, "attention.head_count_kv", heads)
    )
    layers, nextn = source.count(f"{own}block_count"), metadata.get(f"{own}nextn_predict_layers")
    embedding = source.tensors.get("token_embd.weight")
    if embedding is None:
        raise source.unsupported("has no tensor token_embd.weight: no head can be made for it")
    epsilon = _number(source.header, "attention.layer_norm_epsilon", 1e-6)
    return ModelShape(
        hidden=hidden,
        n_layers=layers - (nextn if isinstance(nextn, int) else 0),
        n_heads=heads,
        n_kv_heads=kv_heads,
        feed_forward=_largest(source, "feed_forward_length", 4 * hidden),
        rope_theta=_number(source.header, "rope.freq_base", 10000.0),
        norm_eps=_number(source.header, "attention.layer_norm_rms_epsilon", epsilon),
        max_positions=source.count(f"{own}context_length"),
        vocab_size=embedding.shape[1],
    )


def _largest(source: GGUFSource, key: str, default: int | None = None) -> int:
    """Return a count of the architecture, the largest where each layer has its own."""
    name = f"{source.header.architecture}.{key}"
    value = source.header.metadata.get(name)
    if isinstance(value, ArrayValue):
        counts = [each for each in value.tolist() if isinstance(each, int) and each > 0]
        if counts:
            return max(counts)
    if value is None and default is not None:
        return default
    return source.count(name)


def _number(header: GGUFHeader, key: str, default: float) -> float:
    value = header.metadata.get(f"{header.architecture}.{key}")
    if not isinstance(value, float) or not math.isfinite(value) or value <= 0:
        return default
    return float(str(np.float32(value)))  # stored as float32: 1e-05, not 9.999999747378752e-06
