"""`specrun inspect`: the header's facts, the pair check, the checksum, and hostile files."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import pytest
from support.moved_tokens import with_moved_tokens
from support.tiny_heads import random_medusa
from support.tiny_nextn import TinyNextN

from specrun.bindings.gguf import read_header
from specrun.cli.inspect.summary import describe_summary, summarise
from specrun.convert.quantize import quantize_model
from specrun.convert.random_model import RandomLlama, write_random_llama

from .conftest import VOCAB_SIZE, Models, Run


def test_the_facts_of_a_header(run: Run, models: Models) -> None:
    facts = json.loads(run("inspect", models.target, "--json").stdout)
    expected = {
        "file": str(models.target),
        "file_bytes": models.target.stat().st_size,
        "architecture": "llama",
        "name": "random llama 0",
        "file_type": "F32",
        "bits_per_weight": 32.0,
        "context_length": 512,
        "layers": 4,
        "embedding_width": 32,
        "feed_forward_width": 16,
        "heads": 4,
        "key_value_heads": 2,
        "key_value_bytes_per_token": 4 * 32 / 2 * 2 * 2,  # half of 4 layers' width, twice, in F16
        "chat_template": True,
    }
    assert {name: facts[name] for name in expected} == expected
    assert facts["vocabulary"]["size"] == VOCAB_SIZE
    assert facts["vocabulary"]["kind"] == "BPE"
    assert facts["vocabulary"]["special_tokens"]["eos"] == {"id": VOCAB_SIZE - 4, "text": "<|end|>"}
    assert facts["tensor_types"]["F32"] == {
        "tensors": facts["tensors"],
        "parameters": facts["parameters"],
        "bytes": 4 * facts["parameters"],
    }
    assert json.loads(run("inspect", models.plain, "--json").stdout)["chat_template"] is False


def test_quantized_models(run: Run, tmp_path: Path) -> None:
    plain, small = tmp_path / "plain.gguf", tmp_path / "small.gguf"
    write_random_llama(plain, RandomLlama(vocab_size=320, width=64))
    quantize_model(plain, small, "Q8_0", n_threads=1, pure=True)
    facts = json.loads(run("inspect", small, "--json").stdout)
    assert facts["file_type"] == "Q8_0"
    assert 8.5 < facts["bits_per_weight"] < 9
    assert list(facts["tensor_types"]) == ["Q8_0", "F32"]


def test_plain_text_in_a_pipe(run: Run, models: Models) -> None:
    lines = run("inspect", models.target).stdout.splitlines()
    assert lines[0] == "model:"
    assert "  context length      512" in lines
    assert "  chat template       yes" in lines
    assert any(line.split() == ["type", "tensors", "parameters", "size"] for line in lines)


def test_nextn_blocks_are_mentioned_and_a_file_of_them_is_checked(
    run: Run, tmp_path: Path, models: Models
) -> None:
    whole = TinyNextN().write(tmp_path / "whole.gguf")
    apart = TinyNextN().write_blocks_only(tmp_path / "mtp.gguf")
    assert json.loads(run("inspect", whole, "--json").stdout)["nextn_blocks"] == 1
    assert json.loads(run("inspect", models.target, "--json").stdout)["nextn_blocks"] == 0
    lines = run("inspect", whole).stdout.splitlines()
    assert "  NextN blocks        1; --drafter mtp drafts with them" in lines
    assert (
        "  NextN blocks        1; without a model: mtp(FILE) drafts with them"
        in run("inspect", apart).stdout
    )
    assert "The pair fits" in run("inspect", whole, "-md", apart).stdout
    other = run("inspect", models.target, "-md", apart)
    assert other.exit_code == 4
    assert "it is made for hy_v3" in other.stderr


def test_no_weights_are_loaded(run: Run, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object, **_options: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("specrun.bindings.models.model.Model.__init__", refuse)
    assert run("inspect", models.target, "--sha256").exit_code == 0


def test_a_pair_that_fits(run: Run, models: Models) -> None:
    result = run("inspect", models.target, "-md", models.plain)
    assert result.exit_code == 0
    assert "The pair fits" in result.stdout
    assert result.stderr == ""
    swapped = run("inspect", models.plain, "-md", models.larger)
    assert "were they swapped?" in swapped.stderr


def test_heads_are_checked_as_heads(run: Run, models: Models, tmp_path: Path) -> None:
    medusa = random_medusa(32, 320).write(tmp_path / "medusa.gguf", 320)
    assert "The pair fits" in run("inspect", models.target, "-md", medusa).stdout
    other = run(
        "inspect", models.target, "-md", random_medusa(64, 320).write(tmp_path / "wide.gguf", 320)
    )
    assert other.exit_code == 4
    assert "hidden states of 64 numbers, and the target's have 32" in other.stderr


def test_a_pair_that_does_not_fit(run: Run, models: Models, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.gguf"
    with_moved_tokens(models.plain, foreign, lost=range(320))
    result = run("inspect", models.target, "-md", foreign)
    assert result.exit_code == 4
    assert "no token in common" in result.stderr
    assert "draft model:" in result.stdout
    assert "The pair fits" not in result.stdout
    values = json.loads(run("inspect", models.target, "-md", foreign, "--json").stdout)
    assert values["pair"]["fits"] is False
    assert "no token in common" in values["pair"]["reason"]
    plain = json.loads(run("inspect", models.target, "-md", models.plain, "--json").stdout)
    assert (plain["pair"]["fits"], plain["pair"]["remark"]) == (True, "")


def test_another_vocabulary_is_said_and_how_drafts_are_passed_on(run: Run, models: Models) -> None:
    told = run("inspect", models.target, "-md", models.stranger).stdout
    assert "The pair fits" in told
    assert "has another vocabulary: it drafts by the" in told
    answer = run(
        "generate", "-m", models.target, "-md", models.stranger, "-p", "abc", "--max-tokens", "4"
    )
    assert answer.exit_code == 0
    assert "has another vocabulary" in answer.stderr


def test_checksums(run: Run, models: Models) -> None:
    right = hashlib.sha256(models.target.read_bytes()).hexdigest()
    for arguments in (
        [models.target, "--sha256"],
        ["--sha256", models.target],
        [models.target, "--sha256", right],
    ):
        result = run("inspect", *arguments)
        assert result.exit_code == 0, result.stderr
        assert right in result.stdout
    assert run("inspect", models.target, f"--sha256={right.upper()}").exit_code == 0
    other = right.translate(str.maketrans("0123456789abcdef", "123456789abcdef0"))
    wrong = run("inspect", models.target, "--sha256", other)
    assert wrong.exit_code == 3
    assert right in wrong.stderr
    assert right not in run("inspect", models.target).stdout


def test_metadata_cannot_control_the_terminal(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "hostile.gguf"
    write_random_llama(path, RandomLlama(chat_template="x"))
    data = path.read_bytes()
    path.write_bytes(data.replace(b"random llama 0", b"\x1b[31m[red]\n\xc2\x9bx"))
    result = run("inspect", path, "--color", "on")
    assert result.exit_code == 0
    assert "  name                [31m[red] x\n" in result.stdout
    assert "\x1b" not in result.stdout


def test_mixtures_of_experts_say_what_several_tokens_read(models: Models) -> None:
    """Of 8 experts a token uses 2: two tokens read 8 (1 - 0.75^2) = 3.5 of them."""
    header = read_header(models.target)
    mixed = {**header.metadata, "llama.expert_count": 8, "llama.expert_used_count": 2}
    facts = summarise(models.target, dataclasses.replace(header, metadata=mixed))
    assert facts["experts"]["read_by_tokens"] == {"2": 3.5, "4": 5.47, "8": 7.2}
    text = describe_summary(facts)["experts"]
    assert text.startswith("2 of 8 for a token; 2, 4 and 8 tokens read about 3.5, 5.5, 7.2")
    dense = summarise(models.target, header)
    assert dense["experts"] is None
    assert "experts" not in describe_summary(dense)
