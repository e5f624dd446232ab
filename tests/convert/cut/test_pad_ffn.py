"""A padded model has the same output, and the wanted number of parameters."""

from __future__ import annotations

from math import prod
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from specrun.bindings.errors import OptionError, UnsupportedModelError
from specrun.bindings.gguf import PADDED_PARAMETERS, read_header
from specrun.convert import RandomLlama, pad_ffn, quantize_model, write_random_llama
from specrun.convert.cut import PADDED_FROM
from specrun.convert.gguf import Metadata, PlannedTensor, write_gguf

TOKENS = [7, 30, 2, 11, 5, 5, 60, 1, 0, 44]
SPEC = RandomLlama(width=64, heads=4, ffn=128, layers=2, scale=3.0, chat_template="{{ 1 }}")
GOAL = 2_000_000


def values(path: Path, name: str) -> np.ndarray:
    return np.array(next(tensor.data for tensor in GGUFReader(path).tensors if tensor.name == name))


@pytest.mark.parametrize("file_type", ["F32", "BF16"])
def test_same_logits_with_more_weights(tmp_path, logits, file_type) -> None:
    plain, source = tmp_path / "plain.gguf", tmp_path / "source.gguf"
    write_random_llama(plain, SPEC)
    quantize_model(plain, source, file_type, n_threads=1)
    report = pad_ffn(source, tmp_path / "padded.gguf", GOAL)
    found, wanted = logits(report.output, TOKENS), logits(source, TOKENS)
    assert np.abs(found - wanted).max() < 1e-5
    assert np.abs(wanted).max() > 3
    header = read_header(report.output)
    assert header.tensor_type_counts == read_header(source).tensor_type_counts
    assert header.file_type_name == file_type


def test_the_size_is_what_was_asked_and_the_file_says_so(tmp_path: Path) -> None:
    write_random_llama(tmp_path / "source.gguf", SPEC)
    seen: list[tuple[int, int]] = []
    progress = seen.append
    report = pad_ffn(
        tmp_path / "source.gguf",
        tmp_path / "m.gguf",
        GOAL,
        progress=lambda done, total: progress((done, total)),
    )
    before, after = read_header(tmp_path / "source.gguf"), read_header(report.output)
    step = 256 * 3 * 64 * 2  # one step of width in both layers
    assert abs(report.n_parameters - GOAL) <= step / 2
    assert (
        report.n_parameters == after.n_parameters == before.n_parameters + report.added_parameters
    )
    assert (report.source_width, report.width % 256) == (128, 0)
    assert after.metadata["llama.feed_forward_length"] == report.width
    assert after.metadata[PADDED_PARAMETERS] == report.added_parameters
    assert after.metadata[PADDED_FROM] == "source.gguf"
    kept = {
        key: value for key, value in before.metadata.items() if key != "llama.feed_forward_length"
    }
    assert {key: after.metadata[key] for key in kept} == kept
    assert set(after.metadata) - set(before.metadata) == {PADDED_PARAMETERS, PADDED_FROM}
    assert seen[-1][0] == seen[-1][1]


def test_added_weights_are_ordinary_numbers_and_the_same_every_time(tmp_path: Path) -> None:
    write_random_llama(tmp_path / "source.gguf", SPEC)
    for name in ("a", "b"):
        pad_ffn(tmp_path / "source.gguf", tmp_path / name, GOAL)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    for part in ("gate", "up"):
        added = values(tmp_path / "a", f"blk.1.ffn_{part}.weight")[128:]
        assert 0.019 < added.std() < 0.021
        assert abs(added.mean()) < 1e-3
    first, second = (values(tmp_path / "a", f"blk.{layer}.ffn_up.weight")[128:] for layer in (0, 1))
    assert not np.array_equal(first, second)
    down = values(tmp_path / "a", "blk.1.ffn_down.weight")
    assert not down[:, 128:].any()
    np.testing.assert_array_equal(
        down[:, :128], values(tmp_path / "source.gguf", "blk.1.ffn_down.weight")
    )


def test_a_q8_0_source_becomes_f16(tmp_path, logits) -> None:
    write_random_llama(tmp_path / "plain", SPEC)
    quantize_model(tmp_path / "plain", tmp_path / "q8", "Q8_0", n_threads=1)
    pad_ffn(tmp_path / "q8", tmp_path / "m", GOAL)
    header = read_header(tmp_path / "m")
    assert set(header.tensor_type_counts) == {"F16", "F32"}
    assert header.file_type_name == "F16"
    # Only the products' rounding differs: llama.cpp rounds activations to 8 bits for one, to 16 for
    # the other.
    difference = np.abs(logits(tmp_path / "m", TOKENS) - logits(tmp_path / "q8", TOKENS)).max()
    assert difference < 0.15


