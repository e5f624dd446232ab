"""The tools that build llama.cpp: what they ask cmake for, and what they say is missing."""

from __future__ import annotations

import functools
import importlib.util
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).resolve().parent.parent / "tools"


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """tools/llama_wheel.py, imported as the script it is: its neighbours are found beside it."""
    monkeypatch.syspath_prepend(str(TOOLS))
    for neighbour in ("cuda_toolkit", "ready_wheel"):
        monkeypatch.delitem(sys.modules, neighbour, raising=False)
    spec = importlib.util.spec_from_file_location("llama_wheel", TOOLS / "llama_wheel.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def driver(answer: str | None) -> object:
    """A `subprocess.run` that answers for nvidia-smi; None: there is none."""

    def run(command: list[str], **_options: object) -> subprocess.CompletedProcess[str]:
        assert command[0] == "nvidia-smi"
        if answer is None:
            raise FileNotFoundError(command[0])
        return subprocess.CompletedProcess(command, 0, answer, "")

    return run


def test_every_build_can_use_other_machines(wheel: ModuleType) -> None:
    assert "-DGGML_RPC=ON" in wheel.CMAKE_ARGS


def test_only_the_first_gpus_architecture_is_compiled(
    wheel: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", driver("8.6\n12.0\n"))
    chosen = wheel.gpu_arguments(True, False, None)
    assert chosen[:2] == ["-DGGML_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=86"]
    assert "-DCMAKE_CUDA_ARCHITECTURES=120" in wheel.gpu_arguments(True, False, "120")


@pytest.mark.parametrize("answer", [None, ""])
def test_without_a_driver_the_architecture_must_be_named(
    wheel: ModuleType, monkeypatch: pytest.MonkeyPatch, answer: str | None
) -> None:
    monkeypatch.setattr(subprocess, "run", driver(answer))
    with pytest.raises(SystemExit, match=r"no NVIDIA driver answers here .*CUDA_ARCH=86"):
        wheel.gpu_arguments(True, False, None)


@pytest.mark.parametrize("wanted", ["sm_86", "8.6", "ampere", "86;89"])
def test_what_is_no_architecture(wheel: ModuleType, wanted: str) -> None:
    with pytest.raises(SystemExit, match=r"CUDA_ARCH is .*: give a number"):
        wheel.gpu_arguments(True, False, wanted)


def test_vulkan_without_its_compiler(wheel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel.shutil, "which", lambda _name: None)
    with pytest.raises(SystemExit, match="glslc was not found: install it"):
        wheel.gpu_arguments(False, True, None)
    monkeypatch.setattr(wheel.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert "-DGGML_VULKAN=ON" in wheel.gpu_arguments(False, True, None)


def test_an_installed_toolkit_is_taken_as_it_is(
    wheel: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\nexit 0\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    said: list[str] = []
    assert wheel.cuda_toolkit.provide(said.append) == nvcc
    assert said == [f"CUDA toolkit: {nvcc}"]
    found = wheel.cuda_toolkit.toolkit_arguments(nvcc, tmp_path)
    assert found == [f"-DCMAKE_CUDA_COMPILER={nvcc}"]


def test_a_compiler_without_cublas_is_no_toolkit(
    wheel: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho cublas_v2.h: No such file or directory >&2\nexit 1\n")
    nvcc.chmod(0o755)
    packaged = tmp_path / "cu13"
    (packaged / "bin").mkdir(parents=True)
    (packaged / "bin" / "nvcc").touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(wheel.cuda_toolkit, "_packaged", lambda: packaged)
    assert wheel.cuda_toolkit.provide(lambda _line: None) == packaged / "bin" / "nvcc"


def test_libraries_of_wheels_get_the_names_that_linkers_look_for(
    wheel: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, work = tmp_path / "cu13", tmp_path / "work"
    (folder / "lib").mkdir(parents=True)
    work.mkdir()
    for name in ("libcublas.so.13", "libcudart.so.13", "libcudart_static.a"):
        (folder / "lib" / name).touch()
    monkeypatch.setattr(wheel.cuda_toolkit, "_packaged", lambda: folder)
    arguments = wheel.cuda_toolkit.toolkit_arguments(folder / "bin" / "nvcc", work)
    links = {link.name: link.resolve().name for link in (work / "lib").iterdir()}
    assert links == {"libcublas.so": "libcublas.so.13", "libcudart.so": "libcudart.so.13"}
    assert f"-DCUDAToolkit_ROOT={folder}" in arguments
    # Where llama_cpp's libraries will find them: beside llama_cpp, in the same environment.
    assert any("-rpath,'$ORIGIN/../../nvidia/cu13/lib'" in argument for argument in arguments)
    assert "-DGGML_CUDA_NO_VMM=ON" in arguments


def test_a_toolkit_that_must_be_fetched_says_its_size_first(
    wheel: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheel.cuda_toolkit, "_installed_nvcc", lambda: None)
    monkeypatch.setattr(wheel.cuda_toolkit, "_packaged", lambda: tmp_path)
    said: list[str] = []

    def refuse(command: list[str], **_options: object) -> subprocess.CompletedProcess[str]:
        assert "573 MB" in said[0]
        assert "nvidia-cuda-nvcc==13.5.37" in command
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(subprocess, "run", refuse)
    with pytest.raises(SystemExit, match="could not be installed"):
        wheel.cuda_toolkit.provide(said.append)


# -- ready wheels ----------------------------------------------------------------------------------

LIBRARY = """
void llama_backend_init(void) {}
const char *llama_print_system_info(void) { return "CPU : X = 1"; }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A libllama that begins, and does no more."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("no C compiler here")
    folder = tmp_path_factory.mktemp("library")
    (folder / "llama.c").write_text(LIBRARY)
    command = [compiler, "-shared", "-fPIC", "-o", "libllama.so", "llama.c"]
    subprocess.run(command, cwd=folder, check=True)
    return (folder / "libllama.so").read_bytes()


@pytest.fixture
def index(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """An index on loopback: its address, and the folder that it serves."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    folder = tmp_path / "index"
    folder.mkdir()
    handler = functools.partial(Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", folder
        server.shutdown()
        thread.join()


def publish(folder: Path, kind: str, library: bytes, version: str = "0.3.36") -> None:
    place = folder / kind / "llama-cpp-python"
    place.mkdir(parents=True)
    name = f"llama_cpp_python-{version}-py3-none-any.whl"
    facts = f"llama_cpp_python-{version}.dist-info"
    with zipfile.ZipFile(place / name, "w") as archive:
        archive.writestr("llama_cpp/llama.py", "")
        archive.writestr("llama_cpp/lib/libllama.so", library)
        about = f"Metadata-Version: 2.1\nName: llama_cpp_python\nVersion: {version}\n"
        archive.writestr(f"{facts}/METADATA", about)
        archive.writestr(f"{facts}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{facts}/RECORD", "")
    (place / "index.html").write_text(f'<a href="{name}">{name}</a>')


def test_a_ready_wheel_is_tried_and_kept(
    wheel: ModuleType, index: tuple[str, Path], library: bytes, tmp_path: Path
) -> None:
    address, folder = index
    publish(folder, "cu124", library)
    said: list[str] = []
    find = wheel.ready_wheel.find
    found = find("0.3.36", address, ["cu125", "cu124"], tmp_path / "kept", said.append)
    assert found == tmp_path / "kept" / "llama_cpp_python-0.3.36-py3-none-any.whl"
    assert found.is_file()
    assert said[0] == f"no ready wheel of llama-cpp-python 0.3.36 in {address}/cu125"
    assert said[1].endswith(f"from {address}/cu124")


@pytest.mark.parametrize("fault", ["another version", "no library", "of another machine", "ends"])
def test_a_wheel_that_does_not_fit_is_left(
    wheel: ModuleType, index: tuple[str, Path], library: bytes, tmp_path: Path, fault: str
) -> None:
    address, folder = index
    if fault == "ends":
        library = library.replace(b"llama_backend_init", b"llama_backend_nope")
    content = b"no library" if fault in ("no library", "of another machine") else library
    publish(folder, "cpu", content, "0.3.35" if fault == "another version" else "0.3.36")
    said: list[str] = []
    found = wheel.ready_wheel.find("0.3.36", address, ["cpu"], tmp_path / "kept", said.append)
    assert found is None
    assert not (tmp_path / "kept").exists()
    word = "no ready wheel" if fault == "another version" else "does not load here"
    assert len(said) == 1
    assert word in said[0]


@pytest.mark.parametrize(
    ("answer", "names"),
    [
        ("| CUDA Version: 12.4     |", ["cu124", "cu123", "cu122", "cu121", "cu120"]),
        ("| CUDA Version: 13.0     |", ["cu130"]),
        (None, []),
    ],
)
def test_the_drivers_version_chooses(
    wheel: ModuleType, monkeypatch: pytest.MonkeyPatch, answer: str | None, names: list[str]
) -> None:
    monkeypatch.setattr(subprocess, "run", driver(answer))
    assert wheel.ready_wheel.kinds(True, False) == names
    assert wheel.ready_wheel.kinds(False, True) == ["vulkan"]
