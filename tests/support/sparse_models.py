"""Models of any shape and size as sparse GGUF files: headers, and holes where the weights would be.

They load like others, all weights being 0, and take no place on the disk: for what depends on
shapes alone, such as memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

__all__ = ["FAMILIES", "SMALL", "Size", "write_sparse"]

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Size:
    """Numbers of a model; `kind` is the type of its matrices, vectors are F32."""

    vocab: int = 320
    width: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head: int = 64
    ffn: int = 512
    context: int = 8192
    kind: Kind = Kind.F16
    tied: bool = False


SMALL = Size()


@dataclass(frozen=True)
class _Family:
    """An architecture: more keys of its header, and the tensors of one of its layers."""

    architecture: str
    keys: Callable[[Size], Mapping[str, Any]]
    layer: Callable[[Size, int], Shapes]
    rest: Callable[[Size], Shapes] = lambda size: {}


def _attention(size: Size, *, norms: bool = False) -> Shapes:
    queries, keys = size.heads * size.head, size.kv_heads * size.head
    found: Shapes = {
        "attn_norm": (size.width,),
        "attn_q": (size.width, queries),
        "attn_k": (size.width, keys),
        "attn_v": (size.width, keys),
        "attn_output": (queries, size.width),
    }
    if norms:
        found |= {"attn_q_norm": (size.head,), "attn_k_norm": (size.head,)}
    return found


def _feed_forward(size: Size) -> Shapes:
    return {
        "ffn_norm": (size.width,),
        "ffn_gate": (size.width, size.ffn),
        "ffn_up": (size.width, size.ffn),
        "ffn_down": (size.ffn, size.width),
    }


def _experts(size: Size, count: int = 4) -> Shapes:
    return {
        "ffn_norm": (size.width,),
        "ffn_gate_inp": (size.width, count),
        "ffn_gate_exps": (size.width, size.ffn, count),
        "ffn_up_exps": (size.width, size.ffn, count),
        "ffn_down_exps": (size.ffn, size.width, count),
    }


def _heads(size: Size) -> dict[str, Any]:
    return {"attention.key_length": size.head, "attention.value_length": size.head}


def _post_norms(size: Size) -> Shapes:
    return {"post_attention_norm": (size.width,), "post_ffw_norm": (size.width,)}


def _latent_layer(size: Size, _number: int) -> Shapes:
    rank, rotary, plain = 128, 32, size.head - 32
    return {
        "attn_norm": (size.width,),
        "attn_q_a_norm": (64,),
        "attn_q_a": (size.width, 64),
        "attn_q_b": (64, size.heads * size.head),
        "attn_kv_a_norm": (rank,),
        "attn_kv_a_mqa": (size.width, rank + rotary),
        "attn_k_b": (plain, rank, size.heads),
        "attn_v_b": (rank, size.head, size.heads),
        "attn_output": (size.heads * size.head, size.width),
        **_feed_forward(size),
    }


def _convolution_layer(size: Size, number: int) -> Shapes:
    if number % 2:
        return {**_attention(size, norms=True), **_feed_forward(size)}
    return {
        "attn_norm": (size.width,),
        "shortconv.conv": (3, size.width),
        "shortconv.in_proj": (size.width, 3 * size.width),
        "shortconv.out_proj": (size.width, size.width),
        **_feed_forward(size),
    }


def _state_shapes(size: Size) -> Shapes:
    inner, state, groups, ranks = 2 * size.width, 32, 2, 8
    joined = inner + 2 * groups * state
    return {
        "attn_norm": (size.width,),
        "ssm_in": (size.width, 2 * inner + 2 * groups * state + ranks),
        "ssm_conv1d": (4, joined),
        "ssm_conv1d.bias": (joined,),
        "ssm_dt.bias": (ranks,),
        "ssm_a.": (1, ranks),
        "ssm_d.": (1, ranks),
        "ssm_norm": (inner // groups, groups),
        "ssm_out": (inner, size.width),
    }


def _state_keys(size: Size) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": 4,
        "ssm.inner_size": 2 * size.width,
        "ssm.state_size": 32,
        "ssm.group_count": 2,
        "ssm.time_step_rank": 8,
    }


def _parallel_layer(size: Size, _number: int) -> Shapes:
    shapes = {**_state_shapes(size), **_attention(size), **_feed_forward(size)}
    shapes["ffn_norm."] = shapes.pop("ffn_norm")  # llama.cpp's name of it
    return shapes


def _fused_layer(size: Size, _number: int) -> Shapes:
    joined = (size.heads + 2 * size.kv_heads) * size.head
    return {
        "attn_norm": (size.width,),
        "attn_qkv": (size.width, joined),
        "attn_output": (size.width, size.width),
        "ffn_norm": (size.width,),
        "ffn_up": (size.width, 2 * size.ffn),
        "ffn_down": (size.ffn, size.width),
    }


def _gemma4_layer(size: Size, number: int) -> Shapes:
    """Windows in every second layer, of half as wide heads; the last two layers share cells."""
    wide = number % 2
    return {
        **_attention(Size(**{**vars(size), "head": size.head if wide else size.head // 2})),
        "attn_q_norm": (size.head if wide else size.head // 2,),
        "attn_k_norm": (size.head if wide else size.head // 2,),
        **_feed_forward(size),
        **_post_norms(size),
    }


FAMILIES = {
    family.architecture: family
    for family in (
        _Family(
            "llama",
            lambda size: {"rope.dimension_count": size.head},
            lambda size, _: {**_attention(size), **_feed_forward(size)},
            lambda size: {"rope_freqs": (size.head // 2,)},
        ),
        _Family(
            "qwen3",
            _heads,
            lambda size, _: {**_attention(size, norms=True), **_feed_forward(size)},
        ),
        _Family(
            "qwen3moe",
            lambda size: {
                **_heads(size),
                "expert_count": 4,
                "expert_used_count": 2,
                "expert_feed_forward_length": size.ffn,
            },
            lambda size, _: {**_attention(size, norms=True), **_experts(size)},
        ),
        _Family(
            "gemma3",
            lambda size: {**_heads(size), "attention.sliding_window": 512},
            lambda size, _: {
                **_attention(size, norms=True),
                **_feed_forward(size),
                **_post_norms(size),
            },
        ),
        _Family(
            "gemma4",
            lambda size: {
                **_heads(size),
                "attention.key_length_swa": size.head // 2,
                "attention.value_length_swa": size.head // 2,
                "attention.sliding_window": 512,
                "attention.shared_kv_layers": 2,
                "embedding_length_per_layer_input": 0,
                "attention.sliding_window_pattern": [
                    not number % 2 for number in range(size.layers)
                ],
            },
            _gemma4_layer,
            lambda size: {"rope_freqs": (size.head // 2,)},
        ),
        _Family("phi3", lambda size: {"rope.dimension_count": size.head}, _fused_layer),
        _Family(
            "deepseek2",
            lambda size: {
                "attention.head_count_kv": 1,
                "attention.key_length": 160,
                "attention.value_length": 128,
                "attention.key_length_mla": size.head,
                "attention.value_length_mla": size.head,
                "attention.kv_lora_rank": 128,
                "attention.q_lora_rank": 64,
                "rope.dimension_count": 32,
                "leading_dense_block_count": size.layers,
                "expert_feed_forward_length": size.ffn,
                "expert_shared_count": 1,
            },
            _latent_layer,
        ),
        _Family(
            "lfm2",
            lambda size: {
                "shortconv.l_cache": 3,
                "attention.head_count_kv": [
                    size.kv_heads * (number % 2) for number in range(size.layers)
                ],
            },
            _convolution_layer,
        ),
        _Family(
            "falcon-h1",
            lambda size: {**_heads(size), **_state_keys(size)},
            _parallel_layer,
        ),
    )
}


def write_sparse(path: Path, architecture: str, size: Size = SMALL) -> Path:
    """Write a file of a family's shape; returns its path."""
    family, writer = FAMILIES[architecture], gguf.GGUFWriter(path, architecture)
    keys: dict[str, Any] = {
        "context_length": size.context,
        "embedding_length": size.width,
        "block_count": size.layers,
        "feed_forward_length": size.ffn,
        "attention.head_count": size.heads,
        "attention.head_count_kv": size.kv_heads,
        "vocab_size": size.vocab,
        **family.keys(size),
    }
    for name, value in keys.items():
        if isinstance(value, list):
            writer.add_array(f"{architecture}.{name}", value)
        else:
            writer.add_uint32(f"{architecture}.{name}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"t{token}" for token in range(size.vocab)])
    writer.add_token_types([1] * (size.vocab - 1) + [3])
    writer.add_token_merges(["t 0"])
    writer.add_eos_token_id(size.vocab - 1)
    end = _add_tensors(writer, family, size)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.flush()
    with path.open("r+b") as file:
        start = -(-path.stat().st_size // 32) * 32
        file.truncate(start + end)
    writer.close()
    return path


def _add_tensors(writer: gguf.GGUFWriter, family: _Family, size: Size) -> int:
    """Describe all tensors; returns how many bytes they take."""
    norm = "token_embd_norm" if family.architecture == "lfm2" else "output_norm"
    shapes: Shapes = {"token_embd": (size.width, size.vocab), norm: (size.width,)}
    if not size.tied:
        shapes["output"] = (size.width, size.vocab)
    shapes |= family.rest(size)
    for number in range(size.layers):
        for name, shape in family.layer(size, number).items():
            shapes[f"blk.{number}.{name}"] = shape
    end = 0
    for name, shape in shapes.items():
        last = name.rpartition(".")[2]
        full = name.rstrip(".") if last in ("bias", "") else f"{name}.weight"
        small = len(shape) == 1 or last in ("bias", "") or ("ssm_" in name and "_in" not in name)
        kind = Kind.F32 if (small and "ssm_out" not in name) or "conv" in name else size.kind
        block, n_bytes = gguf.GGML_QUANT_SIZES[kind]
        stored = int(np.prod(shape)) // block * n_bytes
        # The writer takes shapes of numpy, the slowest dimension first, of bytes where quantized.
        rows = [*reversed(shape)]
        rows[-1] = rows[-1] // block * n_bytes if block > 1 else rows[-1]
        dtype = np.uint8 if block > 1 else np.float32 if kind == Kind.F32 else np.float16
        writer.add_tensor_info(full, rows, np.dtype(dtype), stored, raw_dtype=kind)
        end += -(-stored // 32) * 32
    return end
