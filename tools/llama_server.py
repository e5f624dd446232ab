"""Build llama.cpp's llama-server, of the version that specrun has, as .peers/llama-server.

The source is in llama-cpp-python's source package, which pip downloads. It is built once for a
machine, as the wheel is, and with the same switches. stdout carries the path alone.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from llama_wheel import accepted_flags, cache_directory, compiler, pinned_version, processor, say

_ROOT = Path(__file__).resolve().parent.parent
_SETTINGS = [
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_SERVER=ON",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
]


def run(*command: str) -> None:
    """Run a command, its output on stderr; ends with a sentence if it fails."""
    if subprocess.run(command, stdout=sys.stderr, check=False).returncode != 0:
        sys.exit(f"{Path(command[0]).name} failed; the lines above say why")


def source(version: str, work: Path) -> Path:
    """Download the source package and unpack it; return llama.cpp's folder."""
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-build-isolation"]
    wanted = f"llama-cpp-python=={version}"
    run(*pip, "--no-binary", "llama-cpp-python", "-d", str(work), wanted)
    (archive,) = work.glob("llama_cpp_python-*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(work, filter="data")
    return archive.with_name(archive.name.removesuffix(".tar.gz")) / "vendor" / "llama.cpp"


def build(version: str, flags: list[str], settings: list[str], into: Path) -> None:
    """Build the server aside, and move it into place."""
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if cmake is None:
        sys.exit("cmake was not found: pip install cmake")
    into.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="build-", dir=into.parent) as folder:
        work = Path(folder)
        say(f"building llama-server of llama-cpp-python {version}, once for this machine")
        llama, made = source(version, work), str(work / "made")
        compiled = [f"-DCMAKE_{name}_FLAGS={' '.join(flags)}" for name in ("C", "CXX")]
        run(cmake, "-S", str(llama), "-B", made, *settings, *compiled)
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count() or 2))
        run(cmake, "--build", made, "--target", "llama-server", "-j", jobs)
        into.parent.mkdir(exist_ok=True)
        os.replace(Path(made) / "bin" / "llama-server", into)


def main() -> None:
    """Find or build the server, link it, and print its path."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cuda", action="store_true", help="build for NVIDIA GPUs")
    parser.add_argument("--vulkan", action="store_true", help="build for GPUs with Vulkan")
    options = parser.parse_args()
    version = pinned_version(_ROOT / "constraints.txt")
    flags, settings = accepted_flags(compiler()), [*_SETTINGS]
    settings += ["-DGGML_CUDA=ON"] * options.cuda + ["-DGGML_VULKAN=ON"] * options.vulkan
    identity = "\n".join([version, processor(), *flags, *settings])
    key = f"llama-server-{version}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    server = cache_directory(key) / "llama-server"
    if not server.exists():
        build(version, flags, settings, server)
    link = _ROOT / ".peers" / "llama-server"
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(server)
    print(link)


if __name__ == "__main__":
    main()