def test_a_padded_file_can_be_padded_again(tmp_path, logits) -> None:
    write_random_llama(tmp_path / "plain.gguf", SPEC)
    first = pad_ffn(tmp_path / "plain.gguf", tmp_path / "once.gguf", GOAL)
    second = pad_ffn(first.output, tmp_path / "twice.gguf", 2 * GOAL)
    metadata = read_header(second.output).metadata
    assert metadata[PADDED_PARAMETERS] == first.added_parameters + second.added_parameters
    assert metadata[PADDED_FROM] == "plain.gguf"
    assert (
        np.abs(logits(second.output, TOKENS) - logits(tmp_path / "plain.gguf", TOKENS)).max() < 1e-5
    )


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        (1000, "pad to more than that, not to 1,000"),
        (-5, "not to -5"),
        (10**14, "not to 100,000,000,000,000"),
    ],
)
def test_impossible_sizes_are_refused(tmp_path: Path, parameters: int, words: str) -> None:
    write_random_llama(tmp_path / "source.gguf", SPEC)
    assert read_header(tmp_path / "source.gguf").n_parameters == 82_240
    with pytest.raises(OptionError, match=words):
        pad_ffn(tmp_path / "source.gguf", tmp_path / "m.gguf", parameters)
    assert not (tmp_path / "m.gguf").exists()


def test_less_than_one_step_is_refused(tmp_path: Path) -> None:
    write_random_llama(tmp_path / "source.gguf", RandomLlama(width=64, ffn=256))
    now = read_header(tmp_path / "source.gguf").n_parameters
    step = 256 * 3 * 64 * 2
    with pytest.raises(
        OptionError, match=f"can be padded to {now + step:,} or more, not to {now + 9:,}"
    ):
        pad_ffn(tmp_path / "source.gguf", tmp_path / "m.gguf", now + 9)
    assert (
        pad_ffn(tmp_path / "source.gguf", tmp_path / "m.gguf", now + step).n_parameters
        == now + step
    )


def changed_model(path: Path, architecture: str = "llama", **shapes: tuple[int, ...]) -> Path:
    """A file with one layer of the named tensors, all zero."""
    metadata = Metadata()
    for key, value in (("embedding_length", 8), ("block_count", 1), ("feed_forward_length", 16)):
        metadata.count(f"{architecture}.{key}", value)
    tensors = [
        PlannedTensor(
            f"blk.0.{name}.weight", shape, "F32", lambda shape=shape: np.zeros(shape, np.float32)
        )
        for name, shape in shapes.items()
    ]
    write_gguf(path, architecture, metadata, tensors)
    assert prod(tensors[0].shape) < 10_000
    return path


@pytest.mark.parametrize(
    ("architecture", "shapes", "words"),
    [
        ("mamba", {"ffn_up": (16, 8)}, "is a mamba: only llama, qwen2"),
        ("llama", {"ffn_up_exps": (2, 16, 8)}, "blk.0.ffn_up_exps.weight: only plain"),
        ("llama", {"ffn_up": (16, 8), "ffn_gate": (16, 8)}, "2 feed-forward matrices instead of 3"),
        ("llama", {"ffn_down": (16, 8)}, r"ffn_down.weight of the unexpected shape \(16, 8\)"),
    ],
)
def test_other_models_are_refused(tmp_path: Path, architecture, shapes, words) -> None:
    source = changed_model(tmp_path / "source.gguf", architecture, **shapes)
    with pytest.raises(UnsupportedModelError, match=words):
        pad_ffn(source, tmp_path / "m.gguf", GOAL)
    assert [path.name for path in tmp_path.iterdir()] == ["source.gguf"]


def test_other_quantized_types_are_refused(tmp_path: Path) -> None:
    write_random_llama(tmp_path / "plain", SPEC)
    quantize_model(tmp_path / "plain", tmp_path / "q4", "Q4_0", n_threads=1)
    with pytest.raises(UnsupportedModelError, match="as Q4_0: only F32, F16, BF16 and Q8_0"):
        pad_ffn(tmp_path / "q4", tmp_path / "m", GOAL)


def test_an_existing_file_is_kept(tmp_path: Path) -> None:
    write_random_llama(tmp_path / "source", SPEC)
    (tmp_path / "m").write_bytes(b"precious")
    with pytest.raises(OptionError, match=r"already exists.*--force"):
        pad_ffn(tmp_path / "source", tmp_path / "m", GOAL)
    assert (tmp_path / "m").read_bytes() == b"precious"
    assert (
        pad_ffn(tmp_path / "source", tmp_path / "m", GOAL, force=True).n_bytes
        == (tmp_path / "m").stat().st_size
    )


def test_an_interrupted_padding_leaves_nothing(tmp_path: Path) -> None:
    write_random_llama(tmp_path / "source", SPEC)

    def interrupt(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pad_ffn(tmp_path / "source", tmp_path / "m", GOAL, progress=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
