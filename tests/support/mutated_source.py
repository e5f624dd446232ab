"""Python files with something wrong in them: controls of what is shown of the right ones.

These are the files that Cython compiles. A wrong one is interpreted, whatever the right one is.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from specrun.runtime.laws import law

IS_COMPILED = not str(law.__file__).endswith(".py")
"""Whether the right files are compiled in this process: see `support.interpreted`."""


@dataclass(frozen=True)
class Mutant:
    """A module of which `old`, which stands once in its source, becomes `new`."""

    name: str
    module: ModuleType
    old: str
    new: str

    def __str__(self) -> str:
        return self.name


def source_of(module: ModuleType) -> Path:
    """The Python file that a module was made of."""
    folder, name = Path(str(module.__file__)).parent, module.__name__.rpartition(".")[2]
    return folder / f"{name}.py"


def mutated(mutant: Mutant) -> Any:
    """The module of a mutant's source, which nothing else imports."""
    path = source_of(mutant.module)
    text = path.read_text()
    assert text.count(mutant.old) == 1, f"{mutant}: {path.name} has changed"
    # Dataclasses look their module up by its name: the right module serves.
    wrong = ModuleType(mutant.module.__name__)
    wrong.__file__ = str(path)
    exec(compile(text.replace(mutant.old, mutant.new), str(path), "exec"), wrong.__dict__)
    return wrong
