"""Recurrent models: plain decoding works over several prompts, drafting is refused with a
sentence."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from specrun.runtime import Runtime, SamplingParams, UnsupportedModelError

WIDTH, INNER, STATE, RANK, LAYERS, VOCAB = 32, 64, 16, 2, 2, 64


@pytest.fixture(scope="module")
def mamba(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Mamba model (Gu and Dao 2023) of 64 one-letter tokens."""
    path = tmp_path_factory.mktemp("mamba") / "mamba.gguf"
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


def answer(runtime: Runtime, prompt: list[int]) -> list[int]:
    return runtime.generate(prompt, SamplingParams(temperature=0.0), max_tokens=12).token_ids


def test_plain_decoding_works_and_a_second_prompt_starts_from_a_clean_state(mamba: Path) -> None:
    prompts = [[1, 2, 3, 4, 5], [1, 2, 9, 8], [1, 2, 9, 8, 7, 6]]
    with Runtime(mamba, n_ctx=256, n_threads=1) as runtime:
        assert not runtime.model.can_branch
        answers = [answer(runtime, prompt) for prompt in prompts]
    for prompt, given in zip(prompts, answers, strict=True):
        with Runtime(mamba, n_ctx=256, n_threads=1) as fresh:
            assert answer(fresh, prompt) == given
    assert (
        len({tuple(answer) for answer in answers}) > 1
    )  # a state that ignored the prompt would answer alike


@pytest.mark.parametrize("drafter", ["prompt-lookup", "draft(FILE)", "draft(FILE, tree=2x2)"])
def test_drafting_is_refused_with_what_to_do(mamba: Path, drafter: str) -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"recurrent or hybrid model \(mamba\).*--drafter none"
    ) as caught:
        Runtime(mamba, drafter=drafter.replace("FILE", f'"{mamba}"'), n_ctx=256, n_threads=1)
    assert caught.value.exit_code == 3


def test_a_stream_that_was_abandoned_leaves_it_usable(mamba: Path) -> None:
    with Runtime(mamba, n_ctx=256, n_threads=1) as runtime:
        wanted = answer(runtime, [1, 2, 3])
        stream = runtime.stream([4, 5, 6], SamplingParams(temperature=0.0), max_tokens=12)
        next(stream)
        stream.close()
        assert answer(runtime, [1, 2, 3]) == wanted
