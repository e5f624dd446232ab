"""Build llama.cpp's server and its programs, of the version that specrun has, into .peers.

The source is in llama-cpp-python's source package, which pip downloads. It is built once for a
machine, as the wheel is, and with the same switches. An interrupted build goes on where it was.
stdout carries the server's path alone.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from llama_wheel import accepted_flags, cache_directory, compiler, pinned_version, processor, say

_ROOT = Path(__file__).resolve().parent.parent
_PROGRAMS = (
    "llama-server",
    "llama-bench",
    "llama-batched-bench",
    "llama-speculative-simple",
    "llama-lookup",
    "llama-lookahead",
)
_SETTINGS = [
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DGGML_NATIVE=ON",
    "-DGGML_RPC=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=ON",
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
    """Download the source package and unpack it, once; return llama.cpp's folder."""
    wanted = f"llama-cpp-python=={version}"
    unpacked = work / f"llama_cpp_python-{version}"
    if not unpacked.exists():
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-build-isolation"]
        run(*pip, "--no-binary", "llama-cpp-python", "-d", str(work), wanted)
        (archive,) = work.glob("llama_cpp_python-*.tar.gz")
        with tarfile.open(archive) as packed:
            packed.extractall(work / "aside", filter="data")
        os.replace(work / "aside" / unpacked.name, unpacked)
    return unpacked / "vendor" / "llama.cpp"


def build(version: str, flags: list[str], settings: list[str], into: Path) -> None:
    """Build the programs below `into`, and move them into it when all are there."""
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if cmake is None:
        sys.exit("cmake was not found: pip install cmake")
    work = into / "build"
    work.mkdir(parents=True, exist_ok=True)
    say(f"building llama.cpp's programs of llama-cpp-python {version}, once for this machine")
    say(f"  in {work}; if it is interrupted, the next call goes on there")
    llama, made = source(version, work), str(work / "made")
    compiled = [f"-DCMAKE_{name}_FLAGS={' '.join(flags)}" for name in ("C", "CXX")]
    run(cmake, "-S", str(llama), "-B", made, *settings, *compiled)
    jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count() or 2))
    run(cmake, "--build", made, "--target", *_PROGRAMS, "-j", jobs)
    for name in reversed(_PROGRAMS):  # the server last: it marks that all are there
        os.replace(Path(made) / "bin" / name, into / name)
    shutil.rmtree(work)


def main() -> None:
    """Find or build the programs, link them, and print the server's path."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cuda", action="store_true", help="build for NVIDIA GPUs")
    parser.add_argument("--vulkan", action="store_true", help="build for GPUs with Vulkan")
    options = parser.parse_args()
    version = pinned_version(_ROOT / "constraints.txt")
    flags, settings = accepted_flags(compiler()), [*_SETTINGS]
    settings += ["-DGGML_CUDA=ON"] * options.cuda + ["-DGGML_VULKAN=ON"] * options.vulkan
    identity = "\n".join([version, processor(), *flags, *settings, *_PROGRAMS])
    key = f"llama.cpp-{version}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    built = cache_directory(key)
    if not (built / "llama-server").exists():
        build(version, flags, settings, built)
    links = _ROOT / ".peers"
    links.mkdir(exist_ok=True)
    for name in _PROGRAMS:
        (links / name).unlink(missing_ok=True)
        (links / name).symlink_to(built / name)
    print(links / "llama-server")


if __name__ == "__main__":
    main()
