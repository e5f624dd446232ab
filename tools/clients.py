"""Install other people's clients into `.clients`, for `make test-clients`.

By name from the Python and npm indexes, each group into an environment of its own: aider pins the
versions of what it needs. A group that cannot be had is named, and its tests are skipped.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / ".clients"
NPM = ("@openai/codex", "@anthropic-ai/claude-code", "opencode-ai")
TOOLKITS = (
    "llm",
    "openai-agents",
    "pydantic-ai-slim[openai]",
    "litellm",
    "langchain-openai",
    "lm-eval[api]",
)
PYTHONS = {"python": TOOLKITS, "aider": ("aider-chat",)}


def main() -> None:
    """Install each group once; a folder `.clients` that is complete stays as it is."""
    for name, packages in PYTHONS.items():
        _install(name, partial(_python, packages))
    if shutil.which("npm") is None:
        print("npm is not installed: the tests of codex, claude-code and opencode are skipped")
    else:
        _install("npm", lambda place: _run("npm", "install", "--prefix", place, *NPM))


def _install(name: str, install: Callable[[Path], None]) -> None:
    done = FOLDER / f".{name}"
    if done.exists():
        return
    print(f"installing clients into {FOLDER / name} ...", flush=True)
    try:
        (FOLDER / name).mkdir(parents=True, exist_ok=True)
        install(FOLDER / name)
        done.touch()
    except subprocess.CalledProcessError as error:
        shutil.rmtree(FOLDER / name)
        print(f"the clients of {name} cannot be had ({error}): their tests are skipped")


def _python(packages: tuple[str, ...], place: Path) -> None:
    _run(sys.executable, "-m", "venv", place)
    pip = place / "bin" / "python"
    _run(pip, "-m", "pip", "--disable-pip-version-check", "install", "-q", *packages)


def _run(*command: str | Path) -> None:
    subprocess.run([str(part) for part in command], check=True)


if __name__ == "__main__":
    main()
