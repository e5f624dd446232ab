"""Trials: faults of unknown files in the process that opens them, and known files."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.gguf_mutants import take_apart
from support.tiny_eagle import random_eagle
from support.tiny_nextn import write_tiny_qwen35

from specrun.bindings.errors import ModelLoadError, OutOfMemoryError
from specrun.bindings.memory_breakdown import CountedModel
from specrun.bindings.models import Model, is_known_file, remember_written, trial, trusting_files
from specrun.convert.cut import cut_layers
from specrun.convert.quantize import quantize_model
from specrun.runtime import Runtime
from specrun.runtime.demo import demo_target
from specrun.runtime.engine import Engine

_shipped_judge = trial._judged


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were tried; nothing is known at first."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(trial, "_known_here", set())
    files: list[str] = []
    shipped = trial._tried

    def counted(module: str, arguments: Any, path: Path, n_bytes: int) -> bool:
        files.append(path.name)
        return shipped(module, arguments, path, n_bytes)

    monkeypatch.setattr(trial, "_tried", counted)
    return files


def deadly(path: Path) -> Path:
    """Write a model whose recurrent state has 63 numbers for tensors of 64: llama.cpp loads
    it, and asserts when it builds the graph."""
    parts = take_apart(write_tiny_qwen35(path))
    (old,) = (entry for entry in parts.entries if entry.key == b"qwen35.ssm.inner_size")
    data = path.read_bytes()
    whole = old.key + struct.pack("<I", old.code)
    assert data.count(whole + old.raw) == 1
    path.write_bytes(data.replace(whole + old.raw, whole + struct.pack("<I", 63)))
    return path


def test_what_would_end_the_process_ends_another_one(tmp_path: Path, started: list[str]) -> None:
    path = deadly(tmp_path / "deadly.gguf")
    for _ in range(2):  # nor is it known afterwards
        with pytest.raises(ModelLoadError) as caught:
            Runtime(path, "prompt-lookup", n_ctx=256, n_threads=1)
    assert started == ["deadly.gguf"] * 2
    said = str(caught.value)
    assert str(path) in said
    assert "signal SIGABRT" in said
    assert ": ggml/src/ggml.c:" in said
    assert "GGML_ASSERT" in said
    assert "--trust" in said


def test_counting_does_not_end_the_process_either(tmp_path: Path, started: list[str]) -> None:
    path = deadly(tmp_path / "deadly.gguf")
    with pytest.raises(ModelLoadError, match="GGML_ASSERT"):
        CountedModel(path)
    assert started == ["deadly.gguf"]


def test_a_file_is_tried_once_wherever_it_lies(
    tiny_model: Path, tmp_path: Path, started: list[str]
) -> None:
    path = shutil.copy2(tiny_model, tmp_path / "first.gguf")
    Model(path).close()
    Model(path).close()
    moved = path.rename(tmp_path / "moved.gguf")
    Model(moved).close()
    assert started == ["first.gguf"]
    trial._known_here.clear()  # as another process would
    Model(moved).close()
    Model(moved, vocab_only=True).close()
    assert started == ["first.gguf"]


@pytest.mark.parametrize(("opened", "drafter"), [(Runtime, "eagle3"), (Engine, "draft")])
def test_what_comes_with_specrun_is_not_tried(
    opened: Any, drafter: str, started: list[str]
) -> None:
    opened.demo(drafter, n_ctx=256, n_threads=1).close()
    Model(demo_target(), vocab_only=True).close()
    assert is_known_file(demo_target())
    assert not started


@pytest.mark.parametrize("change", ["time", "header", "size"])
@pytest.mark.usefixtures("started")
def test_a_changed_file_is_not_known(tiny_model: Path, tmp_path: Path, change: str) -> None:
    path = shutil.copy2(tiny_model, tmp_path / "model.gguf")
    remember_written(path)
    assert is_known_file(path)
    data, status = path.read_bytes(), path.stat()
    if change == "header":
        path.write_bytes(data.replace(b"general.name", b"general.nemo", 1))
    elif change == "size":
        path.write_bytes(data + b"\0")
    later = 1 if change == "time" else 0
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + later))
    assert not is_known_file(path)


def test_a_vocabulary_alone_does_not_make_the_weights_known(
    tiny_model: Path, started: list[str]
) -> None:
    Model(tiny_model, vocab_only=True).close()
    Model(tiny_model, vocab_only=True).close()
    assert len(started) == 1
    Model(tiny_model).close()
    assert len(started) == 2


def test_a_model_that_was_counted_is_not_known_with_its_weights(
    tiny_model: Path, tmp_path: Path, started: list[str]
) -> None:
    path = shutil.copy2(tiny_model, tmp_path / "counted.gguf")
    for _ in range(2):
        CountedModel(path).close()
    assert len(started) == 1
    Model(path).close()
    assert len(started) == 2
    trial._known_here.clear()
    (moved := path.rename(tmp_path / "moved.gguf")).touch()
    Model(moved).close()
    CountedModel(moved).close()  # whose weights were tried may be counted
    assert len(started) == 3


def test_trusted_files_are_not_tried(tiny_model: Path, started: list[str]) -> None:
    with Runtime(tiny_model, "none", n_ctx=256, trust=True) as runtime:
        assert runtime.generate([1, 2], max_tokens=1).token_ids
    with trusting_files():
        Model(tiny_model).close()
    assert started == []
    Model(tiny_model).close()
    assert len(started) == 1


def test_what_specrun_writes_is_known_if_its_source_is(
    tiny_model: Path, tmp_path: Path, started: list[str]
) -> None:
    def written() -> list[Path]:
        cut_layers(tiny_model, tmp_path / "cut.gguf", layers="0", force=True)
        quantize_model(tiny_model, tmp_path / "q8.gguf", "Q8_0", force=True)
        return [tmp_path / "cut.gguf", tmp_path / "q8.gguf"]

    assert not any(map(is_known_file, written()))
    remember_written(tiny_model)
    assert all(map(is_known_file, written()))


def test_a_head_is_tried_with_its_target(
    tiny_model: Path, tmp_path: Path, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    head = random_eagle(32).write(tmp_path / "head.gguf", 320)
    forget_all(tmp_path)
    remember_written(tiny_model)
    expression = f'eagle("{head}")'
    with monkeypatch.context() as patched:
        patched.setattr(trial, "_judged", lambda *_: dies(head))
        with pytest.raises(ModelLoadError, match=r"head\.gguf.*signal SIGSEGV"):
            Runtime(tiny_model, expression, n_ctx=256)
    for _ in range(2):
        Runtime(tiny_model, expression, n_ctx=256).close()
    assert started == ["head.gguf"] * 2
    with pytest.raises(ModelLoadError):  # as a model it is another file
        Model(head)
    assert started == ["head.gguf"] * 3


def forget_all(folder: Path) -> None:
    trial._known_here.clear()
    shutil.rmtree(folder / "cache")


def dies(path: Path) -> bool:
    return _shipped_judge(-signal.SIGSEGV, {"opening": []}, "", path, 120.0)


def test_more_memory_than_such_a_file_may_need_is_refused(
    tiny_model: Path, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "_SPARE_BYTES", 1 << 20)
    with pytest.raises(OutOfMemoryError, match="--trust"):
        Model(tiny_model)
    assert not is_known_file(tiny_model)


@pytest.mark.parametrize(
    ("code", "reports", "expected"),
    [
        (0, {"opening": [], "done": True}, True),
        (0, {"opening": [], "refused": "no"}, False),  # this process refuses it, too
        (1, {}, False),  # it never opened the file
    ],
)
def test_how_a_trial_is_read(code: int, reports: dict[str, Any], expected: bool) -> None:
    assert trial._judged(code, reports, "last words", Path("m.gguf"), 120.0) is expected


@pytest.mark.parametrize(
    ("code", "match"),
    [
        (None, "did not end in 120 s"),
        (1, r"exit code 1: last words"),
        (0, r"exit code 0"),
        (-11, r"signal SIGSEGV"),
    ],
)
def test_a_trial_that_does_not_end_well_names_how(code: int | None, match: str) -> None:
    with pytest.raises(ModelLoadError, match=match):
        trial._judged(code, {"opening": []}, "last words", Path("m.gguf"), 120.0)


def test_without_another_process_files_are_opened_with_a_warning(
    tiny_model: Path,
    started: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(trial.sys, "executable", "/nowhere/python")
    with caplog.at_level(logging.WARNING, "specrun.trial"):
        Model(tiny_model).close()
    assert "opened without a trial" in caplog.text
    assert not is_known_file(tiny_model)


def test_nothing_is_imported_from_the_working_folder(
    tiny_model: Path, tmp_path: Path, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "numpy.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    Model(tiny_model).close()
    assert is_known_file(tiny_model)


def test_a_cache_that_cannot_be_written_costs_trials_only(
    tiny_model: Path, tmp_path: Path, started: list[str]
) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    Model(tiny_model).close()
    Model(tiny_model).close()
    assert len(started) == 1  # within a process it is known all the same


def test_a_model_in_several_files_is_known_by_all_of_them(
    tmp_path: Path, started: list[str]
) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=1)
    for name in ("token_embd.weight", "output_norm.weight"):
        writer.add_tensor(name, np.ones((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    first, second = sorted(tmp_path.glob("*.gguf"))
    remember_written(first)
    assert is_known_file(first)
    os.utime(second, ns=(0, 0))
    assert not is_known_file(first)
