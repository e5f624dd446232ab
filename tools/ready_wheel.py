"""Look for a ready llama-cpp-python wheel, and try it before it is used.

The project publishes an index of wheels for each kind of device: `cpu`, `metal`, `vulkan`, and
`cu124` and the like, which is CUDA 12.4. Its README has the address, which is a setting here.

Only the standard library is used: this runs before anything is installed.
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

Say = Callable[[str], None]
_OLDEST_MINOR = 0
_LIBRARIES = ("libllama.so", "libllama.dylib", "llama.dll")
_TRIAL = """
import ctypes, sys

library = ctypes.CDLL(sys.argv[1])
library.llama_backend_init()
library.llama_print_system_info.restype = ctypes.c_char_p
print(library.llama_print_system_info().decode())
"""


def kinds(cuda: bool, vulkan: bool) -> list[str]:
    """Return the names of indexes that could fit this machine, the best first."""
    if vulkan:
        return ["vulkan"]
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        return ["metal"]
    if not cuda:
        return ["cpu"]
    version = _cuda_version()
    if version is None:
        return []
    major, minor = version  # a driver runs what was made for earlier minor versions, too
    return [f"cu{major}{number}" for number in range(minor, _OLDEST_MINOR - 1, -1)]


def _cuda_version() -> tuple[int, int] | None:
    """Return the newest CUDA version that the driver runs; None without a driver."""
    try:
        done = subprocess.run(
            ["nvidia-smi"], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"CUDA Version:\s*(\d+)\.(\d+)", done.stdout)
    return None if found is None else (int(found[1]), int(found[2]))


def find(version: str, address: str, kinds: list[str], into: Path, say: Say) -> Path | None:
    """Return a ready wheel of this version that loads here, kept in `into`; None without one."""
    for kind in kinds:
        index = f"{address.rstrip('/')}/{kind}"
        with tempfile.TemporaryDirectory(prefix="ready-") as work:
            # Isolated: this index alone counts, not those of the user's settings.
            command = [sys.executable, "-m", "pip", "--isolated", "download", "--no-deps"]
            command += ["--only-binary", ":all:", "--timeout", "15", "--retries", "1"]
            command += ["--disable-pip-version-check", "-q", "-d", work]
            command += ["--index-url", index, f"llama-cpp-python=={version}"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            wheels = sorted(Path(work).glob("*.whl"))
            if done.returncode != 0 or not wheels:
                say(f"no ready wheel of llama-cpp-python {version} in {index}")
                continue
            problem = trouble(wheels[0])
            if problem:
                say(f"the ready wheel in {index} does not load here: {problem}")
                continue
            into.mkdir(parents=True, exist_ok=True)
            kept = into / wheels[0].name
            kept.write_bytes(wheels[0].read_bytes())
            say(f"a ready wheel of llama-cpp-python {version}, from {index}")
            return kept
    return None


def trouble(wheel: Path) -> str:
    """Return why the library in a wheel cannot be used here; "" if it loads and begins."""
    with tempfile.TemporaryDirectory(prefix="trial-") as work:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(work)
        found = [path for path in Path(work).rglob("*llama.*") if path.name in _LIBRARIES]
        if not found:
            return "it holds no libllama"
        command = [sys.executable, "-c", _TRIAL, str(found[0])]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode < 0:
        return f"it ends with signal {-done.returncode}"
    return done.stderr.strip().rpartition("\n")[2] if done.returncode else ""
