"""The metadata of a cut, and refused cuts, architecture by architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFValueType

from specrun.bindings.errors import MalformedFileError, OptionError, UnsupportedModelError
from specrun.bindings.gguf import PADDED_PARAMETERS, ArrayValue, read_header
from specrun.convert.cut import RULES, LayeredModel, cut_layers, range_text
from specrun.convert.gguf import Metadata, PlannedTensor, write_gguf

KINDS = {bool: GGUFValueType.BOOL, int: GGUFValueType.INT32, float: GGUFValueType.FLOAT32}


def write(
    path: Path, architecture: str, n_layers: int, n_blocks: int | None = None, **values: Any
) -> Path:
    """A file of one small tensor a block; __ in a key is a point, a leading _ is no
    prefix."""
    metadata = Metadata()
    metadata.count(f"{architecture}.block_count", n_layers)
    for name, value in values.items():
        key = name[1:] if name.startswith("_") else f"{architecture}.{name}"
        key = key.replace("__", ".")
        if isinstance(value, list):
            metadata.raw(key, value, GGUFValueType.ARRAY, KINDS[type(value[0])])
        else:
            metadata.count(key, value)
    tensors = [
        PlannedTensor(
            f"blk.{layer}.x.weight", (2,), "F32", lambda layer=layer: np.full(2, layer, np.float32)
        )
        for layer in range(n_layers if n_blocks is None else n_blocks)
    ]
    embeddings = PlannedTensor("token_embd.weight", (2,), "F32", lambda: np.zeros(2, np.float32))
    write_gguf(path, architecture, metadata, [embeddings, *tensors])
    return path


def cut(source: Path, *kept: int) -> dict[str, Any]:
    """Return the metadata after a cut, arrays as lists."""
    target = source.with_name("cut.gguf")
    cut_layers(source, target, layers=range_text(kept), force=True)
    metadata = read_header(target).metadata
    return {
        key: list(value) if isinstance(value, ArrayValue) else value
        for key, value in metadata.items()
    }


def test_arrays_with_one_value_a_layer_are_cut(tmp_path: Path) -> None:
    source = write(
        tmp_path / "m.gguf",
        "step35",
        4,
        feed_forward_length=[1, 2, 3, 4],
        attention__head_count_kv=[5, 6, 7, 8],
        attention__sliding_window_pattern=[True, False, True, True],
        swiglu_clamp_exp=[0.5, 1.5, 2.5, 3.5],
        rope__dimension_sections=[9, 9, 9, 9],  # four, but not one a layer
        embedding_length=64,
        _tokenizer__ggml__scores=[0.5] * 4,
    )
    after = cut(source, 1, 3)
    assert after["step35.feed_forward_length"] == [2, 4]
    assert after["step35.attention.head_count_kv"] == [6, 8]
    assert after["step35.attention.sliding_window_pattern"] == [False, True]
    assert after["step35.swiglu_clamp_exp"] == [1.5, 3.5]
    assert after["step35.rope.dimension_sections"] == [9, 9, 9, 9]
    assert after["tokenizer.ggml.scores"] == [0.5] * 4
    assert (after["step35.block_count"], after["step35.embedding_length"]) == (2, 64)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    source = write(
        tmp_path / "m.gguf", "glm4moe", 6, nextn_predict_layers=2, leading_dense_block_count=3
    )
    model = LayeredModel(source)
    assert model.n_layers == 4
    after = cut(source, 0, 2, 3)
    assert (after["glm4moe.block_count"], after["glm4moe.nextn_predict_layers"]) == (3, 0)
    assert after["glm4moe.leading_dense_block_count"] == 2
    assert len(read_header(tmp_path / "cut.gguf").tensors) == 4
    with pytest.raises(OptionError, match="no layer 4: the model has 4 layers"):
        cut(source, 4)


def test_a_head_stays_as_wide_as_the_first_layer_said(tmp_path: Path) -> None:
    source = write(
        tmp_path / "m.gguf", "openelm", 3, embedding_length=96, attention__head_count=[3, 4, 6]
    )
    after = cut(source, 1, 2)
    assert after["openelm.attention.head_count"] == [4, 6]
    assert (after["openelm.attention.key_length"], after["openelm.attention.value_length"]) == (
        32,
        32,
    )
    assert "openelm.attention.key_length" not in cut(source, 0, 2)
    deci = write(
        tmp_path / "d.gguf", "deci", 3, embedding_length=96, attention__head_count=[3, 0, 6]
    )
    with pytest.raises(UnsupportedModelError, match="layer 1 cannot come first"):
        cut(deci, 1, 2)


@pytest.mark.parametrize(
    ("architecture", "values", "kept", "wanted"),
    [
        ("gemma2", {}, (0, 1, 2), None),
        ("gemma2", {}, (0, 2, 3), [True, True, False]),
        ("gemma3", {"attention__sliding_window": 8}, (4, 5, 6), [True, False, True]),
        ("gemma3", {}, (4, 5, 6), None),  # no window, no pattern
        (
            "gemma3",
            {"attention__sliding_window": 8, "attention__sliding_window_pattern": 2},
            (0, 2),
            [True, True],
        ),
        ("cohere2moe", {"attention__sliding_window": 8}, (1, 4), [True, False]),
        ("cohere2moe", {"attention__sliding_window": 8}, (0, 5), None),
        ("gpt-oss", {"attention__sliding_window": 8}, (1, 2), [False, True]),
        ("olmo2", {"attention__sliding_window": 8}, (0, 4, 5, 3), [True, False, True, True]),
    ],
)
def test_windows_by_layer_number_are_written_out(
    tmp_path: Path,
    architecture: str,
    values: dict[str, int],
    kept: tuple[int, ...],
    wanted: list[bool] | None,
) -> None:
    source = write(tmp_path / "m.gguf", architecture, 8, **values)
    after = cut(source, *sorted(kept)).get(f"{architecture}.attention.sliding_window_pattern")
    assert (after if isinstance(after, list) else None) == wanted


def test_linear_attention_is_written_out(tmp_path: Path) -> None:
    source = write(tmp_path / "m.gguf", "qwen3next", 8)
    assert cut(source, 0, 3, 4)["qwen3next.attention.recurrent_layers"] == [True, False, True]
    every_second = write(tmp_path / "n.gguf", "qwen3next", 8, full_attention_interval=2)
    assert cut(every_second, 0, 1, 3)["qwen3next.attention.recurrent_layers"] == [
        True,
        False,
        False,
    ]
    assert "qwen3next.attention.recurrent_layers" not in cut(source, 0, 1, 2, 3)
    with pytest.raises(UnsupportedModelError, match="with attention must stay"):
        cut(source, 0, 1)
    with pytest.raises(UnsupportedModelError, match="with a recurrent state must stay"):
        cut(source, 3)
    hybrid = write(tmp_path / "h.gguf", "jamba", 4, attention__head_count_kv=[0, 2, 0, 0])
    assert cut(hybrid, 1, 2)["jamba.attention.head_count_kv"] == [2, 0]
    with pytest.raises(UnsupportedModelError, match="with attention must stay"):
        cut(hybrid, 0, 2)


@pytest.mark.parametrize(
    ("architecture", "n_layers", "values", "kept", "words"),
    [
        (
            "gemma3",
            62,
            {},
            tuple(range(40)),
            "takes a gemma3 of 62 layers for another kind of model than one of 40",
        ),
        ("gemma3", 64, {}, tuple(range(62)), "another kind of model than one of 62"),
        ("baichuan", 40, {}, tuple(range(32)), "another kind of model"),
        ("command-r", 64, {}, tuple(range(63)), "another kind of model"),
        ("deepseek2", 27, {}, (0, 1), "another kind of model"),
        ("exaone4", 64, {}, (0, 1), "another kind of model"),
        ("glm-dsa", 4, {}, (0, 2), "only its last layers can go, as in --layers 0-1"),
        ("rwkv6", 4, {}, (1, 2), "scaled by the layer's number"),
        ("rwkv7", 4, {}, (1, 2), "layer 1 cannot become layer 0"),
        (
            "llama4",
            8,
            {"interleave_moe_layer_step": 1},
            (0, 1, 2, 4),
            "layer 4 cannot become layer 3",
        ),
        (
            "llama4",
            8,
            {"interleave_moe_layer_step": 2, "attention__sliding_window": 0},
            (0, 2),
            "cannot become layer 1",
        ),
        ("ernie4_5-moe", 4, {"interleave_moe_layer_step": 2}, (0, 2), "cannot become layer 1"),
        (
            "smallthinker",
            8,
            {"attention__sliding_window": 8},
            (1, 2),
            "layer 1 cannot become layer 0",
        ),
        ("llama", 4, {"mystery": [1, 2, 3, 4]}, (0, 1), "llama.mystery holds 4 values"),
        ("qwen4exp", 4, {"ple__layers": [2]}, (0, 1), "must stay|needs layer 2"),
    ],
)
def test_cuts_that_would_be_read_otherwise_are_refused(
    tmp_path: Path,
    architecture: str,
    n_layers: int,
    values: dict[str, Any],
    kept: tuple[int, ...],
    words: str,
) -> None:
    source = write(tmp_path / "m.gguf", architecture, n_layers, **values)
    with pytest.raises(UnsupportedModelError, match=words):
        cut(source, *kept)
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


@pytest.mark.parametrize(
    ("architecture", "values", "words"),
    [
        ("t5", {}, "an encoder and a decoder"),
        ("bert", {}, "an encoder"),
        ("gemma3n", {}, "one table"),
        ("gemma4", {"embedding_length_per_layer_input": 256}, "one table"),
        ("gemma4", {"attention__shared_kv_layers": 2}, "keys of earlier ones"),
        ("granite", {"deepstack_mapping": [-1, 0, -1, 1]}, "pictures"),
        ("eagle3", {}, "a drafter made for one target"),
        ("llama5", {}, "is a llama5: whether its layers depend on their numbers is not known"),
        ("llama", {"_split__count": 3}, "one part of a split model"),
    ],
)
def test_models_that_cannot_be_cut_say_why(
    tmp_path: Path, architecture: str, values: dict[str, Any], words: str
) -> None:
    source = write(tmp_path / "m.gguf", architecture, 4, **values)
    with pytest.raises(UnsupportedModelError, match=words):
        LayeredModel(source)


def test_whole_groups_of_four_may_go(tmp_path: Path) -> None:
    source = write(
        tmp_path / "m.gguf",
        "llama4",
        12,
        interleave_moe_layer_step=2,
        attention__sliding_window=8192,
    )
    kept = (0, 1, 2, 3, 8, 9, 10, 11)
    assert "llama4.attention.sliding_window_pattern" not in cut(source, *kept)
    model = LayeredModel(source)
    for wanted in ({0, 1, 5, 7, 8}, {2, 3, 4, 5, 6, 7}, set(range(1, 12))):
        model.check(model.nearest(wanted))


def test_damaged_files(tmp_path: Path) -> None:
    short = write(tmp_path / "short.gguf", "llama", 4, feed_forward_length=[1, 2])
    with pytest.raises(MalformedFileError, match="has only 2 values, none for layer 3"):
        cut(short, 0, 3)
    with pytest.raises(MalformedFileError, match="no tensors of layer 3"):
        LayeredModel(write(tmp_path / "gap.gguf", "llama", 4, n_blocks=3))


def test_padding_is_counted_down(tmp_path: Path) -> None:
    source = write(
        tmp_path / "m.gguf", "llama", 4, **{"_" + PADDED_PARAMETERS.replace(".", "__"): 1000}
    )
    assert cut(source, 0)[PADDED_PARAMETERS] == 250


def test_every_rule_can_be_asked(tmp_path: Path) -> None:
    """The usual cut of a model without special settings works, or is refused, for every
    architecture of the table."""
    refused = set()
    for architecture in RULES:
        source = write(tmp_path / "m.gguf", architecture, 8, attention__sliding_window=16)
        try:
            cut(source, 0, 1, 2, 3)  # early exit keeps every layer in its place
        except UnsupportedModelError:
            refused.add(architecture)
        source.unlink()
    encoders = {
        name
        for name in refused
        if "bert" in name or name in ("t5encoder", "gemma-embedding", "clip", "t5")
    }
    others = {"eagle3", "dflash", "gemma4-assistant", "wavtokenizer-dec", "qwen3tts", "pockettts"}
    assert refused - encoders - others == {"gemma3n", "graniteswitch", "hrm_text", "minimax-01"}
