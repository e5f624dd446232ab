"""`specrun train`: a run as a user makes it, what it prints, and wrong inputs in one sentence."""

from __future__ import annotations

import json
import os
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
OWN = ["--n-prompts", "5", "--answer-length", "8", "--steps", "2", "--cache", "no"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with random weights and a few chats."""
    from support.tiny_targets import write_chats, write_untaught

    folder = tmp_path_factory.mktemp("train cli")
    write_untaught(folder / "target")
    write_chats(folder / "chats.jsonl")
    return folder


def given(folder: Path, output: Path, *more: object) -> list[object]:
    """The options of a run from the folder's target and chats."""
    inputs = ["--target", folder / "target", "--data", folder / "chats.jsonl", *COMMON]
    return [*inputs, "-o", output, *more]


def test_a_run_leaves_a_head_a_picture_and_a_gguf(run: Run, folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    heads, gguf = tmp_path / "heads", tmp_path / "h.gguf"
    arguments = ["medusa", *given(folder, heads, "--heads", "2", "--epochs", "2")]
    result = run("train", *arguments, "--gguf", gguf, "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert (facts["kind"], facts["steps"]) == ("medusa", 2)
    assert (facts["sequences"], facts["held_out"]) == (5, 1)
    assert set(facts["measures"]) >= {"head 1 top-1", "head 2 top-5", "tokens a round"}
    for said in ("5 sequences of", "kept on disk", "memory: about 0.0", "step 2: loss"):
        assert said in result.stderr
    assert (heads / "training" / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert gguf.read_bytes()[:4] == b"GGUF"
    assert "medusa" in run("inspect", gguf).stdout
    again = run("train", *arguments, "--resume")
    assert again.exit_code == 0, again.output
    assert "medusa trained" in again.stdout


@pytest.mark.parametrize(
    ("kind", "options", "weights"),
    [
        ("eagle", "--noise 0", "model.safetensors"),
        ("eagle3", "--unroll 2 --read-layers 0 1 3", "model.safetensors"),
        ("hydra", "--plus --heads 2", "hydra_lm_head.safetensors"),
        ("medusa", "--joint --heads 2", "model.safetensors"),
    ],
)
def test_every_kind_of_head(
    run: Run, folder: Path, tmp_path: Path, kind: str, options: str, weights: str
) -> None:
    output, plot, gguf = tmp_path / "head", tmp_path / "p.svg", tmp_path / "head.gguf"
    more = ["--steps", "2", *options.split(), "--plot", plot, "--gguf", gguf]
    result = run("train", kind, *given(folder, output, *more))
    assert result.exit_code == 0, result.output
    assert read_header(gguf).architecture == kind
    assert f"{kind} trained" in result.stdout
    assert (output / weights).is_file()
    assert plot.is_file()


def test_a_head_is_trained_from_a_file_alone(run: Run, folder: Path, tmp_path: Path) -> None:
    """Without a folder and without data: the file answers built-in prompts."""
    from specrun.convert import convert_checkpoint

    target, gguf = tmp_path / "target.gguf", tmp_path / "head.gguf"
    convert_checkpoint(folder / "target", target, outtype="f32", verify=False)
    arguments = ["train", "eagle", "--target", target, *COMMON, *OWN]
    result = run(*arguments, "-o", tmp_path / "head", "--gguf", gguf)
    assert result.exit_code == 0, result.output
    assert read_header(gguf).architecture == "eagle"
    assert "kept on disk" not in result.stderr
    for more, problem in (
        (["--answers", "given"], "needs --data"),
        (["--prompts", folder / "chats.jsonl", "--data", folder / "chats.jsonl"], "leave one"),
        (["--n-prompts", "100000"], "built-in prompts are asked for"),
        (["--teacher", target], "leave out --teacher"),
    ):
        refused = run(*arguments, *more, "-o", tmp_path / "other")
        assert refused.exit_code == 2, refused.output
        assert problem in refused.stderr
    assert not (tmp_path / "other").exists()


def test_wrong_inputs_are_one_sentence(run: Run, folder: Path, tmp_path: Path) -> None:
    empty, broken = tmp_path / "empty.jsonl", tmp_path / "broken.jsonl"
    empty.write_text('{"text": ""}\n')
    broken.write_text('{"text"')
    target, data = ["--target", folder / "target"], ["--data", folder / "chats.jsonl"]
    both = [*target, *data]
    cases: list[tuple[list[object], int, str]] = [
        (["--target", tmp_path / "none", *data], 3, "is not a folder"),
        ([*target, "--data", tmp_path / "none"], 3, "there is no file"),
        ([*target, "--data", empty], 3, "has no usable text"),
        ([*target, "--data", broken], 3, "line 1 of broken.jsonl is not JSON"),
        ([*both, "--device", "toaster"], 2, "torch cannot compute on 'toaster'"),
        ([*both, "--resume"], 3, "to resume"),
        ([*both, "--plot", "curves.txt"], 2, "is not a picture"),
        ([*both, "--features", tmp_path, "--cache", "no"], 2, "--features"),
        ([*target, "--answers", "given"], 2, "needs --data"),
        (data, 2, "Missing option '--target'"),
        ([*both, "--held-out", "1"], 2, "--held-out"),
    ]
    for number, (arguments, code, problem) in enumerate(cases):
        output = tmp_path / f"o{number}"
        usual = ["-o", output, "--precision", "float32", "--device", "cpu"]
        result = run("train", "medusa", *usual, *arguments)
        assert result.exit_code == code, (arguments, result.output)
        assert problem in result.stderr
        assert "Traceback" not in result.stderr
        assert not (output / "config.json").exists()


def test_a_gguf_that_exists_is_found_before_training(
    run: Run, folder: Path, tmp_path: Path
) -> None:
    output, gguf = tmp_path / "heads", tmp_path / "h.gguf"
    gguf.write_text("mine")
    result = run("train", "medusa", *given(folder, output, "--gguf", gguf))
    assert result.exit_code == 2
    assert "already exists" in result.stderr
    assert not output.exists()


@pytest.mark.parametrize("kind", ["medusa", "drafter"])
def test_a_result_that_cannot_be_converted_is_found_before_training(
    run: Run, folder: Path, tmp_path: Path, kind: str
) -> None:
    """Into an unknown type, or from an unknown model."""
    output, strange = tmp_path / "out", tmp_path / "strange"
    shutil.copytree(folder / "target", strange)
    config = json.loads((strange / "config.json").read_text())
    config["architectures"] = ["StrangeForCausalLM"]
    (strange / "config.json").write_text(json.dumps(config))
    converted = "--target" if kind == "medusa" else "--draft"
    arguments = given(folder, output, "--gguf", tmp_path / "h.gguf")
    for model, more, code, problem in (
        (folder / "target", ["--outtype", "q8"], 2, "outtype is 'q8'"),
        (strange, [], 3, "'StrangeForCausalLM', and these can be converted"),
    ):
        result = run("train", kind, *arguments, converted, model, *more)
        assert result.exit_code == code
        assert problem in result.stderr
        assert not output.exists()


def test_what_is_whole_is_said_where_only_converting_failed(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_given: object, **_options: object) -> None:
        raise SpecrunError("the disk is full")

    monkeypatch.setattr(head_conversion, "convert_head", failing)
    more = ["--heads", "1", "--steps", "1", "--gguf", tmp_path / "h.gguf"]
    result = run("train", "medusa", *given(folder, tmp_path / "out", *more))
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
    more = ["--steps", "100000", "--measures", "10000"]
    arguments = ["train", "medusa", *given(folder, tmp_path / "heads", *more)]
    with hearing_ctrl_c():
        command = [sys.executable, "-c", program, *map(str, arguments)]
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
