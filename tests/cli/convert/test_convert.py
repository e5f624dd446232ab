"""`specrun convert` as users run it: names, summary, refusals with their exit codes, and Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from support.commands import started
from support.tiny_checkpoints import llama_config, llama_tensors, safetensors_bytes, tokenizer_files

from measure.convert.made_model import write_checkpoint
from specrun.bindings.gguf import read_header

from ..conftest import Run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint called Tiny-Chat-v1."""
    place = tmp_path / "Tiny-Chat-v1"
    place.mkdir()
    files = {"config.json": llama_config(), **tokenizer_files(299)}
    for name, content in files.items():
        (place / name).write_text(json.dumps(content))
    (place / "model.safetensors").write_bytes(safetensors_bytes(llama_tensors(llama_config())))
    return place


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.parent.iterdir())


def test_a_summary_and_a_name_by_the_convention(run: Run, folder: Path) -> None:
    result = run("convert", folder, "-o", folder.parent, "--no-verify")
    assert result.exit_code == 0, result.output
    assert left(folder) == ["Tiny-35K-Chat-v1-F16.gguf", "Tiny-Chat-v1"]
    assert result.stderr == ""
    for words in ("21 (16 F16, 5 F32)", "136 KiB (21 F32)", "bits per weight", "source sha256"):
        assert words in result.stdout, result.stdout
    again = run("convert", folder, "-o", folder.parent, "--no-verify")
    assert again.exit_code == 2
    assert "already exists" in again.stderr
    assert "--force" in again.stderr
    assert run("convert", folder, "-o", folder.parent, "--no-verify", "--force").exit_code == 0


def test_json_and_other_types(run: Run, folder: Path) -> None:
    output = folder.parent / "m.gguf"
    done = run("convert --outtype BF16 --no-verify --json --outfile", output, folder)
    facts = json.loads(done.stdout)
    assert (facts["output"], facts["type_name"], facts["logits"]) == (str(output), "BF16", None)
    assert facts["n_bytes"] == output.stat().st_size
    assert facts["tensor_types"] == {"BF16": 16, "F32": 5}
    small = folder.parent / "small.gguf"
    result = run("convert", folder, "-o", small, "--outtype", "q8_0", "--no-verify", "-t", 1)
    assert result.exit_code == 0, result.output
    assert read_header(small).file_type_name == "Q8_0"


def test_a_dry_run_only_prints_the_map(run: Run, folder: Path) -> None:
    result = run("convert", folder, "--dry-run", "-o", folder.parent)
    assert result.exit_code == 0
    assert "blk.1.ffn_down.weight" in result.stdout
    assert "model.layers.1.mlp.down_proj.weight (F32)" in result.stdout
    assert "would write" in result.stdout
    values = json.loads(run("convert", folder, "--dry-run", "--json").stdout)
    assert values["tensors"][0] == {
        "name": "token_embd.weight",
        "shape": [300, 32],
        "type": "F16",
        "bytes": 19200,
        "sources": [
            {
                "name": "model.embed_tokens.weight",
                "type": "F32",
                "shape": [300, 32],
                "file": "model.safetensors",
            }
        ],
    }
    assert left(folder) == ["Tiny-Chat-v1"]


@pytest.mark.parametrize(
    ("damage", "code", "words"),
    [
        ("other architecture", 3, "'MambaForCausalLM', and these can be converted: "),
        ("no folder", 3, "there is no folder"),
        ("unknown type", 2, "did you mean q4_k_m"),
    ],
)
def test_refusals_are_one_sentence(
    run: Run, folder: Path, damage: str, code: int, words: str
) -> None:
    arguments: list[object] = ["convert", folder, "-o", folder.parent / "m.gguf"]
    if damage == "other architecture":
        config = llama_config(architectures=["MambaForCausalLM"])
        (folder / "config.json").write_text(json.dumps(config))
    elif damage == "no folder":
        arguments[1] = folder / "none"
    else:
        arguments += ["--outtype", "q4_km"]
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert words in result.stderr
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
    assert left(folder) == ["Tiny-Chat-v1"]


def writes_into(pid: int, folder: Path) -> bool:
    """Whether a process has a file of a folder open, with or without a name."""
    if any(folder.iterdir()):
        return True
    opened = Path(f"/proc/{pid}/fd")
    try:
        return any(os.readlink(path).startswith(f"{folder}/") for path in opened.iterdir())
    except OSError:  # closed meanwhile, or no such system
        return False


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_ctrl_c_ends_with_130_and_leaves_nothing(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    write_checkpoint(source, 120 << 20)
    for _ in range(5):
        with started("convert --outtype f32 --no-verify -o", target, source) as process:
            # As soon as it has a file open there, which has no name yet, the conversion is under
            # way.
            while process.poll() is None and not writes_into(process.pid, target):
                time.sleep(0.002)
            process.send_signal(signal.SIGINT)
            output, messages = process.communicate(timeout=60)
        if process.returncode != 0:
            break
        for path in target.iterdir():  # it was faster: once more
            path.unlink()
    assert (process.returncode, output, messages) == (130, b"", b"Error: interrupted\n")
    assert not list(target.iterdir())
