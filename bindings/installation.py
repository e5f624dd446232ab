"""The installation (its sources, pip or pipx), for messages with commands to run."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

_EXTRA = re.compile(r"(?P<package>[^;]+?)\s*;\s*extra\s*==\s*['\"](?P<extra>\w+)['\"]")
_OWN = re.compile(r"specrun\[(?P<extra>\w+)\]")
_LLAMA = "llama-cpp-python"


def source_folder() -> Path | None:
    """Return the folder of the sources that are run; None: an installed copy is."""
    folder = Path(__file__).resolve().parent.parent
    return folder if (folder / "pyproject.toml").is_file() else None


def install_command(packages: list[str]) -> str:
    """Return the command that installs packages in specrun's environment."""
    listed = " ".join(map(shlex.quote, packages))
    # pipx leaves this file in each of its environments, wherever PIPX_HOME puts them.
    if (Path(sys.prefix) / "pipx_metadata.json").is_file():
        return f"pipx inject specrun {listed}"
    return f"{shlex.quote(sys.executable)} -m pip install {listed}"


def extra_command(extra: str) -> str:
    """Return the command that installs the packages of an extra of pyproject.toml."""
    if source_folder() is not None:
        return f"run pip install -c constraints.txt -e '.[{extra}]' in specrun's folder"
    return f"run {install_command(_packages(extra))}"


def build_command(make: str, *settings: str) -> str:
    """Return the command that builds llama.cpp with CMake settings: `make` in specrun's folder."""
    if source_folder() is not None:
        return f"`{make}`"
    from importlib.metadata import version  # slow to import

    options = " ".join(f"-D{setting}" for setting in settings)
    exact = f"{_LLAMA}=={version(_LLAMA)}"
    again = f"--force-reinstall --no-deps --no-cache-dir --no-binary {_LLAMA} {exact}"
    return (
        f"`CMAKE_ARGS={shlex.quote(options)} {shlex.quote(sys.executable)} -m pip install {again}`"
    )


def _packages(extra: str) -> list[str]:
    """Return the packages of an extra, as the installed metadata has them."""
    from importlib.metadata import requires  # slow to import

    found: list[str] = []
    for text in requires("specrun") or ():
        match = _EXTRA.fullmatch(text)
        if match is None or match["extra"] != extra:
            continue
        own = _OWN.fullmatch(match["package"])
        found += _packages(own["extra"]) if own else [match["package"]]
    return list(dict.fromkeys(found))
