"""`specrun train`: a run as a user makes it, what it prints, and wrong inputs in one sentence."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.ctrl_c import hearing_ctrl_c

from specrun.bindings.errors import SpecrunError
from specrun.bindings.gguf import read_header
from specrun.convert.heads import head_conversion

from ..conftest import Run

pytest.importorskip("torch")
pytest.importorskip("transformers")

pytestmark = pytest.mark.long

COMMON = ("--max-length", "64", "-t", "1", "--device", "cpu", "--precision", "float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with random weights and a few chats."""
    from support.tiny_targets import write_chats, write_untaught

    folder = tmp_path_factory.mktemp("train cli")
    write_untaught(folder / "target")
    write_chats(folder / "chats.jsonl")
    return folder


def test_a_run_leaves_a_head_a_picture_and_a_gguf(run: Run, folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    arguments = [
        "train",
        "medusa",
        "--target",
        folder / "target",
        "--data",
        folder / "chats.jsonl",
        *COMMON,
    ]
    result = run(
        *arguments,
        "-o",
        tmp_path / "heads",
        "--heads",
        "2",
        "--epochs",
        "2",
        "--gguf",
        tmp_path / "h.gguf",
        "--json",
    )
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["kind"] == "medusa"
    assert facts["steps"] == 2
    assert (facts["sequences"], facts["held_out"]) == (5, 1)
    assert set(facts["measures"]) >= {"head 1 top-1", "head 2 top-5", "tokens a round"}
    assert "5 sequences of" in result.stderr
    assert re.search(
        r"states are computed once and kept on disk: 0\.\d MiB|kept on disk", result.stderr
    )
    assert "memory: about 0.0" in result.stderr
    assert "step 2: loss" in result.stderr
    assert (tmp_path / "heads" / "training" / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "h.gguf").read_bytes()[:4] == b"GGUF"
    shown = run("inspect", tmp_path / "h.gguf")
    assert "medusa" in shown.stdout
    again = run(*arguments, "-o", tmp_path / "heads", "--heads", "2", "--epochs", "2", "--resume")
    assert again.exit_code == 0, again.output
    assert "medusa trained" in again.stdout


@pytest.mark.parametrize(
    ("kind", "options", "weights"),
    [
        ("eagle", ["--noise", "0"], "model.safetensors"),
        ("eagle3", ["--unroll", "2", "--read-layers", "0", "1", "3"], "model.safetensors"),
        ("hydra", ["--plus", "--heads", "2"], "hydra_lm_head.safetensors"),
        ("medusa", ["--joint", "--heads", "2"], "model.safetensors"),
    ],
)
def test_every_kind_of_head(
    run: Run, folder: Path, tmp_path: Path, kind: str, options: list[str], weights: str
) -> None:
    common = [
        "--target",
        folder / "target",
        "--data",
        folder / "chats.jsonl",
        *COMMON,
        "--steps",
        "2",
    ]
    gguf = tmp_path / "head.gguf"
    result = run(
        "train",
        kind,
        *common,
        "-o",
        tmp_path / "head",
        *options,
        "--plot",
        tmp_path / "p.svg",
        "--gguf",
        gguf,
    )
    assert result.exit_code == 0, result.output
    assert read_header(gguf).architecture == kind
    assert f"{kind} trained" in result.stdout
    assert (tmp_path / "head" / weights).is_file()
    assert (tmp_path / "p.svg").is_file()


def test_a_head_is_trained_from_a_file_alone(run: Run, folder: Path, tmp_path: Path) -> None:
    """Without a folder and without data: the file answers built-in prompts."""
    from specrun.convert import convert_checkpoint

    target = tmp_path / "target.gguf"
    convert_checkpoint(folder / "target", target, outtype="f32", verify=False)
    few = ["--n-prompts", "5", "--answer-length", "8", "--steps", "2", "--cache", "no"]
    arguments = ["train", "eagle", "--target", target, *COMMON, *few]
    gguf = tmp_path / "head.gguf"
    result = run(*arguments, "-o", tmp_path / "head", "--gguf", gguf)
    assert result.exit_code == 0, result.output
    assert read_header(gguf).architecture == "eagle"
    assert "kept on disk" not in result.stderr
    for more, code, problem in (
        (["--answers", "given"], 2, "needs --data"),
        (["--prompts", folder / "chats.jsonl", "--data", folder / "chats.jsonl"], 2, "leave one"),
        (["--n-prompts", "100000"], 2, "built-in prompts are asked for"),
        (["--teacher", target], 2, "leave out --teacher"),
    ):
        refused = run(*arguments, *more, "-o", tmp_path / "other")
        assert refused.exit_code == code, refused.output
        assert problem in refused.stderr
    assert not (tmp_path / "other").exists()


def test_wrong_inputs_are_one_sentence(run: Run, folder: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"text": ""}\n')
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text"')
    target, data = folder / "target", folder / "chats.jsonl"
    cases: list[tuple[list[object], int, str]] = [
        (["--target", tmp_path / "none", "--data", data], 3, "is not a folder"),
        (["--target", target, "--data", tmp_path / "none"], 3, "there is no file"),
        (["--target", target, "--data", empty], 3, "has no usable text"),
        (["--target", target, "--data", broken], 3, "line 1 of broken.jsonl is not JSON"),
        (
            ["--target", target, "--data", data, "--device", "toaster"],
            2,
            "torch cannot compute on 'toaster'",
        ),
        (["--target", target, "--data", data, "--resume"], 3, "to resume"),
        (["--target", target, "--data", data, "--plot", "curves.txt"], 2, "is not a picture"),
        (
            ["--target", target, "--data", data, "--features", tmp_path, "--cache", "no"],
            2,
            "--features",
        ),
        (["--target", target, "--answers", "given"], 2, "needs --data"),
        (["--data", data], 2, "Missing option '--target'"),
        (["--target", target, "--data", data, "--held-out", "1"], 2, "--held-out"),
    ]
    for number, (arguments, code, problem) in enumerate(cases):
        defaults = [] if "--device" in map(str, arguments) else ["--device", "cpu"]
        result = run(
            "train",
            "medusa",
            "-o",
            tmp_path / f"o{number}",
            "--precision",
            "float32",
            *defaults,
            *arguments,
        )
        assert result.exit_code == code, (arguments, result.output)
        assert problem in result.stderr
        assert "Traceback" not in result.stderr
        assert not (tmp_path / f"o{number}" / "config.json").exists()


def test_a_gguf_that_exists_is_found_before_training(
    run: Run, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "h.gguf").write_text("mine")
    arguments = [
        "--target",
        folder / "target",
        "--data",
        folder / "chats.jsonl",
        *COMMON,
        "-o",
        tmp_path / "heads",
    ]
    result = run("train", "medusa", *arguments, "--gguf", tmp_path / "h.gguf")
    assert result.exit_code == 2
    assert "already exists" in result.stderr
    assert not (tmp_path / "heads").exists()


@pytest.mark.parametrize("kind", ["medusa", "drafter"])
def test_a_type_that_cannot_be_made_is_found_before_training(
    run: Run, folder: Path, tmp_path: Path, kind: str
) -> None:
    arguments = [
        "--target",
        folder / "target",
        "--data",
        folder / "chats.jsonl",
        *COMMON,
        "-o",
        tmp_path / "out",
    ]
    arguments += ["--draft", folder / "target"] if kind == "drafter" else []
    result = run("train", kind, *arguments, "--gguf", tmp_path / "h.gguf", "--outtype", "q8")
    assert result.exit_code == 2
    assert "outtype is 'q8'" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["medusa", "drafter"])
