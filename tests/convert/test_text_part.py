"""Checkpoints as they lie around: wrapped, prefixed, half-stated, quantized, with many templates.

Each is compared with the plain checkpoint that it was made from: the same logits, or the sentence
that names what it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.tiny_checkpoints import (
    llama_config,
    llama_tensors,
    safetensors_bytes,
    tokenizer_files,
)

from specrun.bindings.errors import MalformedFileError, UnsupportedModelError
from specrun.bindings.models import Model
from specrun.convert import convert_checkpoint

TOKENS = [5, 9, 200, 17, 5, 42]
Write = Callable[..., Path]
Logits = Callable[..., npt.NDArray[np.float32]]


@pytest.fixture
def plain(tmp_path: Path, write_checkpoint: Write, logits: Logits) -> npt.NDArray[np.float32]:
    """The logits of the small Llama, converted as it is."""
    convert_checkpoint(write_checkpoint(), tmp_path / "plain.gguf", outtype="f32")
    return logits(tmp_path / "plain.gguf", TOKENS)


def converted(folder: Path, tmp_path: Path) -> Path:
    path = tmp_path / "converted.gguf"
    convert_checkpoint(folder, path, outtype="f32", force=True)
    return path


PREFIXES: dict[str, Callable[[str], str]] = {
    "inner model compiled": lambda name: name.replace("model.", "model._orig_mod.", 1),
    "both": lambda name: f"module._orig_mod.{name}",
}


@pytest.mark.parametrize("change", PREFIXES.values(), ids=PREFIXES)
def test_prefixes_of_training_programs_are_left_out(
    tmp_path: Path, write_checkpoint: Write, logits: Logits, plain: Any, change: Any
) -> None:
    tensors = {change(name): value for name, value in llama_tensors(llama_config()).items()}
    found = logits(converted(write_checkpoint(tensors=tensors), tmp_path), TOKENS)
    np.testing.assert_array_equal(found, plain)


WRAPPERS: dict[str, Callable[[str], str]] = {
    "transformers 5": lambda name: (
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name
    ),
    "transformers 4": lambda name: f"language_model.{name}",
}


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("change", WRAPPERS.values(), ids=WRAPPERS)
def test_the_text_part_of_a_wrapper_is_converted(
    tmp_path: Path, write_checkpoint: Write, logits: Logits, plain: Any, change: Any, kind: str
) -> None:
    inner = llama_config(model_type=kind)
    del inner["architectures"]
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "text_config": inner,
        "vision_config": {"model_type": "clip_vision_model"},
        "vocab_size": 300,
    }
    tensors = {change(name): value for name, value in llama_tensors(llama_config()).items()}
    pictures = np.ones((4, 4), np.float32)
    others = ("vision_tower.embeddings.weight", "model.multi_modal_projector.linear_1.weight")
    tensors |= dict.fromkeys(others, pictures)
    folder = write_checkpoint(config, tensors)
    np.testing.assert_array_equal(logits(converted(folder, tmp_path), TOKENS), plain)


def test_a_gemma_wrapper_states_little_and_is_filled_in(
    tmp_path: Path, write_checkpoint: Write
) -> None:
    """The text_config of the published 4B states these keys, and leaves the others out."""
    inner = {
        "model_type": "gemma3_text",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "vocab_size": 300,
    }
    made = llama_config(tie_word_embeddings=True)
    tensors = llama_tensors(made)
    for layer in range(2):
        name = f"model.layers.{layer}"
        for part in ("q", "k"):
            tensors[f"{name}.self_attn.{part}_norm.weight"] = np.zeros(8, np.float32)
        for norm in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
            tensors[f"{name}.{norm}.weight"] = np.zeros(32, np.float32)
    tensors = {f"language_model.{name}": value for name, value in tensors.items()}
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": inner}
    path = converted(write_checkpoint({**config, "vocab_size": 300}, tensors), tmp_path)
    with Model(path) as model:
        assert model.architecture == "gemma3"
        assert model.n_ctx_train == 131072
        assert model.header.metadata["gemma3.attention.sliding_window"] == 1024


def test_a_wrapper_of_an_unknown_model_is_named(write_checkpoint: Write, tmp_path: Path) -> None:
    config = {
        "architectures": ["OddForConditionalGeneration"],
        "text_config": {"model_type": "odd_text"},
        "vocab_size": 300,
    }
    tensors = {
        f"language_model.{name}": value for name, value in llama_tensors(llama_config()).items()
    }
    with pytest.raises(UnsupportedModelError, match=r"OddForConditional.*'odd_text'.*known: llama"):
        converted(write_checkpoint(config, tensors), tmp_path)


def test_an_output_matrix_of_its_own_is_kept_though_the_config_ties_it(
    tmp_path: Path, write_checkpoint: Write, logits: Logits, plain: Any
) -> None:
    tensors = llama_tensors(llama_config())
    tied = llama_config(tie_word_embeddings=True)
    found = logits(converted(write_checkpoint(tied, tensors), tmp_path), TOKENS)
    np.testing.assert_array_equal(found, plain)
    same = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
    path = converted(write_checkpoint(tied, same), tmp_path)
    with Model(path) as model:
        assert "output.weight" not in {tensor.name for tensor in model.header.tensors}
    assert not np.array_equal(logits(path, TOKENS), plain)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, r"\(FP8\)"),
        ({"quant_method": "compressed-tensors"}, r"\(compressed-tensors\)"),
        ({"bits": 4}, r"in a way that config.json does not name\)"),
    ],
)
def test_quantized_checkpoints_are_named(
    tmp_path: Path, write_checkpoint: Write, settings: dict[str, Any], named: str
) -> None:
    folder = write_checkpoint(llama_config(quantization_config=settings))
    with pytest.raises(UnsupportedModelError, match=f"{named}: convert the model that it was made"):
        converted(folder, tmp_path)


def test_an_adapter_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    settings = {"peft_type": "LORA", "base_model_name_or_path": "someone/model-7b"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    (folder / "adapter_model.safetensors").write_bytes(safetensors_bytes({}))
    with pytest.raises(
        UnsupportedModelError, match=r"adapter \(LORA\) for someone/model-7b.*--lora"
    ):
        converted(folder, tmp_path)


def test_tokens_that_are_none_or_not_there_count_as_not_named(
    tmp_path: Path, write_checkpoint: Write
) -> None:
    config = llama_config(pad_token_id=-1, eos_token_id=[298, -1], bos_token_id=-1)
    settings = {"pad_token": "[PAD]", "unk_token": {"content": "<nothing>"}}
    tokenizer = tokenizer_files(299)["tokenizer.json"]
    behind = {"id": 300, "content": "[PAD]", "special": True}  # the matrix has 300 rows
    tokenizer = {**tokenizer, "added_tokens": [*tokenizer.get("added_tokens", []), behind]}
    extra = {"tokenizer.json": tokenizer, "tokenizer_config.json": settings}
    extra["generation_config.json"] = {"eos_token_id": [298, -1], "pad_token_id": -1}
    extra["special_tokens_map.json"] = {"pad_token": "[PAD]"}
    with Model(converted(write_checkpoint(config, **extra), tmp_path)) as model:
        assert model.vocabulary.size == 300
        assert model.vocabulary.end_of_generation == {298}
        assert "tokenizer.ggml.padding_token_id" not in model.header.metadata


def test_no_number_below_minus_one_is_a_token(tmp_path: Path, write_checkpoint: Write) -> None:
    folder = write_checkpoint(llama_config(eos_token_id=-7))
    with pytest.raises(MalformedFileError, match="eos_token_id = -7"):
        converted(folder, tmp_path)


MANY = [{"name": "default", "template": "{{ 1 }}"}, {"name": "tool_use", "template": "{{ 2 }}"}]
TEMPLATES: dict[str, tuple[dict[str, Any], str, str | None]] = {
    "list": ({"tokenizer_config.json": {"chat_template": MANY}}, "{{ 1 }}", "{{ 2 }}"),
    "no default": ({"tokenizer_config.json": {"chat_template": MANY[1:]}}, "{{ 2 }}", "{{ 2 }}"),
    "json beside": (
        {"tokenizer_config.json": {}, "chat_template.json": {"chat_template": "{{ 3 }}"}},
        "{{ 3 }}",
        None,
    ),
    "json list": (
        {"tokenizer_config.json": {}, "chat_template.json": {"chat_template": MANY}},
        "{{ 1 }}",
        "{{ 2 }}",
    ),
}


@pytest.mark.parametrize(("files", "usual", "tools"), TEMPLATES.values(), ids=TEMPLATES)
def test_all_templates_are_kept_by_name(
    tmp_path: Path, write_checkpoint: Write, files: Any, usual: str, tools: str | None
) -> None:
    with Model(converted(write_checkpoint(**files), tmp_path)) as model:
        assert model.chat_template == usual
        assert model.tool_template == tools


def test_templates_in_a_folder_are_kept_by_their_names(
    tmp_path: Path, write_checkpoint: Write
) -> None:
    folder = write_checkpoint(**{"chat_template.jinja": b"{{ 1 }}"})
    (folder / "additional_chat_templates").mkdir()
    for name in ("tool_use", "rag-long"):
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(f"{{{{ '{name}' }}}}")
    with Model(converted(folder, tmp_path)) as model:
        assert model.chat_template == "{{ 1 }}"
        assert model.tool_template == "{{ 'tool_use' }}"
        named = model.header.metadata["tokenizer.chat_templates"]
        assert sorted(named) == ["rag_long", "tool_use"]
        assert model.header.metadata["tokenizer.chat_template.rag_long"] == "{{ 'rag-long' }}"
