"""A cut model computes what its layers compute: the layers that remain, in their order, and nothing
else."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from support.transformers_models import keep_layers, make_model, model_logits, write_model

from specrun.bindings.errors import OptionError, UnsupportedModelError
from specrun.bindings.gguf import TENSOR_TYPES, read_header
from specrun.convert import RandomLlama, cut_layers, write_random_llama
from specrun.convert.cut import (
    CUT_LAYERS,
    CUT_SOURCE,
    CUT_SOURCE_LAYERS,
    LayeredModel,
    parse_layers,
    range_text,
)
from specrun.convert.gguf import STORED_TYPES, Metadata, PlannedTensor, write_gguf

TOKENS = [7, 30, 2, 11, 5, 5, 60, 1, 9, 44, 8, 90, 3]  # longer than the windows of the Gemma models

CUTS = [
    ("llama", 5, (0, 1, 2)),
    ("llama", 5, (0, 2, 4)),
    ("llama", 5, (3,)),
    ("qwen2", 4, (1, 2)),
    ("qwen3", 4, (0, 3)),
    # Gemma's windows alternate by layer number: early exit keeps that, the others need it written
    # out.
    ("gemma2", 5, (0, 1, 2)),
    ("gemma2", 5, (0, 2, 3)),
    ("gemma2", 5, (1, 2, 3)),
    ("gemma3", 8, (0, 1, 2, 3, 4, 5)),
    ("gemma3", 8, (0, 5, 7)),
    # SmolLM3 has no rope in every fourth layer, which no file can express: whole groups may go.
    ("smollm3", 8, (0, 1, 2)),
    ("smollm3", 8, (0, 1, 2, 7)),
    ("smollm3", 8, (4, 5, 6, 7)),
]


@pytest.mark.parametrize(("architecture", "n_layers", "kept"), CUTS)
def test_a_cut_equals_the_model_without_those_layers(
    tmp_path: Path, logits, architecture: str, n_layers: int, kept: tuple[int, ...]
) -> None:
    model = make_model(architecture, n_layers)
    source = write_model(tmp_path / "whole.gguf", model, architecture)
    whole = model_logits(model, TOKENS)
    np.testing.assert_allclose(logits(source, TOKENS), whole, atol=1e-4)
    report = cut_layers(source, tmp_path / "cut.gguf", layers=range_text(kept))
    wanted = model_logits(keep_layers(model, kept), TOKENS)
    found = logits(report.output, TOKENS)
    assert np.abs(found - wanted).max() < 1e-4
    assert np.abs(whole - wanted).max() > 0.1
    assert (report.layers, report.source_layers) == (kept, n_layers)


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3"])
def test_padded_models_of_other_families_compute_the_same(
    tmp_path: Path, logits, architecture: str
) -> None:
    from specrun.convert import pad_ffn

    source = write_model(tmp_path / "whole.gguf", make_model(architecture, 3), architecture)
    report = pad_ffn(source, tmp_path / "padded.gguf", 100_000)
    assert report.width > report.source_width
    assert np.abs(logits(report.output, TOKENS) - logits(source, TOKENS)).max() < 1e-5


def test_a_pattern_that_is_not_written_out_is_seen(tmp_path: Path, logits) -> None:
    """The test above can fail: with Gemma's own alternation instead of the array, the logits are
    others."""
    model = make_model("gemma2", 5)
    source = write_model(tmp_path / "whole.gguf", model, "gemma2")
    wanted = model_logits(keep_layers(model, (1, 2)), TOKENS)
    write_model(tmp_path / "plain.gguf", model, "gemma2")  # two layers, and no array
    assert np.abs(logits(tmp_path / "plain.gguf", TOKENS) - wanted).max() > 0.01
    cut_layers(source, tmp_path / "cut.gguf", layers="1-2")
    pattern = read_header(tmp_path / "cut.gguf").metadata["gemma2.attention.sliding_window_pattern"]
    assert list(pattern) == [False, True]


def test_a_window_must_stay_where_llama_cpp_would_end_the_process(tmp_path: Path) -> None:
    source = write_model(tmp_path / "whole.gguf", make_model("gemma2", 5), "gemma2")
    with pytest.raises(
        UnsupportedModelError, match="layers with a sliding window must stay, and 1,3 has none"
    ):
        cut_layers(source, tmp_path / "cut.gguf", layers="1,3")


@pytest.mark.parametrize("kept", ["1-7", "0-2,4", "0,2-3"])
def test_layers_that_would_lose_their_rope_are_refused(tmp_path: Path, kept: str) -> None:
    source = write_model(tmp_path / "whole.gguf", make_model("smollm3", 8), "smollm3")
    with pytest.raises(
        UnsupportedModelError, match=r"cannot become layer \d; --layers .* can be kept"
    ):
        cut_layers(source, tmp_path / "cut.gguf", layers=kept)
    assert [path.name for path in tmp_path.iterdir()] == ["whole.gguf"]
    model = LayeredModel(source)
    model.check(model.nearest(parse_layers(kept, 8)))


def test_weights_of_every_type_are_copied_bit_by_bit(tmp_path: Path) -> None:
    noise = np.random.default_rng(0)
    metadata = Metadata()
    for key, value in {"block_count": 3, "embedding_length": 256}.items():
        metadata.count(f"llama.{key}", value)
    tensors = []
    for kind in TENSOR_TYPES.values():
        for layer in range(3):
            n_bytes = 4 * 256 // kind.block_size * kind.block_bytes
            data = noise.integers(0, 256, n_bytes, np.uint8)
            if kind.name in STORED_TYPES:
                data = data.view(STORED_TYPES[kind.name])
            data = data.reshape(4, -1)
            name = f"blk.{layer}.{kind.name.lower()}.weight"
            tensors.append(PlannedTensor(name, (4, 256), kind.name, lambda data=data: data))
    write_gguf(tmp_path / "whole.gguf", "llama", metadata, tensors)
    cut_layers(tmp_path / "whole.gguf", tmp_path / "cut.gguf", skip="1")
    before, after = (stored(tmp_path / name) for name in ("whole.gguf", "cut.gguf"))
    assert {kind for kind, _ in after.values()} == {kind.name for kind in TENSOR_TYPES.values()}
    assert after == {
        name.replace("blk.2.", "blk.1."): value
        for name, value in before.items()
        if not name.startswith("blk.1.")
    }


def stored(path: Path) -> dict[str, tuple[str, bytes]]:
    data = path.read_bytes()
    return {
        tensor.name: (tensor.type_name, data[tensor.offset : tensor.offset + tensor.n_bytes])
        for tensor in read_header(path).tensors
    }


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    write_random_llama(tmp_path / "whole.gguf", RandomLlama(layers=6, chat_template="{{ 1 }}"))
    return tmp_path / "whole.gguf"


def test_the_file_says_what_it_is(whole: Path, tmp_path: Path) -> None:
    cut_layers(whole, tmp_path / "once.gguf", layers="0-3,5")
    twice = cut_layers(tmp_path / "once.gguf", tmp_path / "twice.gguf", skip="1").output
    before, after = read_header(whole).metadata, read_header(twice).metadata
    assert list(after[CUT_LAYERS]) == [0, 2, 3, 5]  # in the numbers of the whole model
    assert (after[CUT_SOURCE], after[CUT_SOURCE_LAYERS]) == ("whole.gguf", 6)
    assert after["llama.block_count"] == 4
    assert after["general.name"] == f"{before['general.name']}, layers 0,2-3,5"
    same = set(before) - {"llama.block_count", "general.name"}
    assert {key: after[key] for key in same} == {key: before[key] for key in same}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layers": "0-11"}, "no layer 11: the model has 6 layers, 0 to 5"),
        ({"skip": "6"}, "no layer 6: the model has 6 layers"),
        ({"layers": "-1"}, "'-1' is no layer"),
        ({"layers": ""}, "'' is no layer"),
        ({"layers": "0,two"}, "'two' is no layer"),
        ({"layers": "3-1"}, "runs backwards: write 1-3"),
        ({"layers": "0-3,2"}, "layer 2 is named twice"),
        ({"skip": "0-5"}, "all 6 layers leaves no model"),
        ({"skip": "0-"}, "all 6 layers leaves no model"),
        ({}, "one of the two"),
        ({"layers": "1", "skip": "2"}, "one of the two"),
    ],
)
def test_impossible_layers_are_refused(
    whole: Path, tmp_path: Path, options: dict[str, str], words: str
) -> None:
    with pytest.raises(OptionError, match=words):
        cut_layers(whole, tmp_path / "cut.gguf", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["whole.gguf"]


def test_layers_are_read_as_they_are_written() -> None:
    assert parse_layers("0-3, 8,10-", 12) == (0, 1, 2, 3, 8, 10, 11)
    assert parse_layers("5,1", 6) == (1, 5)
    for layers in ((0, 1, 2, 5), (3,), (0, 2, 4), tuple(range(9))):
        assert parse_layers(range_text(layers), 9) == layers


def test_an_existing_file_stays(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.gguf").write_bytes(b"precious")
    with pytest.raises(OptionError, match=r"already exists.*--force"):
        cut_layers(whole, tmp_path / "cut.gguf", layers="0")
    assert (tmp_path / "cut.gguf").read_bytes() == b"precious"
    cut_layers(whole, tmp_path / "cut.gguf", layers="0", force=True)
    assert read_header(tmp_path / "cut.gguf").metadata["llama.block_count"] == 1


def test_a_model_can_be_cut_over_itself(whole: Path, tmp_path: Path, logits) -> None:
    shutil.copy(whole, tmp_path / "copy.gguf")
    cut_layers(whole, whole, layers="0,5", force=True)
    cut_layers(tmp_path / "copy.gguf", tmp_path / "cut.gguf", layers="0,5")
    np.testing.assert_array_equal(
        logits(whole, TOKENS[:3]), logits(tmp_path / "cut.gguf", TOKENS[:3])
    )
