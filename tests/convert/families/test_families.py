"""Every family: converted, it computes the logits of transformers and splits text as transformers
does.

None of this may be skipped: `conftest.py` makes a skip here a failure.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support import tiny_families
from support.tiny_families import FAMILIES, SENTENCEPIECE, Built, Family, transformers_logits
from support.tiny_tokenizers import NASTY, TEMPLATE
from transformers import AutoTokenizer

from specrun.bindings.errors import ModelError
from specrun.bindings.gguf import read_header
from specrun.bindings.models import Model
from specrun.convert import convert_checkpoint
from specrun.convert.checkpoint import SOURCE_KEY
from specrun.convert.families import known_architectures

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Family], tuple[Built, Path]]:
    """Each family's checkpoint and its GGUF file, made when first used."""
    folder = tmp_path_factory.mktemp("families")
    known: dict[str, tuple[Built, Path]] = {}

    def get(family: Family) -> tuple[Built, Path]:
        if family.name not in known:
            made = tiny_families.build(family, folder / family.name)
            output = folder / f"{family.name}.gguf"
            pre = None if family.tokenizer in SENTENCEPIECE else family.tokenizer
            convert_checkpoint(made.folder, output, outtype="f32", pre=pre)
            known[family.name] = made, output
        return known[family.name]

    return get


def relative_error(found: npt.NDArray[np.float32], wanted: npt.NDArray[np.float32]) -> float:
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def tokens_of(length: int) -> list[int]:
    return [(7 * i * i + 3 * i + 11) % 600 for i in range(length)]


def test_every_architecture_is_compared() -> None:
    compared = {f"{family.architecture}ForCausalLM" for family in FAMILIES}
    # An old spelling of Llama; and what reads another model's keys (`test_gemma4.py`).
    others = {"LLaMAForCausalLM", "Gemma4AssistantForCausalLM"}
    assert compared == set(known_architectures()) - others


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_logits_are_transformers(built, logits, family: Family) -> None:
    made, output = built(family)
    wrongs = []
    for length in family.lengths:
        tokens = tokens_of(length)
        found = logits(output, tokens, n_ctx=256 if length <= 256 else 512)
        wanted = transformers_logits(made, tokens)
        assert np.isfinite(found).all()
        assert relative_error(found, wanted) < TOLERANCE
        wrongs.append(relative_error(found, transformers_logits(made, tokens, wrong=True)))
    assert max(wrongs) > 20 * TOLERANCE  # the comparison would have noticed


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_text_is_split_as_transformers_does(built, family: Family) -> None:
    made, output = built(family)
    tokenizer = AutoTokenizer.from_pretrained(made.folder)
    with Model(output) as model:
        vocabulary = model.vocabulary
        assert vocabulary.size == 608
        for text in (*NASTY.splitlines(keepends=True), NASTY, " a", "a  b", "<tool> a"):
            if (
                family.tokenizer == "newer llama"
            ):  # llama.cpp adds a space behind special tokens, and before spaces
                text = text.lstrip(" ").replace("<", "(")
            wanted = tokenizer(text).input_ids
            found = vocabulary.tokenize(text, parse_special=True)
            assert found == wanted, text
        assert vocabulary.adds_bos == (tokenizer("a").input_ids[0] == tokenizer.bos_token_id)
        assert vocabulary.eos == tokenizer.eos_token_id
        assert tokenizer.bos_token_id in (None, vocabulary.bos)
        assert model.chat_template == TEMPLATE


def older(config: dict[str, Any]) -> dict[str, Any]:
    """The config as transformers 4 wrote it: rope_theta and rope_scaling apart, patterns as one
    number."""
    rope = config.pop("rope_parameters")
    whole = rope.get("full_attention", rope)
    config["rope_theta"] = whole.pop("rope_theta")
    if "sliding_attention" in rope:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        config["sliding_window_pattern"] = config.pop("layer_types").index("full_attention") + 1
    kind = whole.pop("rope_type")
    config["partial_rotary_factor"] = whole.pop("partial_rotary_factor", 1.0)
    config["rope_scaling"] = (
        None if kind == "default" else {**whole, "type": "su" if kind == "longrope" else kind}
    )
    return config


