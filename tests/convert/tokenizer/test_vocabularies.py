"""Vocabularies: recognised ones, ones that are refused by name, and the kinds of tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.tiny_checkpoints import llama_config, llama_tensors
from support.tiny_tokenizers import byte_level, llama_style, sentencepiece_bytes

from specrun.bindings.errors import MalformedFileError, OptionError, UnsupportedModelError
from specrun.bindings.models import Model
from specrun.convert import convert_checkpoint
from specrun.convert.tokenizer import (
    BYTE,
    NAME_BY_HASH,
    NAMES,
    ScoredVocabulary,
    parse_sentencepiece,
    pre_tokenizer,
)

SIZE = 608


@pytest.fixture
def write_tokenizer(tmp_path: Path, write_checkpoint: Any) -> Any:
    """A checkpoint with room for the tiny tokenizers, whose files are left out or given."""

    def write(**files: Any) -> Path:
        config = llama_config(vocab_size=SIZE, eos_token_id=2, **files.pop("config", {}))
        gone = {"tokenizer.json": None, "tokenizer_config.json": None}
        folder: Path = write_checkpoint(config, llama_tensors(config), **{**gone, **files})
        return folder

    return write


def test_every_known_hash_leads_to_a_name_llama_cpp_has() -> None:
    assert set(NAME_BY_HASH.values()) <= NAMES
    assert all(len(found) == 64 and int(found, 16) >= 0 for found in NAME_BY_HASH)
    usual = {
        "llama-bpe",
        "qwen2",
        "smollm",
        "tekken",
        "gpt-2",
        "gpt-4o",
        "deepseek-llm",
        "deepseek-r1-qwen",
    }
    assert usual <= set(NAME_BY_HASH.values())


def test_an_unknown_pre_tokenizer_is_refused_with_its_hash_and_a_suggestion(
    tmp_path, write_tokenizer
) -> None:
    folder = write_tokenizer()
    byte_level("llama-bpe").save_pretrained(folder)
    found = pre_tokenizer.probe_hash(folder / "tokenizer.json")
    with pytest.raises(UnsupportedModelError, match=f"{found}.*--pre llama-bpe"):
        convert_checkpoint(folder, tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()


def test_a_known_hash_is_recognised(tmp_path, write_tokenizer, monkeypatch) -> None:
    folder = write_tokenizer()
    byte_level("llama-bpe").save_pretrained(folder)
    found = pre_tokenizer.probe_hash(folder / "tokenizer.json")
    monkeypatch.setitem(NAME_BY_HASH, found, "llama-bpe")
    convert_checkpoint(folder, tmp_path / "m.gguf")
    with Model(tmp_path / "m.gguf") as model:
        assert (
            model.vocabulary.tokenize("12345")[1:] == byte_level("llama-bpe")("12345").input_ids[1:]
        )


def test_the_probe_is_split_differently_by_each_kind() -> None:
    from tokenizers import Tokenizer

    kinds = ("gpt-2", "smollm", "llama-bpe", "qwen2", "tekken", "gpt-4o")
    pieces = {
        str(
            Tokenizer.from_str(
                byte_level(kind).backend_tokenizer.to_str()
            ).pre_tokenizer.pre_tokenize_str(probe)
        )
        for kind in kinds
        for probe in [pre_tokenizer.PROBE]
    }
    assert len(pieces) == len(kinds)


@pytest.mark.parametrize(
    ("pre", "words"),
    [("llama3-bpe", "did you mean llama-bpe|did you mean llama3"), ("", "no pre-tokenizer ''")],
)
def test_a_pre_tokenizer_llama_cpp_lacks_is_refused(
    tmp_path, write_tokenizer, pre: str, words: str
) -> None:
    folder = write_tokenizer()
    byte_level("qwen2").save_pretrained(folder)
    with pytest.raises(OptionError, match=words):
        convert_checkpoint(folder, tmp_path / "m.gguf", pre=pre)


def test_a_pre_tokenizer_for_sentencepiece_makes_no_sense(tmp_path, write_tokenizer) -> None:
    folder = write_tokenizer(**{"tokenizer.model": sentencepiece_bytes()})
    with pytest.raises(
        OptionError, match=r"tokenizer.model is no byte-level tokenizer: leave .* \(qwen2\) out"
    ):
        convert_checkpoint(folder, tmp_path / "m.gguf", pre="qwen2")


def test_the_model_file_alone_is_enough(tmp_path, write_tokenizer) -> None:
    folder = write_tokenizer(**{"tokenizer.model": sentencepiece_bytes()})
    convert_checkpoint(folder, tmp_path / "m.gguf")
    import sentencepiece

    reference = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_bytes())
    with Model(tmp_path / "m.gguf") as model:
        vocabulary = model.vocabulary
        assert (vocabulary.kind, vocabulary.bos, vocabulary.eos, vocabulary.adds_bos) == (
            "SPM",
            1,
            2,
            True,
        )
        for text in ("Hello there", " two  spaces", "Grüße 東京\n\tx"):
            assert vocabulary.tokenize(text) == [1, *reference.encode(text)]
        for text in ("Hello " * 50, " " * 100, "\u2581" * 100, "東京" * 30, "<s>" * 20):
            n_tokens = len(vocabulary.tokenize(text, parse_special=True))
            assert 0 < vocabulary.fewest_tokens(text) <= n_tokens


def test_the_scores_of_the_model_and_of_the_merges_split_alike(tmp_path, write_tokenizer) -> None:
    folder = write_tokenizer()
    llama_style(folder).save_pretrained(folder)
    convert_checkpoint(folder, tmp_path / "scores.gguf")
    (folder / "tokenizer.model").unlink()
    convert_checkpoint(folder, tmp_path / "merges.gguf")
    text = " ".join(Path(__file__).read_text(encoding="utf-8").split())
    with Model(tmp_path / "scores.gguf") as scores, Model(tmp_path / "merges.gguf") as merges:
        assert scores.vocabulary.tokenize(text) == merges.vocabulary.tokenize(text)


MODEL = sentencepiece_bytes


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        (lambda: b"", MalformedFileError, "it has no pieces"),
        (lambda: b"not a model at all", MalformedFileError, "is not a SentencePiece model"),
        (lambda: MODEL()[:-20_000:], MalformedFileError, "is not a SentencePiece model"),
        (lambda: MODEL()[:3000], MalformedFileError, "is not a SentencePiece model"),
        (lambda: MODEL(model_type="unigram"), UnsupportedModelError, "is a unigram model"),
        (lambda: MODEL(byte_fallback=False), UnsupportedModelError, "no byte token <0x00>"),
        (
            lambda: MODEL(normalization_rule_name="nmt_nfkc"),
            UnsupportedModelError,
            "rewrites characters",
        ),
    ],
    ids=["empty", "nonsense", "shorter", "truncated", "unigram", "no bytes", "nfkc"],
)
def test_models_that_cannot_be_used_are_named(
    tmp_path, write_tokenizer, data, error, words
) -> None:
    folder = write_tokenizer(**{"tokenizer.model": data()})
    with pytest.raises(error, match=words):
        convert_checkpoint(folder, tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()


def test_no_prefix_of_a_model_is_taken_for_one_in_silence() -> None:
    data = MODEL()
    whole = parse_sentencepiece(data, "whole")
    for end in range(1, 400):
        try:
            cut = parse_sentencepiece(data[:end], "cut")
        except MalformedFileError:
            continue
        assert cut.pieces == whole.pieces[: len(cut.pieces)]  # cut between two pieces


def test_tokens_without_their_bytes_are_no_vocabulary() -> None:
    with pytest.raises(OptionError, match="no byte token <0x00>"):
        ScoredVocabulary(("a",), (1,), (0.0,))
    with pytest.raises(OptionError, match="256 tokens has 1 scores"):
        ScoredVocabulary(tuple(f"<0x{byte:02X}>" for byte in range(256)), (BYTE,) * 256, (0.0,))


def test_kinds_of_added_tokens(tmp_path, write_tokenizer) -> None:
    added = {
        "603": ("<|looks special|>", False),
        "604": ("<plain>", False),
        "605": ("<hidden>", True),
        "900": ("x", True),
    }
    decoder = {key: {"content": text, "special": special} for key, (text, special) in added.items()}
    settings = {"added_tokens_decoder": decoder, "eos_token": "<hidden>"}
    more = {
        "generation_config.json": {"eos_token_id": [605, 2, 604, 603]},
        "added_tokens.json": {"<late>": 606},
    }
    folder = write_tokenizer(
        **{"tokenizer.model": sentencepiece_bytes(), "tokenizer_config.json": settings, **more}
    )
    convert_checkpoint(folder, tmp_path / "m.gguf")
    with Model(tmp_path / "m.gguf") as model:
        vocabulary = model.vocabulary
        assert vocabulary.eos == 605
        assert vocabulary.end_of_generation == {605, 2, 604, 603}  # </s> is known by its text
        assert vocabulary.tokenize("<plain>", add_special=False) == [604]
        assert vocabulary.tokenize("<late>", add_special=False) == [606]
        for hidden in ("<hidden>", "<|looks special|>"):
            assert len(vocabulary.tokenize(hidden, add_special=False)) > 1
            assert len(vocabulary.tokenize(hidden, add_special=False, parse_special=True)) == 1
        assert vocabulary.text(607) == "[PAD607]"


@pytest.mark.parametrize("text", ["a", "-1", "1" * 12, "1.5"])
def test_ids_that_are_none_are_refused(tmp_path, write_tokenizer, text: str) -> None:
    settings = {"added_tokens_decoder": {text: {"content": "x"}}}
    folder = write_tokenizer(
        **{"tokenizer.model": sentencepiece_bytes(), "tokenizer_config.json": settings}
    )
    with pytest.raises(MalformedFileError, match="which is not a token id"):
        convert_checkpoint(folder, tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"normalizer": {"type": "NFKC"}}, "normalizer.*NFKC"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "pre_tokenizer.*Whitespace"),
    ],
)
def test_text_that_llama_cpp_would_not_rewrite(tmp_path, write_tokenizer, changes, words) -> None:
    folder = write_tokenizer()
    llama_style(folder).save_pretrained(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**tokenizer, **changes}))
    with pytest.raises(UnsupportedModelError, match=words):
        convert_checkpoint(folder, tmp_path / "m.gguf")


@pytest.mark.parametrize(("rstrip", "name"), [(True, "checkpoint (phi-3)"), (False, "checkpoint")])
def test_phi3s_tokens_swallow_spaces_where_its_tokenizer_says_so(
    tmp_path, write_tokenizer, rstrip, name
) -> None:
    folder = write_tokenizer()
    llama_style(folder).save_pretrained(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        token["rstrip"] = rstrip and token["content"] not in ("<s>", "<unk>")
        if token["content"] == "<|user|>":
            token["content"] = "<|endoftext|>"
            token["rstrip"] = False
    text = json.dumps(tokenizer).replace('"<|user|>"', '"<|endoftext|>"')
    (folder / "tokenizer.json").write_text(text)
    convert_checkpoint(folder, tmp_path / "m.gguf")
    with Model(tmp_path / "m.gguf") as model:
        tokens = model.vocabulary.tokenize("<|end|>\n\na", add_special=False, parse_special=True)
        newline = model.vocabulary.tokenize("\n", add_special=False)[-1]
        assert (newline in tokens) is not rstrip
    from gguf import GGUFReader

    assert GGUFReader(tmp_path / "m.gguf").fields["general.name"].contents() == name
