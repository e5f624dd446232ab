"""The model for text in a checkpoint, as families expect it.

Training programs put prefixes before the names of tensors, models for pictures wrap a model for
text, and some configs call a model tied whose output matrix has numbers of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from specrun.convert.checkpoint import PIECE_BYTES, Checkpoint, JsonObject, SourceTensor
from specrun.convert.checkpoint.source_tensor import widened
from specrun.convert.families.steps import FUSED_EXPERTS, NEXTN_BLOCKS, NEXTN_TOKENS

# torch.compile and data-parallel training put these before every name, or a part of it.
_COMPILED, _PARALLEL = "_orig_mod.", "module."
# The tensors of the model for text begin so, in wrappers of transformers 5 and of 4.
_TEXT = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_BLOCKS, _MOST = "mtp.", 8  # the beginning of names, and blocks that are looked for
# Fields that a wrapper's config leaves out, as transformers fills them in.
_LLAMA: dict[str, Any] = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
_LLAMA |= {"rms_norm_eps": 1e-6, "vocab_size": 32000}
_FILLED_IN: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": (
        "LlamaForCausalLM",
        {**_LLAMA, "intermediate_size": 11008, "max_position_embeddings": 2048},
    ),
    "mistral": (
        "MistralForCausalLM",
        {
            **_LLAMA,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
        },
    ),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", {}),
    "qwen3_5_moe_text": ("Qwen3_5MoeForCausalLM", {}),
    "phi3": ("Phi3ForCausalLM", {}),
    "gemma2": ("Gemma2ForCausalLM", {}),
    "gemma4_text": (
        "Gemma4ForCausalLM",
        {
            "vocab_size": 262144,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 30,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6,
            "sliding_window": 512,
            "hidden_size_per_layer_input": 256,
            "vocab_size_per_layer_input": 262144,
        },
    ),
    "gemma3_text": (
        "Gemma3ForCausalLM",
        {
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6,
            "sliding_window": 4096,
        },
    ),
}
_METHODS = {
    "gptq": "GPTQ",
    "awq": "AWQ",
    "fp8": "FP8",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "mxfp4": "MXFP4",
}


def text_part(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint of the model for text alone, with the names that families expect.

    Raises UnsupportedModelError for weights that are quantized already.
    """
    refuse_quantized(checkpoint)
    checkpoint = dataclasses.replace(checkpoint, tensors=without_prefixes(checkpoint.tensors))
    checkpoint = _with_blocks(_unwrapped(checkpoint))
    if any(name.endswith(".experts.gate_up_proj") for name in checkpoint.tensors):
        values = {**checkpoint.config.values, FUSED_EXPERTS: True}
        config = JsonObject(values, checkpoint.config.shown)
        checkpoint = dataclasses.replace(checkpoint, config=config)
    return _untied(checkpoint)


def refuse_quantized(checkpoint: Checkpoint) -> None:
    """Raise UnsupportedModelError for a checkpoint that is quantized by its config."""
    settings = checkpoint.config.any("quantization_config")
    if isinstance(settings, dict) and settings:
        if (
            checkpoint.config.any("model_type") == "gpt_oss"
            and settings.get("quant_method") == "mxfp4"
        ):
            return  # its family reads them
        method = str(settings.get("quant_method") or "in a way that config.json does not name")
        raise checkpoint.unsupported(
            f"is quantized already ({_METHODS.get(method, method[:40])}): convert the model that "
            "it was made from, which its model card names, and quantize that"
        )


def without_prefixes(tensors: Mapping[str, SourceTensor]) -> Mapping[str, SourceTensor]:
    """Return tensors by their names without the prefixes of torch.compile and of parallel runs."""
    if any(_COMPILED in name for name in tensors):
        tensors = {name.replace(_COMPILED, ""): tensor for name, tensor in tensors.items()}
    if tensors and all(name.startswith(_PARALLEL) for name in tensors):
        tensors = {name.removeprefix(_PARALLEL): tensor for name, tensor in tensors.items()}
    return tensors


