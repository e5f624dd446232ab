"""Random models load, read and write text, and have the entropy of their settings."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from specrun.bindings.errors import OptionError
from specrun.bindings.gguf import read_header
from specrun.bindings.models import Model
from specrun.convert import RandomLlama, write_random_llama
from specrun.convert.tokenizer import CONTROL, NORMAL, BytePairVocabulary


def entropies(rows: np.ndarray) -> np.ndarray:
    shifted = rows.astype(np.float64) - rows.max(axis=-1, keepdims=True)
    laws = np.exp(shifted) / np.exp(shifted).sum(axis=-1, keepdims=True)
    return -(laws * np.log(np.maximum(laws, 1e-300))).sum(axis=-1)


@pytest.mark.parametrize("size", [2, 12, 256, 257, 1000])
def test_a_vocabulary_of_any_size_reads_and_writes(tmp_path: Path, size: int) -> None:
    write_random_llama(tmp_path / "m.gguf", RandomLlama(vocab_size=size, layers=1))
    with Model(tmp_path / "m.gguf") as model:
        vocabulary = model.vocabulary
        assert vocabulary.size == size
        assert vocabulary.eos == size - 1
        assert vocabulary.end_of_generation == {size - 1}
        assert vocabulary.tokenize("<|end|>", parse_special=True) == [size - 1]
        assert size - 1 not in vocabulary.tokenize("<|end|>")
        text = "Grüße an 東京, a b\tc\x00\n"
        if size > 256:
            assert vocabulary.detokenize(vocabulary.tokenize(text)) == text
            assert vocabulary.piece(10) == b"\n"
            assert all(vocabulary.piece(token) for token in range(size - 1))
        else:
            assert vocabulary.detokenize(vocabulary.tokenize("  ")) == "  "
        if size > 256 + 26:  # then tokens of more than one letter are there, and their merges work
            assert len(vocabulary.tokenize("ab")) == 1


def test_tokens_of_a_large_vocabulary_are_reached(tmp_path: Path) -> None:
    started = time.perf_counter()
    write_random_llama(
        tmp_path / "m.gguf", RandomLlama(vocab_size=32_000, layers=1, file_type="F16")
    )
    assert time.perf_counter() - started < 10
    with Model(tmp_path / "m.gguf") as model:
        tokens = model.vocabulary.tokenize(" the quick brown fox")
        assert max(tokens) > 1000
        assert len(tokens) < 12
        assert model.vocabulary.detokenize(tokens) == " the quick brown fox"


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("scale", "low", "high"), [(0.0, 5.545, 5.546), (1.0, 4.7, 5.4), (6.0, 0.0, 2.5)]
)
def test_scale_sets_how_peaked_the_laws_are(tmp_path, logits, tied, scale, low, high) -> None:
    # Half of the spread squared is the loss of a normal law of logits from ln 256 = 5.545.
    write_random_llama(tmp_path / "m.gguf", RandomLlama(vocab_size=256, scale=scale, tied=tied))
    found = entropies(logits(tmp_path / "m.gguf", range(40))).mean()
    assert low <= found <= high


def test_same_spec_same_bytes_and_the_seed_matters(tmp_path: Path, logits) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_random_llama(tmp_path / name, RandomLlama(seed=seed))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert np.abs(logits(tmp_path / "a", [1, 2]) - logits(tmp_path / "c", [1, 2])).max() > 0.1


def test_scales_share_their_most_likely_tokens_and_context_matters(tmp_path: Path, logits) -> None:
    for name, scale in (("flat", 0.5), ("peaked", 4.0)):
        write_random_llama(tmp_path / name, RandomLlama(scale=scale))
    tokens = [5, 9, 1, 33, 7]
    flat, peaked = logits(tmp_path / "flat", tokens), logits(tmp_path / "peaked", tokens)
    np.testing.assert_array_equal(flat.argmax(axis=-1), peaked.argmax(axis=-1))
    other = logits(tmp_path / "peaked", [6, *tokens[1:]])
    assert np.abs(other[-1] - peaked[-1]).max() > 0.05


@pytest.mark.parametrize("file_type", ["F32", "F16"])
def test_the_header_says_what_was_asked(tmp_path: Path, file_type: str) -> None:
    spec = RandomLlama(
        width=48,
        layers=3,
        heads=6,
        kv_heads=3,
        ffn=80,
        file_type=file_type,
        chat_template="{{ 1 }}",
    )
    write_random_llama(tmp_path / "m.gguf", spec)
    header = read_header(tmp_path / "m.gguf")
    assert header.file_type_name == file_type
    assert header.n_parameters == 2 * 64 * 48 + 48 + 3 * (
        2 * 48 * 48 + 2 * 24 * 48 + 3 * 80 * 48 + 2 * 48
    )
    with Model(tmp_path / "m.gguf") as model:
        assert (model.n_embd, model.n_layer, model.n_ctx_train) == (48, 3, 512)
        assert model.chat_template == "{{ 1 }}"


def test_a_vocabulary_of_ones_own(tmp_path: Path) -> None:
    tokens = ("a", "b", "c", "ab", "<|stop|>")
    own = BytePairVocabulary(tokens, (NORMAL,) * 4 + (CONTROL,), ("a b",), {"eos": 4})
    write_random_llama(tmp_path / "m.gguf", RandomLlama(vocabulary=own))
    with Model(tmp_path / "m.gguf") as model:
        assert model.vocabulary.tokenize("abcab") == [3, 2, 3]
        assert model.vocabulary.eos == 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 1}, "1 tokens has no room beside 1 control"),
        ({"vocab_size": 10**6}, "at most"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"width": 30}, "30 is not 4 heads of an even width"),
        ({"width": 36}, "36 is not 4 heads of an even width"),
        ({"kv_heads": 3}, "4 heads cannot share 3"),
        ({"scale": -1.0}, "scale is -1.0"),
        ({"scale": float("nan")}, "scale is nan"),
        ({"seed": -1}, "seed is -1"),
        ({"file_type": "Q4_0"}, "file_type is 'Q4_0'"),
        ({"file_type": "Q8_0", "width": 48, "heads": 6}, "blocks of 32 numbers"),
        ({"architecture": "qwen3"}, "architecture is 'qwen3'"),
        ({"eos": "</s>"}, "'</s>' is not among"),
        ({"controls": ("<|end|>", "<|end|>")}, "there twice"),
    ],
)
def test_impossible_specs_are_refused(tmp_path: Path, changes, words) -> None:
    with pytest.raises(OptionError, match=words):
        write_random_llama(tmp_path / "m.gguf", RandomLlama(**changes))
    assert not list(tmp_path.iterdir())


def test_inconsistent_vocabularies_are_refused() -> None:
    with pytest.raises(OptionError, match="2 tokens has 1 token types"):
        BytePairVocabulary(("a", "b"), (NORMAL,), ())
    with pytest.raises(OptionError, match="the eos token 2 is outside"):
        BytePairVocabulary(("a", "b"), (NORMAL, NORMAL), (), {"eos": 2})


def test_an_existing_file_is_kept(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"precious")
    with pytest.raises(OptionError, match="already exists"):
        write_random_llama(tmp_path / "m.gguf", RandomLlama())
    assert (tmp_path / "m.gguf").read_bytes() == b"precious"