def test_a_model_that_cannot_be_converted_for_is_found_before_training(
    run: Run, folder: Path, tmp_path: Path, kind: str
) -> None:
    strange = tmp_path / "strange"
    shutil.copytree(folder / "target", strange)
    config = json.loads((strange / "config.json").read_text())
    (strange / "config.json").write_text(
        json.dumps({**config, "architectures": ["StrangeForCausalLM"]})
    )
    models = (
        ["--target", strange]
        if kind == "medusa"
        else ["--target", folder / "target", "--draft", strange]
    )
    arguments = [*models, "--data", folder / "chats.jsonl", *COMMON, "-o", tmp_path / "out"]
    result = run("train", kind, *arguments, "--gguf", tmp_path / "h.gguf")
    assert result.exit_code == 3
    assert "'StrangeForCausalLM', and these can be converted" in result.stderr
    assert not (tmp_path / "out").exists()


def test_what_is_whole_is_said_where_only_converting_failed(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_given: object, **_options: object) -> None:
        raise SpecrunError("the disk is full")

    monkeypatch.setattr(head_conversion, "convert_head", failing)
    arguments = [
        "--target",
        folder / "target",
        "--data",
        folder / "chats.jsonl",
        *COMMON,
        "-o",
        tmp_path / "out",
    ]
    result = run(
        "train", "medusa", *arguments, "--heads", "1", "--steps", "1", "--gguf", tmp_path / "h.gguf"
    )
    assert result.exit_code == 1
    said = result.stderr.splitlines()[-2:]
    assert said == [
        "Error: the disk is full",
        "the trained head is whole: convert it with specrun convert",
    ]
    assert (tmp_path / "out" / "medusa_lm_head.safetensors").is_file()


@pytest.mark.skipif(os.name == "nt", reason="needs Ctrl-C as a signal")
def test_ctrl_c_keeps_a_checkpoint(folder: Path, tmp_path: Path) -> None:
    program = "from specrun.cli.main import main; main()"
    arguments = [
        "train",
        "medusa",
        "--target",
        folder / "target",
        "--data",
        folder / "chats.jsonl",
        *COMMON,
    ]
    command = [
        sys.executable,
        "-c",
        program,
        *map(str, [*arguments, "-o", tmp_path / "heads", "--steps", "100000"]),
    ]
    command += ["--measures", "10000"]
    with hearing_ctrl_c():
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    with process as child:
        assert child.stderr is not None
        for line in child.stderr:
            if line.startswith("step "):
                break
        child.send_signal(signal.SIGINT)
        rest = child.stderr.read()
    assert child.returncode == 130
    assert "interrupted" in rest
    assert (tmp_path / "heads" / "training" / "state.pt").stat().st_size > 1000
    assert not (tmp_path / "heads" / "config.json").exists()


def test_without_torch_it_says_how_to_get_it(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "specrun.cli.options.drafting.find_spec", lambda name: None if name == "torch" else sys
    )
    for kind in ("eagle", "eagle3", "medusa", "hydra"):
        result = run("train", kind, "--target", folder / "target", "-o", tmp_path / "new")
        assert result.exit_code == 1
        assert "training needs the package torch: run pip install" in result.stderr
        assert not (tmp_path / "new").exists()
    assert run("train", "eagle", "--help").exit_code == 0
