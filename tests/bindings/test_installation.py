"""Messages fit how specrun was installed: who has a wheel has no folder with a Makefile."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from specrun.bindings import installation
from specrun.bindings.errors import MissingPackageError
from specrun.bindings.machine import describe_backends

METADATA = [
    "numpy>=2.0",
    "gguf==0.19.0 ; extra == 'convert'",
    'specrun[convert] ; extra == "train"',
    'torch<2.14,>=2.6; extra == "train"',
]


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "source_folder", lambda: None)
    monkeypatch.setattr("specrun.bindings.machine.devices.source_folder", lambda: None)
    monkeypatch.setattr("importlib.metadata.requires", lambda _: METADATA)
    monkeypatch.setattr(sys, "executable", "/env/bin/python")
    monkeypatch.setattr(sys, "prefix", "/env")


def test_from_its_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "source_folder", lambda: Path("/somewhere"))
    assert "-e '.[train]' in specrun's folder" in installation.extra_command("train")
    assert installation.build_command("make chat", "GGML_RPC=ON") == "`make chat`"


def test_from_a_wheel(wheel: None) -> None:
    said = installation.extra_command("train")
    assert said == "run /env/bin/python -m pip install gguf==0.19.0 'torch<2.14,>=2.6'"
    builds = installation.build_command("make chat", "GGML_RPC=ON")
    assert builds.startswith("`CMAKE_ARGS=-DGGML_RPC=ON /env/bin/python -m pip install ")
    sentence = describe_backends(["CPU"], [])["CUDA"]
    assert "make" not in sentence.replace("CMAKE", "")
    assert "GGML_CUDA=ON" in sentence
    error = str(MissingPackageError("fetching", "huggingface_hub"))
    assert error.endswith("run /env/bin/python -m pip install huggingface_hub")


def test_from_pipx(wheel: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pipx_metadata.json").write_text("{}")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert installation.extra_command("convert") == "run pipx inject specrun gguf==0.19.0"


def test_the_extras_of_this_installation_are_found() -> None:
    assert any(package.startswith("torch") for package in installation._packages("train"))
    assert any(package.startswith("gguf") for package in installation._packages("train"))
