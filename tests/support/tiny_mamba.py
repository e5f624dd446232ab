"""A tiny random Mamba (Gu and Dao 2023): a memory that cannot branch, drop or take back."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

WIDTH, INNER, STATE, RANK, LAYERS, VOCAB = 32, 64, 16, 2, 2, 64


def write_tiny_mamba(path: Path) -> Path:
    """Write a model of 64 one-letter tokens."""
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_context_length(512)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(LAYERS)
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_inner_size(INNER)
    writer.add_ssm_state_size(STATE)
    writer.add_ssm_time_step_rank(RANK)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([chr(48 + token) for token in range(VOCAB)])
    writer.add_token_types([1] * (VOCAB - 1) + [3])
    writer.add_token_merges(["0 1"])
    writer.add_eos_token_id(VOCAB - 1)
    writer.add_bos_token_id(VOCAB - 1)
    writer.add_add_bos_token(False)

    def add(name: str, *shape: int, scale: float = 0.3) -> None:
        writer.add_tensor(name, (scale * random.standard_normal(shape)).astype(np.float32))

    add("token_embd.weight", VOCAB, WIDTH, scale=1.0)
    writer.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    add("output.weight", VOCAB, WIDTH)
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        writer.add_tensor(block + "attn_norm.weight", np.ones(WIDTH, np.float32))
        add(block + "ssm_in.weight", 2 * INNER, WIDTH)
        add(block + "ssm_conv1d.weight", INNER, 4)
        add(block + "ssm_conv1d.bias", INNER)
        add(block + "ssm_x.weight", RANK + 2 * STATE, INNER)
        add(block + "ssm_dt.weight", INNER, RANK)
        add(block + "ssm_dt.bias", INNER)
        writer.add_tensor(
            block + "ssm_a", -np.abs(random.standard_normal((INNER, STATE))).astype(np.float32)
        )
        add(block + "ssm_d", INNER)
        add(block + "ssm_out.weight", WIDTH, INNER)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
