"""Print the path of a llama-cpp-python wheel for this machine, building it once if need be.

pip's own wheel cache ignores compiler flags, and a wheel built with other flags dies with
"Illegal instruction" on virtual machines that advertise AMX without enabling it. So the wheel
lives in a directory of our own, keyed by version, flags, compiler target and processor.

Only the standard library is used: this runs before anything is installed.
Progress goes to stderr; stdout carries the wheel's path alone.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import cuda_toolkit
import ready_wheel

AMX_OFF = ["-mno-amx-tile", "-mno-amx-int8", "-mno-amx-bf16"]
# Only libllama and libggml are used: the multimodal library would add minutes to the build. RPC is
# the backend that puts layers on other machines; it adds seconds.
CMAKE_ARGS = ["-DLLAVA_BUILD=OFF", "-DGGML_NATIVE=ON", "-DGGML_RPC=ON"]


def say(message: str) -> None:
    """Report progress; stdout is reserved for the path."""
    print(message, file=sys.stderr, flush=True)


def pinned_version(constraints: Path) -> str:
    """Return the llama-cpp-python version that the constraints file pins."""
    found = re.search(r"^llama-cpp-python==(\S+)", constraints.read_text(), re.MULTILINE)
    if found is None:
        sys.exit(f"{constraints} does not pin llama-cpp-python==VERSION")
    return found[1]


def compiler() -> str:
    """Return the C compiler cmake will use, or stop with what to install."""
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and shutil.which(name):
            return name
    sys.exit(
        "no C compiler found: install one (Debian: apt install build-essential; macOS: "
        "xcode-select --install)"
    )


def accepted_flags(cc: str) -> list[str]:
    """Return the AMX switches if this compiler and target know them (x86 with gcc 11 or clang 12
    on)."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return []
    probe = subprocess.run(
        [cc, *AMX_OFF, "-E", "-x", "c", os.devnull], capture_output=True, check=False
    )
    return AMX_OFF if probe.returncode == 0 else []


def processor() -> str:
    """Return what identifies the instruction set: GGML_NATIVE compiles for this very processor."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return " ".join(sorted(flags[1].split())) if flags else platform.machine()


def cache_directory(key: str) -> Path:
    """Return the directory that holds the wheel of this key, under the user's cache directory."""
    if sys.platform == "darwin":
        default = Path.home() / "Library" / "Caches"
    else:
        default = Path.home() / ".cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or default) / "specrun" / "wheels" / key


def build(
    version: str, flags: list[str], cmake_args: list[str], into: Path, nvcc: Path | None
) -> Path:
    """Build the wheel aside and move it into place, so that an interrupted build leaves nothing."""
    into.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="build-", dir=into.parent) as work:
        if nvcc is not None:
            cmake_args = [*cmake_args, *cuda_toolkit.toolkit_arguments(nvcc, Path(work))]
        env = dict(os.environ)
        for name in ("CFLAGS", "CXXFLAGS"):
            env[name] = " ".join([env.get(name, ""), *flags]).strip()
        env["CMAKE_ARGS"] = f"{env.get('CMAKE_ARGS', '')} {shlex.join(cmake_args)}".strip()
        env.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count() or 2))
        duration = cuda_toolkit.DURATION if nvcc else "about 6 minutes on 2 cores"
        say(f"building llama-cpp-python {version} from source, once for this machine ({duration})")
        say(f"  CMAKE_ARGS: {env['CMAKE_ARGS']}")
        say(f"  CFLAGS:     {env['CFLAGS'] or '(none)'}")
        command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-cache-dir"]
        command += ["--no-binary", "llama-cpp-python", "-w", work, f"llama-cpp-python=={version}"]
        if subprocess.run(command, env=env, stdout=sys.stderr, check=False).returncode != 0:
            sys.exit(
                "building llama-cpp-python failed; the lines above say why (a C++ compiler is "
                "needed)"
            )
        (wheel,) = Path(work).glob("*.whl")
        into.mkdir(exist_ok=True)
        return Path(os.replace(wheel, into / wheel.name) or into / wheel.name)


def gpu_arguments(cuda: bool, vulkan: bool, cuda_arch: str | None) -> list[str]:
    """Return cmake's arguments for the GPUs that were asked for, and say what is missing."""
    chosen = []
    if cuda:
        chosen += ["-DGGML_CUDA=ON"]
        chosen += [f"-DCMAKE_CUDA_ARCHITECTURES={cuda_toolkit.architecture(cuda_arch)}"]
    if vulkan:
        if not shutil.which("glslc"):
            sys.exit(
                "Vulkan's shader compiler glslc was not found: install it and Vulkan's headers "
                "(Debian: apt install glslc libvulkan-dev; elsewhere the Vulkan SDK)"
            )
        chosen += ["-DGGML_VULKAN=ON"]
    if platform.system() == "Darwin":
        # llama.cpp's own default where there is such a GPU; said so that it is part of the key.
        chosen += [f"-DGGML_METAL={'ON' if platform.machine() == 'arm64' else 'OFF'}"]
    return chosen


def _ready(version: str, address: str, cuda: bool, vulkan: bool) -> Path | None:
    """Return a ready wheel, fetched now or before; None if it has to be built."""
    kinds = ready_wheel.kinds(cuda, vulkan)
    identity = "\n".join([version, address, *kinds, processor()])
    key = f"llama-cpp-python-{version}-ready-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    kept = sorted(cache_directory(key).glob("*.whl"))
    if kept:
        say(f"llama-cpp-python {version}: using the ready wheel fetched earlier ({kept[0].parent})")
        return kept[0]
    return ready_wheel.find(version, address, kinds, cache_directory(key), say)


def main() -> None:
    """Find or build the wheel and print its path."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--constraints", type=Path, default=Path(__file__).parent.parent / "constraints.txt"
    )
    parser.add_argument(
        "--cuda",
        action="store_true",
        help="build for NVIDIA GPUs; without a CUDA toolkit the compiler comes from the index",
    )
    parser.add_argument(
        "--cuda-arch", help="the GPU's architecture, such as 86; default: as the driver says"
    )
    parser.add_argument(
        "--vulkan", action="store_true", help="build for GPUs with Vulkan (needs glslc)"
    )
    parser.add_argument(
        "--wheels", help="where ready wheels lie, in folders cpu, cu124, metal and vulkan"
    )
    options = parser.parse_args()

    version = pinned_version(options.constraints)
    if options.wheels:
        ready = _ready(version, options.wheels, options.cuda, options.vulkan)
        if ready is not None:
            print(ready)
            return
    flags = accepted_flags(compiler())
    gpus = gpu_arguments(options.cuda, options.vulkan, options.cuda_arch)
    nvcc = cuda_toolkit.provide(say) if options.cuda else None
    cmake_args = CMAKE_ARGS + gpus
    own = [os.environ.get(name, "") for name in ("CFLAGS", "CXXFLAGS", "CMAKE_ARGS")]
    identity = "\n".join(
        [version, platform.system(), platform.machine(), processor(), *flags, *cmake_args, *own]
        + ([] if nvcc is None else [str(nvcc)])
    )
    key = f"llama-cpp-python-{version}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    directory = cache_directory(key)
    wheels = sorted(directory.glob("*.whl"))
    if wheels:
        say(f"llama-cpp-python {version}: using the wheel built earlier ({directory})")
        print(wheels[0])
    else:
        print(build(version, flags, cmake_args, directory, nvcc))


if __name__ == "__main__":
    main()
