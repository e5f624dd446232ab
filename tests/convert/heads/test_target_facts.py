"""A head's facts of its target are the same from the GGUF file and from the checkpoint it was
made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiny_checkpoints import llama_config
from support.tiny_models import CHAT

from specrun.bindings.errors import (
    FileMissingError,
    MalformedFileError,
    OptionError,
    UnsupportedModelError,
)
from specrun.bindings.models import Model
from specrun.convert import (
    RandomLlama,
    TargetFacts,
    convert_checkpoint,
    target_facts,
    write_random_llama,
)
from specrun.convert.gguf import Metadata

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def compared(facts: TargetFacts) -> dict[str, Any]:
    left_out = ("path", "name", "load_tokenizer", "load_rope_factors", "load_matrices")
    return {
        name: getattr(facts, name) for name in facts.__dataclass_fields__ if name not in left_out
    }


def entries(metadata: Metadata) -> list[Any]:
    return [
        (key, list(value) if element else value, kind, element)
        for key, value, kind, element in metadata
    ]


@pytest.mark.parametrize("scaling", [None, LLAMA3], ids=["plain", "llama3"])
def test_a_folder_says_what_its_file_says(
    tmp_path: Path, write_checkpoint, scaling: dict[str, Any] | None
) -> None:
    """The folder without its weights, as people have it."""
    folder = write_checkpoint(llama_config(rope_scaling=scaling))
    file = convert_checkpoint(folder, tmp_path / "m.gguf").output
    from_folder, from_file = target_facts(folder), target_facts(file)
    both = zip(from_folder.load_matrices(), from_file.load_matrices(), strict=True)
    for one, other in both:
        np.testing.assert_allclose(one.read(), other.read(), rtol=1e-3, atol=1e-6)
        part = one.read().reshape(-1)[37:99]
        np.testing.assert_allclose(other.raw(37, 62), part, rtol=1e-3, atol=1e-6)
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileMissingError, match=r"model\.safetensors"):
        from_folder.load_matrices()
    assert compared(from_folder) == compared(from_file)
    assert entries(from_folder.load_tokenizer()) == entries(from_file.load_tokenizer())
    ours, theirs = from_folder.load_rope_factors(), from_file.load_rope_factors()
    if scaling is None:
        assert ours is theirs is None
    else:
        assert ours is not None
        assert theirs is not None
        np.testing.assert_array_equal(ours, theirs)
    assert from_file.name == from_folder.name == "checkpoint"


def test_the_fingerprint_is_the_loaded_models(
    tiny_model: Path, tmp_path: Path, write_checkpoint
) -> None:
    for file in (tiny_model, convert_checkpoint(write_checkpoint(), tmp_path / "m.gguf").output):
        facts = target_facts(file)
        with Model(file) as model:
            assert facts.fingerprint == model.vocabulary.fingerprint
            assert (facts.vocab_size, facts.hidden_size) == (model.vocabulary.size, model.n_embd)
            assert (facts.n_layers, facts.architecture) == (model.n_layer, model.architecture)
    assert facts.settings["rope.freq_base"] == pytest.approx(5000.0)


def test_nothing_is_left_behind(
    tmp_path: Path, write_checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens are written to a file for llama.cpp to read, which is gone afterwards."""
    import tempfile

    folder = write_checkpoint()
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    target_facts(folder)
    assert not list(place.iterdir())


def test_a_change_of_one_token_changes_the_fingerprint(tmp_path: Path, tiny_model: Path) -> None:
    other = tmp_path / "other.gguf"
    write_random_llama(
        other, RandomLlama(**{**CHAT, "controls": ("<|USER|>", *CHAT["controls"][1:])})
    )
    assert target_facts(other).vocab_size == target_facts(tiny_model).vocab_size
    assert target_facts(other).fingerprint != target_facts(tiny_model).fingerprint


def test_targets_that_are_none(tmp_path: Path, tiny_model: Path, write_checkpoint) -> None:
    with pytest.raises(FileMissingError, match="no file"):
        target_facts(tmp_path / "none.gguf")
    with pytest.raises(FileMissingError, match=r"no config\.json"):
        target_facts(tmp_path)
    (tmp_path / "text.gguf").write_bytes(b"GGUF is another word")
    with pytest.raises(MalformedFileError):
        target_facts(tmp_path / "text.gguf")
    with pytest.raises(OptionError, match=r"leave the pre-tokenizer \(llama-bpe\) out"):
        target_facts(tiny_model, pre="llama-bpe")
    folder = write_checkpoint(llama_config(architectures=["Unheard"]))
    with pytest.raises(UnsupportedModelError, match="'Unheard'"):
        target_facts(folder)
    folder = write_checkpoint(**{"tokenizer.json": None})
    with pytest.raises(FileMissingError, match=r"tokenizer\.json"):
        target_facts(folder)
    (folder / "config.json").write_text(json.dumps(llama_config(hidden_size=33)))
    with pytest.raises(MalformedFileError, match="hidden_size 33"):
        target_facts(folder)