def _unwrapped(checkpoint: Checkpoint) -> Checkpoint:
    """Return the text part of a wrapper for pictures or sound, other checkpoints as they are."""
    config = checkpoint.config
    inner = config.any("text_config")
    names = {name: _text_name(name) for name in checkpoint.tensors}
    if not isinstance(inner, dict):
        return checkpoint
    if not any(map(_is_of_text, checkpoint.tensors)):
        if "hidden_size" in config:
            return checkpoint
        # The config alone is wrapped, as that of an assistant of Gemma 4.
        values = {**inner, **config.values}
        return dataclasses.replace(checkpoint, config=JsonObject(values, config.shown))
    kind = str(inner.get("model_type"))
    known = _FILLED_IN.get(kind)
    if known is None:
        whole = next(iter(config.items("architectures")), "")
        raise checkpoint.unsupported(
            f"is a {str(whole)[:80]!r} around a model of type {kind[:40]!r}, whose text part is "
            f"not known here (known: {', '.join(_FILLED_IN)}): make the GGUF file with llama.cpp's "
            "convert_hf_to_gguf.py"
        )
    architecture, usual = known
    shared = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
    given = {key: config.any(key) for key in shared if key in config}
    stated = {key: value for key, value in inner.items() if value is not None}
    values = {**usual, **given, **stated, "architectures": [architecture]}
    kept = {new: checkpoint.tensors[name] for name, new in names.items() if new is not None}
    return dataclasses.replace(
        checkpoint,
        config=JsonObject(values, f"text_config in {config.shown}"),
        tensors=kept,
    )


def _with_blocks(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint whose config has the number and the kind of its NextN blocks.

    Who trains a model on, or saves it with transformers, leaves them out. They have a name of their
    own, or are layers behind the last one.
    """
    config, names = checkpoint.config, checkpoint.tensors
    stated = [config.any(key) for key in (NEXTN_BLOCKS, "num_nextn_predict_layers")]
    first = config.values.get("num_hidden_layers")
    behind = []
    if any(stated) and isinstance(first, int):
        behind = [f"model.layers.{n}." for n in range(first, first + _MOST)]
    n_blocks = 0
    for places in ([f"{_BLOCKS}layers.{n}." for n in range(_MOST)], behind):
        n_blocks = n_blocks or sum(
            any(name.startswith(place) for name in names) for place in places
        )
    if not n_blocks and not any(stated):
        return checkpoint
    has_tokens = any(name.endswith(".shared_head.head.weight") for name in names)
    values = {**config.values, NEXTN_BLOCKS: n_blocks, NEXTN_TOKENS: has_tokens}
    return dataclasses.replace(checkpoint, config=JsonObject(values, config.shown))


def _is_of_text(name: str) -> bool:
    return name.startswith(tuple(_TEXT))


def _text_name(name: str) -> str | None:
    """Return the name of a wrapper's tensor in the model for text; None for the other parts."""
    for theirs, ours in _TEXT.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name if name.startswith(("lm_head.", _BLOCKS)) else None


def _untied(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint whose config does not call an output matrix tied that is another one."""
    head = checkpoint.tensors.get("lm_head.weight")
    embeddings = checkpoint.tensors.get("model.embed_tokens.weight")
    if head is None or embeddings is None or _same_numbers(head, embeddings):
        return checkpoint
    config = checkpoint.config
    if config.any("tie_word_embeddings") is False:
        return checkpoint
    values = {**config.values, "tie_word_embeddings": False}
    return dataclasses.replace(checkpoint, config=JsonObject(values, config.shown))


def _same_numbers(first: SourceTensor, second: SourceTensor) -> bool:
    if first.shape != second.shape:
        return False
    step = PIECE_BYTES // 8
    for start in range(0, first.n_elements, step):
        count = min(step, first.n_elements - start)
        if not np.array_equal(_numbers(first, start, count), _numbers(second, start, count)):
            return False
    return True


def _numbers(tensor: SourceTensor, start: int, count: int) -> np.ndarray[Any, Any]:
    raw = tensor.raw(start, count)
    return widened(raw) if tensor.type_name == "BF16" else raw
