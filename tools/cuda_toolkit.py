"""Find what compiles for NVIDIA GPUs, or fetch it: nvcc, headers and cuBLAS.

An installed CUDA toolkit is taken as it is. Without one, NVIDIA's own wheels come from the package
index into this environment, where llama.cpp also finds cuBLAS when it runs. Only the architecture
of the GPU at hand is compiled for: every other would add as much time again.

Only the standard library is used: this runs before anything is installed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path

# The compiler in its parts, which must be of one release; then what is compiled and linked with.
PACKAGES = (
    *(f"nvidia-{part}==13.5.37" for part in ("cuda-nvcc", "nvvm", "cuda-crt", "cuda-runtime")),
    *("nvidia-cuda-cccl==13.3.*", "nvidia-cublas==13.10.*"),
)
SIZE = "573 MB to fetch, 929 MB on disk"
DURATION = "1 to 1.5 hours of one core's time, divided by the cores"
_ARCHITECTURE = re.compile(r"\d{2,3}[af]?")
Say = Callable[[str], None]


def architecture(wanted: str | None) -> str:
    """Return the architecture to compile for, such as "86": as wanted, or the first GPU's."""
    if wanted:
        if not _ARCHITECTURE.fullmatch(wanted):
            sys.exit(f"CUDA_ARCH is {wanted!r}: give a number such as 86 (RTX 30) or 89 (RTX 40)")
        return wanted
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
        return done.stdout.splitlines()[0].strip().replace(".", "")
    except (OSError, subprocess.SubprocessError, IndexError):
        sys.exit(
            "no NVIDIA driver answers here (nvidia-smi), so the GPU's architecture is not known: "
            "name it, as in `make chat CUDA=1 CUDA_ARCH=86` (75 RTX 20, 86 RTX 30, 89 RTX 40, "
            "120 RTX 50)"
        )


def provide(say: Say) -> Path:
    """Return nvcc: an installed toolkit's, or else that of wheels, installed here if need be."""
    installed = _installed_nvcc()
    if installed is not None and _has_cublas(installed):
        say(f"CUDA toolkit: {installed}")
        return installed
    nvcc = _packaged() / "bin" / "nvcc"
    if not nvcc.is_file():
        lacking = f"{installed} has no cuBLAS" if installed else "no CUDA toolkit here"
        say(f"{lacking}: the toolkit's parts come from the package index ({SIZE})")
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
        done = subprocess.run([*command, "--no-deps", *PACKAGES], stdout=sys.stderr, check=False)
        if done.returncode != 0 or not nvcc.is_file():
            sys.exit("the CUDA compiler could not be installed; the lines above say why")
    return nvcc


def toolkit_arguments(nvcc: Path, work: Path) -> list[str]:
    """Return cmake's arguments that name nvcc and, where it came in wheels, what belongs to it.

    `work` is a folder that lives until the build has ended.
    """
    folder = _packaged()
    if not nvcc.is_relative_to(folder):
        return [f"-DCMAKE_CUDA_COMPILER={nvcc}"]
    # Wheels hold libcublas.so.13 and no libcublas.so, by which linkers look for it.
    links = work / "lib"
    links.mkdir()
    for library in sorted((folder / "lib").glob("lib*.so.*")):
        link = links / (library.name.partition(".so.")[0] + ".so")
        if not link.exists():
            link.symlink_to(library)
    cccl = folder / "include" / "cccl"
    includes = [folder / "include", *([cccl] if cccl.is_dir() else [])]
    # What is linked is found from where llama_cpp's libraries lie, in the same environment.
    beside = "-Wl,-rpath,'$ORIGIN/../../nvidia/cu13/lib'"
    return [
        f"-DCMAKE_CUDA_COMPILER={nvcc}",
        f"-DCUDAToolkit_ROOT={folder}",
        f"-DCMAKE_LIBRARY_PATH={links}",
        f"-DCMAKE_CUDA_STANDARD_INCLUDE_DIRECTORIES={';'.join(map(str, includes))}",
        f"-DCMAKE_SHARED_LINKER_FLAGS={beside} -L{links} -L{folder / 'lib'}",
        # So that nothing of the driver is needed to link.
        "-DGGML_CUDA_NO_VMM=ON",
    ]


def _installed_nvcc() -> Path | None:
    homes = (os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH"))
    places = [Path(home, "bin", "nvcc") for home in homes if home]
    places += [Path(found)] if (found := shutil.which("nvcc")) else []
    places.append(Path("/usr/local/cuda/bin/nvcc"))
    return next((place for place in places if place.is_file()), None)


def _has_cublas(nvcc: Path) -> bool:
    """Whether this nvcc finds cuBLAS: distributions package it apart from the compiler.

    nvcc itself is asked, because where its toolkit lies cannot be told from a wrapper's path.
    """
    with tempfile.TemporaryDirectory() as work:
        source = Path(work, "cublas.cu")
        source.write_text("#include <cublas_v2.h>\n")
        try:
            done = subprocess.run(
                [nvcc, "-E", source, "-o", os.devnull], capture_output=True, timeout=60, check=False
            )
        except (OSError, subprocess.SubprocessError):
            return False
    return done.returncode == 0


def _packaged() -> Path:
    """Return the folder in which NVIDIA's wheels of CUDA 13 put their files."""
    return Path(sysconfig.get_paths()["purelib"], "nvidia", "cu13")
