"""`specrun convert` on folders of heads, as users run it."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from support.tiny_checkpoints import llama_config, llama_tensors, safetensors_bytes, tokenizer_files

from specrun.bindings.gguf import read_header
from specrun.cli.convert import KINDS, MODEL
from specrun.convert.heads.head_conversion import HEAD_KINDS

from ..conftest import Run

torch = pytest.importorskip("torch")
from support.torch_heads import TorchEagle, TorchMedusa, medusa_config, named, publish  # noqa: E402

HIDDEN, VOCAB = 32, 320
SAFE = "medusa_lm_head.safetensors"


@pytest.fixture
def heads(tmp_path: Path) -> Path:
    return publish(
        tmp_path / "medusa-tiny", medusa_config(), named(TorchMedusa(HIDDEN, VOCAB, 2)), SAFE
    )


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.parent.iterdir())


def test_every_kind_can_be_asked_for() -> None:
    assert {kind.name for kind in HEAD_KINDS} == {*KINDS} - {MODEL}


def test_heads_are_recognised(run: Run, heads: Path, tiny_model: Path) -> None:
    result = run("convert", heads, "--target", tiny_model, "-o", heads.parent)
    assert result.exit_code == 0, result.output
    assert left(heads) == [heads.name, f"{heads.name}-Q8_0.gguf"]
    for words in ("medusa", "4 Q8_0, 2 F32", "llama, hidden states of 32, 320 tokens"):
        assert words in result.stdout, result.stdout
    again = run("convert", heads, "--target", tiny_model, "-o", heads.parent)
    assert again.exit_code == 2
    assert "--force" in again.stderr


def test_json_and_a_target_that_is_a_checkpoint(run: Run, heads: Path, tmp_path: Path) -> None:
    folder = tmp_path / "target"
    folder.mkdir()
    files = {"config.json": llama_config(vocab_size=VOCAB), **tokenizer_files(VOCAB)}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    files = (heads, "--target-model-dir", folder, "-o", tmp_path / "h.gguf")
    result = run("convert --outtype F16 --json", *files)
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert (facts["architecture"], facts["type_name"], facts["tensor_types"]) == (
        "medusa",
        "F16",
        {"F16": 4, "F32": 2},
    )
    assert (
        facts["target"]["fingerprint"]
        == read_header(tmp_path / "h.gguf").metadata["specrun.target.vocabulary_sha256"]
    )


def test_a_dry_run_writes_nothing(run: Run, heads: Path, tiny_model: Path) -> None:
    result = run("convert", heads, "--target", tiny_model, "--dry-run")
    assert result.exit_code == 0, result.output
    assert "medusa.1.res.0.weight" in result.stdout
    assert "1.0.linear.weight (F32)" in result.stdout
    assert "would write medusa-tiny-" in result.stdout
    plan = json.loads(run("convert", heads, "--target", tiny_model, "--dry-run", "--json").stdout)
    assert plan["tensors"][0]["type"] == "Q8_0"
    assert plan["tensors"][0]["bytes"] == HIDDEN * HIDDEN // 32 * 34
    assert left(heads) == [heads.name]


def test_without_a_target_it_says_what_to_give(run: Run, heads: Path) -> None:
    for kind in ((), ("--kind", "medusa")):
        result = run("convert", heads, *kind)
        assert result.exit_code == 2
        assert "--target FILE.gguf or --target-model-dir DIR" in result.stderr
    assert left(heads) == [heads.name]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--target", "{target}", "--target-model-dir", "."), 2, "give one of them"),
        (("--kind", "model", "--target", "{target}"), 2, "leave it out"),
        (("--kind", "medusae", "--target", "{target}"), 2, "medusae"),
        (("--target", "{target}", "--verify"), 2, "--verify compares the logits of whole models"),
        (("--target", "{target}", "--kind", "eagle"), 3, "no tensor fc.weight"),
        (("--target", "{small}"), 4, "predicts 320 tokens, and the target has 64"),
    ],
)
def test_refusals_are_one_sentence(
    run: Run,
    heads: Path,
    tiny_model: Path,
    tiny_small_vocab: Path,
    arguments: tuple[str, ...],
    code: int,
    words: str,
) -> None:
    places = {"target": tiny_model, "small": tiny_small_vocab}
    result = run(
        "convert", heads, "-o", heads.parent, *(argument.format(**places) for argument in arguments)
    )
    assert result.exit_code == code, result.output
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert left(heads) == [heads.name]


def test_pickles_need_the_flag(run: Run, tmp_path: Path, tiny_model: Path) -> None:
    head, name = TorchEagle(HIDDEN, VOCAB), "pytorch_model.bin"
    folder = publish(tmp_path / "heads", head.config, named(head), name)
    arguments = ("convert", folder, "--target", tiny_model, "-o", tmp_path / "h.gguf")
    result = run(*arguments)
    assert result.exit_code == 3
    assert f"{name}, a pickle" in result.stderr
    result = run(*arguments, "--allow-pickle")
    assert result.exit_code == 0, result.output
    assert read_header(tmp_path / "h.gguf").architecture == "eagle"
    (folder / name).write_bytes(pickle.dumps(print))
    result = run(*arguments, "--allow-pickle", "--force")
    assert result.exit_code == 3
    assert result.stdout == ""


def test_the_model_beside_medusas_heads(run: Run, tmp_path: Path, tiny_model: Path) -> None:
    folder = tmp_path / "tuned"
    folder.mkdir()
    config = llama_config(vocab_size=VOCAB)
    heads = {
        name: tensor.numpy()
        for name, tensor in named(TorchMedusa(HIDDEN, VOCAB, 2), prefix="medusa_head.").items()
    }
    for name, content in {"config.json": config, **tokenizer_files(VOCAB)}.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "model.safetensors").write_bytes(safetensors_bytes(llama_tensors(config) | heads))
    refused = run("convert", folder, "-o", tmp_path / "m.gguf")
    assert refused.exit_code == 2
    assert "--kind model" in refused.stderr
    model = run("convert", folder, "-o", tmp_path / "m.gguf", "--kind", "model", "--no-verify")
    assert model.exit_code == 0, model.output
    result = run("convert", folder, "-o", tmp_path / "h.gguf", "--target", tmp_path / "m.gguf")
    assert result.exit_code == 0, result.output
    assert (
        read_header(tmp_path / "m.gguf").architecture,
        read_header(tmp_path / "h.gguf").architecture,
    ) == ("llama", "medusa")
