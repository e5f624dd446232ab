"""A GGUF file of a Llama, read back as a Hugging Face folder: weights to train against.

Quantized weights become the float32 numbers of their codes, so the folder computes the same as the
file, not as the original: heads and drafters trained with it fit the file that will be
run.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from specrun.bindings.errors import MalformedFileError, UnsupportedModelError
from specrun.bindings.gguf import ArrayValue, GGUFHeader
from specrun.convert.families.steps import interleave_halves
from specrun.convert.gguf import GGUFSource
from specrun.convert.tokenizer import CONTROL, USER_DEFINED
from specrun.train.target.hf_model import HFModel, load_hf_model
from specrun.train.target.shape import file_shape
from specrun.train.trainer.model_folder import write_json, write_weights

_KEY = "tokenizer.ggml."


def tokenizer_from_gguf(header: GGUFHeader, path: Path) -> Tokenizer:
    """Return the byte-level BPE tokenizer of the file in `path`, whose header is given.

    Raises UnsupportedModelError for other kinds and other ways of splitting text than GPT-2's.
    """
    kind, pre = (header.metadata.get(_KEY + name) for name in ("model", "pre"))
    if (kind, pre) != ("gpt2", "gpt-2"):
        raise UnsupportedModelError(
            f"{path} has a tokenizer of kind {kind!r} that splits text as {pre!r}: only 'gpt2' "
            "with 'gpt-2' can be read back; use the folder it was converted from"
        )
    names = ("tokens", "token_type", "merges")
    tokens, types, merges = (_list(header, name, path) for name in names)
    vocabulary = {str(text): token for token, text in enumerate(tokens)}
    # A file of a tokenizer without merges has one of two one-byte tokens, which does no harm.
    pairs = [tuple(str(merge).split(" ", 1)) for merge in merges]
    known = [pair for pair in pairs if len(pair) == 2 and "".join(pair) in vocabulary]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=known))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    for token, number in zip(tokens, types, strict=True):
        if number == CONTROL:
            tokenizer.add_special_tokens([AddedToken(str(token), normalized=False)])
        elif number == USER_DEFINED:
            tokenizer.add_tokens([AddedToken(str(token), normalized=False)])
    for token, text in enumerate(tokens):
        if tokenizer.token_to_id(str(text)) != token:
            raise MalformedFileError(
                f"{path} has the token {text!r} more than once in its vocabulary"
            )
    return tokenizer


def tokenizer_settings(header: GGUFHeader, path: Path) -> dict[str, Any]:
    """Return the content of tokenizer_config.json: special tokens and the chat template."""
    tokens = _list(header, "tokens", path)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("padding", "pad")):
        token = header.metadata.get(f"{_KEY}{ours}_token_id")
        if isinstance(token, int):
            settings[f"{theirs}_token"] = tokens[token]
    for name in ("bos", "eos"):
        settings[f"add_{name}_token"] = bool(header.metadata.get(f"{_KEY}add_{name}_token", False))
    template = header.metadata.get("tokenizer.chat_template")
    if template is not None:
        settings["chat_template"] = template
    return settings


def _list(header: GGUFHeader, name: str, path: Path) -> list[Any]:
    value = header.metadata.get(_KEY + name)
    if not isinstance(value, ArrayValue):
        raise MalformedFileError(f"{path} has no list {_KEY}{name}")
    return value.tolist()


LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Hugging Face's names of a layer's tensors by llama.cpp's."""
_WHOLE_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def folder_from_gguf(
    source: str | os.PathLike[str], folder: str | os.PathLike[str], *, tokenizer: bool = True
) -> Path:
    """Write config.json, tokenizer files and, last, model.safetensors (float32); return `folder`.

    Raises UnsupportedModelError for anything but a plain Llama (no experts, no biases, no scaled
    rotary positions) with GPT-2's way of splitting text; FileMissingError, MalformedFileError.
    Without `tokenizer`, which a learner of token ids does not need, texts may be split in any way.
    """
    file = GGUFSource(source)
    config = llama_config(file)
    destination = Path(folder)
    destination.mkdir(parents=True, exist_ok=True)
    if tokenizer:
        tokenizer_from_gguf(file.header, file.path).save(str(destination / "tokenizer.json"))
        settings = tokenizer_settings(file.header, file.path)
        write_json(destination / "tokenizer_config.json", settings)
    weights = {}
    for name, tensor in file.tensors.items():
        numbers, heads = file.numbers(tensor), _turned_heads(name, config)
        if heads:
            numbers = in_halves(numbers, heads)
        weights[_name(name, file)] = torch.from_numpy(numbers)
    write_json(destination / "config.json", config)
    write_weights(destination / "model.safetensors", weights)
    return destination


