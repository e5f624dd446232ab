"""The compiled loops with something wrong in them: controls of what is shown of the right ones."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
import shlex
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from specrun.runtime import compiled

SOURCES = Path(compiled.__file__).parent
_INCLUDED = re.compile(r'^#include "(.*)"', re.MULTILINE)


@dataclass(frozen=True)
class Mutant:
    """What `old`, which stands once in a source, becomes."""

    name: str
    source: str
    old: str
    new: str

    def __str__(self) -> str:
        return self.name


class MutantBuilder:
    """Compiles the sources once, and for every mutant again what its source goes into."""

    def __init__(self, folder: Path) -> None:
        command = sysconfig.get_config_var("CC") or "cc"
        self._compiler, self._folder = shlex.split(command), folder
        self._built: dict[Mutant, ModuleType] = {}
        if shutil.which(self._compiler[0]) is None:
            pytest.skip(f"no compiler: {command}")
        for path in SOURCES.glob("*.[ch]"):
            shutil.copy(path, folder)
        for path in folder.glob("*.c"):
            self._compile(path, folder)

    def build(self, mutant: Mutant) -> ModuleType:
        """Return the loops with a mutant's source in place of ours."""
        if mutant not in self._built:
            self._built[mutant] = self._build(mutant)
        return self._built[mutant]

    def _build(self, mutant: Mutant) -> ModuleType:
        folder = self._folder / re.sub(r"\W+", "-", mutant.name)
        folder.mkdir()
        for path in self._folder.glob("*.[cho]"):
            shutil.copy(path, folder)
        changed = folder / mutant.source
        text = changed.read_text()
        assert text.count(mutant.old) == 1, f"{mutant}: {mutant.source} has changed"
        changed.write_text(text.replace(mutant.old, mutant.new))
        for path in folder.glob("*.c"):
            if mutant.source in _sources_of(path):
                self._compile(path, folder)
        return self._load(folder)

    def _compile(self, path: Path, folder: Path) -> None:
        include = "-I" + sysconfig.get_path("include")
        options = ["-c", "-O0", "-fPIC", "-w", "-ffp-contract=off", include]
        self._run(*options, str(path), "-o", str(folder / f"{path.stem}.o"))

    def _load(self, folder: Path) -> ModuleType:
        library = folder / "_loops.so"
        shared = shlex.split(sysconfig.get_config_var("LDSHARED") or "cc -shared")[1:]
        self._run(*shared, *map(str, folder.glob("*.o")), "-lm", "-o", str(library))
        loader = importlib.machinery.ExtensionFileLoader("_loops", str(library))
        spec = importlib.util.spec_from_loader("_loops", loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        return module

    def _run(self, *arguments: str) -> None:
        done = subprocess.run([*self._compiler, *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def _sources_of(path: Path) -> set[str]:
    """Return a source and all that it includes."""
    found, open_paths = set[str](), [path]
    while open_paths:
        source = open_paths.pop()
        if source.name not in found:
            found.add(source.name)
            included = _INCLUDED.findall(source.read_text())
            open_paths += [source.parent / name for name in included]
    return found