def without_digest(path: Path) -> bytes:
    """The file without the keys of its source: the configs differ, their meaning does not."""
    digest = read_header(path).metadata[SOURCE_KEY]
    assert isinstance(digest, str)
    return path.read_bytes().replace(digest.encode(), b"")


@pytest.mark.parametrize(
    "name", ["llama3", "llama linear", "qwen2 yarn", "gemma3", "gemma3 scaled", "phi3 longrope"]
)
def test_configs_of_transformers_4_mean_the_same(tmp_path: Path, built, name: str) -> None:
    family = next(family for family in FAMILIES if family.name == name)
    made, output = built(family)
    folder = tmp_path / made.folder.name
    shutil.copytree(made.folder, folder)
    config = older(json.loads((folder / "config.json").read_text()))
    (folder / "config.json").write_text(json.dumps(config))
    pre = None if family.tokenizer in SENTENCEPIECE else family.tokenizer
    convert_checkpoint(folder, tmp_path / "older.gguf", outtype="f32", pre=pre)
    assert without_digest(tmp_path / "older.gguf") == without_digest(output)


def test_a_window_that_llama_cpp_lacks_bounds_the_context(built) -> None:
    _, output = built(next(family for family in FAMILIES if family.name == "mistral"))
    with Model(output) as model:
        assert model.n_ctx_train == 100


_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "dynamic rope": (
        "llama2",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
        "'dynamic': only default",
    ),
    "llama3 rope": (
        "qwen2",
        {"rope_parameters": {"rope_type": "llama3"}},
        "'llama3': only default, linear, yarn",
    ),
    "other betas": ("qwen2", {"rope_parameters": {**_YARN, "beta_fast": 16}}, "beta_fast = 16"),
    "part of a head": (
        "qwen3",
        {"rope_parameters": {"partial_rotary_factor": 0.5}},
        "partial_rotary_factor = 0.5",
    ),
    "wide heads": (
        "qwen2",
        {"head_dim": 32},
        "heads of 128 numbers together and hidden states of 64",
    ),
    "biases": ("qwen3", {"attention_bias": True}, "attention_bias = True"),
    "other NoPE layers": (
        "smollm3",
        {"no_rope_layers": [1, 1, 1, 1, 1]},
        "no_rope_layers other than every fourth",
    ),
    "shares that sum to less": ("qwen3 moe", {"norm_topk_prob": False}, "norm_topk_prob = False"),
    "layers without experts": ("qwen3 moe", {"mlp_only_layers": [0]}, r"mlp_only_layers = \[0\]"),
    "another activation": ("gemma", {"hidden_activation": "relu"}, "'relu'"),
    "no cap": ("gemma2", {"attn_logit_softcapping": None}, "no attn_logit_softcapping"),
    "a cap": ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
    "other divisor": (
        "gemma3",
        {"query_pre_attn_scalar": 256},
        "query_pre_attn_scalar = 256: llama.cpp takes 32",
    ),
    "both directions": (
        "gemma3",
        {"use_bidirectional_attention": True},
        "use_bidirectional_attention = True",
    ),
    "layer types": ("gemma3", {"layer_types": ["full_attention"]}, "layer_types for 1 of 7 layers"),
    "yarn in Phi-3": ("phi3", {"rope_parameters": _YARN}, "'yarn': only default, longrope"),
    "factors": (
        "phi3 longrope",
        {"rope_parameters": {"rope_type": "longrope"}},
        "long_factor that is not 8 positive",
    ),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_llama_cpp_could_not_compute_is_refused(tmp_path: Path, built, fault: str) -> None:
    name, changes, words = REFUSED[fault]
    family = next(family for family in FAMILIES if family.name == name)
    made, _ = built(family)
    folder = tmp_path / "checkpoint"
    shutil.copytree(made.folder, folder)
    config = {**json.loads((folder / "config.json").read_text()), **changes}
    (folder / "config.json").write_text(json.dumps(config))
    pre = None if family.tokenizer in SENTENCEPIECE else family.tokenizer
    with pytest.raises(ModelError, match=words):
        convert_checkpoint(folder, tmp_path / "m.gguf", outtype="f32", pre=pre)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
