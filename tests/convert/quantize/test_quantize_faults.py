"""Kill -9, Ctrl-C, a disk that refuses, a crash in native code: the whole file, or nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.ctrl_c import hearing_ctrl_c

from specrun.bindings.errors import ModelError, SpecrunError
from specrun.bindings.quantizer import QuantizeOptions, QuantizerProcess
from specrun.convert import RandomLlama, quantize_model, write_random_llama

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs signals")

# Reports, with the file half written, and waits.
HALFWAY = """
import sys, time
from specrun.convert import quantize_model
def wait(done, total):
    print("halfway", flush=True)
    time.sleep(60)
quantize_model(sys.argv[1], sys.argv[2], "Q8_0", n_threads=1, progress=wait)
"""
LIMITED = """
import resource, sys
from specrun.bindings.errors import SpecrunError
from specrun.convert import quantize_model
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    quantize_model(sys.argv[1], sys.argv[2], "Q8_0", n_threads=1)
except SpecrunError as error:
    print(error)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a model of 1.6 MB."""
    write_random_llama(tmp_path / "in.gguf", RandomLlama(width=256, ffn=256, layers=1, scale=2.0))
    return tmp_path


def start(code: str, folder: Path) -> subprocess.Popen[str]:
    with hearing_ctrl_c():
        return subprocess.Popen(
            [sys.executable, "-c", code, str(folder / "in.gguf"), str(folder / "out.gguf")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )


def names_soon(folder: Path, seconds: float = 20.0) -> list[str]:
    """The names in the folder, once only the source is left, or after some seconds."""
    end = time.monotonic() + seconds
    while (names := sorted(os.listdir(folder))) != ["in.gguf"] and time.monotonic() < end:
        time.sleep(0.02)
    return names


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_writing_leaves_nothing(folder: Path, number: signal.Signals) -> None:
    with start(HALFWAY, folder) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "halfway\n"
        assert len(os.listdir(folder)) == 2  # the file that is being written, under another name
        assert not (folder / "out.gguf").exists()
        process.send_signal(number)
        process.wait(20)
        process.communicate()
    assert names_soon(folder) == ["in.gguf"]


def test_a_write_that_fails_is_one_sentence_and_leaves_nothing(folder: Path) -> None:
    with start(LIMITED, folder) as process:
        said, _ = process.communicate(timeout=60)
    assert said.count("\n") == 1
    assert "could not write all of the file" in said or "cannot quantize" in said
    assert sorted(os.listdir(folder)) == ["in.gguf"]


def test_a_crash_in_native_code_is_an_error(folder: Path) -> None:
    # A type that asserts an importance matrix, with the checks of quantize_model left out.
    options = QuantizeOptions("Q4_0", n_threads=1, output_tensor_type="IQ2_XXS")
    with QuantizerProcess(folder / "in.gguf", options) as process:
        list(process.plan())
        with pytest.raises(ModelError, match=r"GGML_ASSERT|assert"):
            list(process.write(folder / "out.gguf"))


def test_a_process_that_is_killed_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = QuantizerProcess.write

    def killed(self: QuantizerProcess, output: Path):
        self._process.terminate()
        self._process.wait()
        return written(self, output)

    monkeypatch.setattr(QuantizerProcess, "write", killed)
    with pytest.raises(ModelError, match="crashed while quantizing"):
        quantize_model(folder / "in.gguf", folder / "out.gguf", "Q8_0", n_threads=1)
    assert sorted(os.listdir(folder)) == ["in.gguf"]


def test_a_folder_that_cannot_be_written_is_one_sentence(folder: Path) -> None:
    closed = folder / "closed"
    closed.mkdir(mode=0o500)
    if os.access(closed, os.W_OK):
        closed = Path("/proc/self/task")  # for root, to whom every other folder is open
    with pytest.raises(SpecrunError, match=r"cannot be written .*; choose another folder"):
        quantize_model(folder / "in.gguf", closed / "out.gguf", "Q8_0", n_threads=1)
