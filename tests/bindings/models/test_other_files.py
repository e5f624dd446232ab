"""Files beside models are named as what they are; models in parts; vocabularies with gaps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from specrun.bindings.errors import MalformedFileError, ModelLoadError, UnsupportedModelError
from specrun.bindings.models import Model
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.convert.tokenizer import CONTROL, NORMAL, ScoredVocabulary
from specrun.convert.tokenizer.vocabulary import UNKNOWN


def written(path: Path, architecture: str = "llama", **keys: Any) -> Path:
    writer = GGUFWriter(path, architecture)
    for key, value in keys.items():
        name = key.replace("__", ".")
        writer.add_string(name, value) if isinstance(value, str) else writer.add_uint16(name, value)
    writer.add_tensor("a.weight", np.zeros((32, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


PART = {"split__no": 0, "split__count": 3}
FILES: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "adapter": ("a.gguf", "llama", {"general__type": "adapter"}, "LoRA adapter: give it as --lora"),
    "projector": ("mmproj.gguf", "clip", {"general__type": "mmproj"}, r"sees \(mmproj\): give the"),
    "old projector": ("mmproj.gguf", "clip", {}, r"sees \(mmproj\)"),
    "later part": (
        "m-00002-of-00003.gguf",
        "llama",
        {**PART, "split__no": 1},
        "is part 2 of 3 of a model: give the first one, m-00001-of-00003.gguf",
    ),
    "renamed later part": ("m.gguf", "llama", {**PART, "split__no": 2}, "part 3 of 3.*NAME-00001"),
    "renamed first part": ("m.gguf", "llama", PART, "the first of 3 parts.*NAME-00001-of-00003"),
    "missing parts": (
        "m-00001-of-00003.gguf",
        "llama",
        PART,
        "m-00002-of-00003.gguf, m-00003-of-00003.gguf is not beside it: download all parts",
    ),
}


@pytest.mark.parametrize(("name", "architecture", "keys", "problem"), FILES.values(), ids=FILES)
def test_what_is_no_model_is_named(
    tmp_path: Path, name: str, architecture: str, keys: dict[str, Any], problem: str
) -> None:
    path = written(tmp_path / name, architecture, **keys)
    with pytest.raises((UnsupportedModelError, ModelLoadError), match=problem):
        Model(path)


def test_an_importance_matrix_is_named(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "i.gguf", "")
    writer.kv_data[0].pop("general.architecture", None)
    writer.add_string("general.type", "imatrix")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(MalformedFileError, match=r"is an importance matrix.*; give a model"):
        Model(tmp_path / "i.gguf")


def test_joined_and_truncated_parts_are_named(tiny_model: Path, tmp_path: Path) -> None:
    whole = tiny_model.read_bytes()
    joined = tmp_path / "joined.gguf"
    joined.write_bytes(whole + written(tmp_path / "b.gguf").read_bytes())
    with pytest.raises(
        MalformedFileError, match=r"joined with cat; join the parts with llama.cpp's"
    ):
        Model(joined)
    first = written(tmp_path / "m-00001-of-00002.gguf", **{**PART, "split__count": 2})
    second = written(tmp_path / "m-00002-of-00002.gguf", split__no=1, split__count=2)
    second.write_bytes(second.read_bytes()[:-1000])
    with pytest.raises(MalformedFileError, match=r"m-00002-of-00002.gguf is truncated"):
        Model(first)


class GappedVocabulary(ScoredVocabulary):
    """SentencePiece without byte tokens, as models of before 2023 have it."""

    def __post_init__(self) -> None:
        """Accept the gaps."""


@pytest.fixture
def gapped(tmp_path: Path) -> Path:
    letters = [*"abcdefghijklmnopqrstuvwxyz.,", "\u2581", "th", "the", "\u2581the", "é"]
    tokens = ("<unk>", "<s>", "</s>", *letters)
    vocabulary = GappedVocabulary(
        tokens=tokens,
        types=(UNKNOWN, CONTROL, CONTROL, *[NORMAL] * len(letters)),
        scores=tuple(-float(place) for place in range(len(tokens))),
        special_ids={"unknown": 0, "bos": 1, "eos": 2},
    )
    path = tmp_path / "gapped.gguf"
    sizes: dict[str, Any] = {"width": 8, "heads": 1, "kv_heads": 1, "layers": 1, "ffn": 8}
    write_random_llama(path, RandomLlama(**sizes, vocabulary=vocabulary))
    return path


def test_a_vocabulary_without_byte_tokens_reads_any_text(gapped: Path) -> None:
    with Model(gapped) as model:
        vocabulary = model.vocabulary

        def names(text: str, **options: bool) -> list[str]:
            return [vocabulary.text(token) for token in vocabulary.tokenize(text, **options)]

        assert names("the bé") == ["<s>", "\u2581the", "\u2581", "b", "é"]
        assert names("the", add_special=False) == ["\u2581the"]
        assert names("a日\nb", add_special=False) == [
            *("\u2581", "a", "<unk>", "<unk>", "\u2581", "b")
        ]
        assert names("日本") == ["<s>", "<unk>", "<unk>"]
        assert names("</s>", add_special=False).count("</s>") == 0
        assert names("日</s>", add_special=False, parse_special=True) == ["<unk>", "</s>"]
        assert vocabulary.tokenize("") == [1]