def load_llama_file(
    path: Path, device: torch.device, dtype: torch.dtype = torch.float32
) -> HFModel:
    """Return the model in a GGUF file, frozen, whatever its tokenizer.

    Raises as `folder_from_gguf` and `load_hf_model`.
    """
    with tempfile.TemporaryDirectory(prefix="specrun-") as folder:
        return load_hf_model(folder_from_gguf(path, folder, tokenizer=False), device, dtype)


def llama_file_bytes(path: Path, number_size: int) -> int:
    """Return the memory of all weights of a Llama's file; raises as `folder_from_gguf`."""
    file = GGUFSource(path)
    llama_config(file)
    for name in file.tensors:
        _name(name, file)  # raises for tensors that no plain Llama has, before anything is loaded
    return number_size * sum(math.prod(tensor.shape) for tensor in file.tensors.values())


def gguf_numbers(
    source: GGUFSource, weights: Mapping[str, Tensor]
) -> dict[str, npt.NDArray[np.float32]]:
    """Return a Llama's weights, by Hugging Face's names, as the file's tensors, by its names."""
    config = llama_config(source)
    found: dict[str, npt.NDArray[np.float32]] = {}
    for name in source.tensors:
        numbers = weights[_name(name, source)].detach().cpu().float().numpy()
        heads = _turned_heads(name, config)
        found[name] = interleave_halves(numbers, heads) if heads else numbers
    return found


def _turned_heads(name: str, config: Mapping[str, Any]) -> int:
    """Return how many heads a tensor has whose rows llama.cpp orders otherwise, 0 for the rest."""
    kind = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    part = name.split(".")[2] if name.startswith("blk.") else ""
    return int(config[kind[part]]) if part in kind else 0


def llama_config(file: GGUFSource) -> dict[str, Any]:
    """Return the config.json of the Llama in a file; raises as `folder_from_gguf`."""
    metadata = file.header.metadata
    if file.header.architecture != "llama":
        raise UnsupportedModelError(
            f"{file.path} is a {file.header.architecture} model: only llama can be read back"
        )
    scaling = metadata.get("llama.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in file.tensors or "llama.expert_count" in metadata:
        raise UnsupportedModelError(
            f"{file.path} has experts or scaled rotary positions, which cannot be read back; "
            "use the folder it was converted from"
        )
    width, heads = file.count("llama.embedding_length"), file.count("llama.attention.head_count")
    head_dim = metadata.get("llama.rope.dimension_count", width // heads)
    if metadata.get("llama.attention.key_length", head_dim) != head_dim:
        raise UnsupportedModelError(
            f"{file.path} turns a part of each head only, which cannot be read back"
        )
    kv_key = "llama.attention.head_count_kv"
    kv_heads = file.count(kv_key) if kv_key in metadata else heads
    feed_forward = file.count("llama.feed_forward_length")
    # What `file_shape` would fill in, as heads have sizes of their own.
    if "token_embd.weight" not in file.tensors:
        raise MalformedFileError(f"{file.path} has no tensor token_embd.weight")
    for key, usual in (("attention.layer_norm_rms_epsilon", None), ("rope.freq_base", 10000.0)):
        value = metadata.get(f"llama.{key}", usual)
        if not isinstance(value, float) or not math.isfinite(value):
            raise MalformedFileError(f"{file.path} has no number as llama.{key}")
    # Heads as they are: those of `file_shape` divide the width.
    shape = replace(file_shape(file), n_heads=heads, n_kv_heads=kv_heads, feed_forward=feed_forward)
    return shape.llama_config(
        architectures=["LlamaForCausalLM"],
        head_dim=head_dim,
        bos_token_id=metadata.get(f"{_KEY}bos_token_id"),
        eos_token_id=metadata.get(f"{_KEY}eos_token_id"),
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias=False,
        mlp_bias=False,
    )


def in_halves(matrix: npt.NDArray[np.float32], n_heads: int) -> npt.NDArray[np.float32]:
    """Return the rows of each head in Hugging Face's order.

    llama.cpp turns neighbours, rows 2 i and 2 i + 1, Hugging Face rows i and i + half: so row 2 i +
    s of a head is row i + s half of the result. The inverse of `interleave_halves`.
    """
    rows, width = matrix.shape
    pairs = matrix.reshape(n_heads, rows // n_heads // 2, 2, width)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, width))


def _name(name: str, file: GGUFSource) -> str:
    if name in _WHOLE_NAMES:
        return _WHOLE_NAMES[name]
    match name.split("."):
        case ["blk", layer, part, "weight"] if part in LAYER_NAMES:
            return f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"
    raise UnsupportedModelError(f"{file.path} has the tensor {name}, which no plain Llama has")
