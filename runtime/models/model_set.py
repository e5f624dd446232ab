"""Model sets: folders with a target, the drafters made for it, and a file that names them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specrun.bindings.errors import MalformedFileError
from specrun.bindings.files import atomic_path
from specrun.runtime.language import METHODS, quoted

SET_FILE = "specrun.json"
"""The name of the file that makes a folder a model set."""


@dataclass(frozen=True, slots=True)
class ModelSet:
    """A target's file, and those of its drafters, each with the method that drafts with it."""

    folder: Path
    model: Path
    drafters: Sequence[tuple[str, Path]]

    @property
    def drafter(self) -> str:
        """The expression of its drafters: of several, the fastest is found while they run."""
        members = [f"{method}({quoted(str(path.resolve()))})" for method, path in self.drafters]
        return members[0] if len(members) == 1 else f"auto({', '.join([*members, 'none'])})"

    @property
    def command(self) -> str:
        """The command that chats with it."""
        return f"specrun chat -m {_shell(str(self.folder.resolve()))}"

    def write(self, *, force: bool = False) -> Path:
        """Write the file that names them, whole or not at all; return its path."""
        place, model = self.folder / SET_FILE, _shell(str(self.model.resolve()))
        content = {
            "model": self._named(self.model),
            "drafters": [{"method": m, "file": self._named(path)} for m, path in self.drafters],
            "run": [self.command, f"specrun chat -m {model} --drafter {_shell(self.drafter)}"],
        }
        with atomic_path(place, force=force) as aside:
            aside.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        return place

    def _named(self, path: Path) -> str:
        """Return the name of a file in the folder, the whole path of another."""
        inside = path.parent.resolve() == self.folder.resolve()
        return path.name if inside else str(path.resolve())


def is_set(folder: Path) -> bool:
    """Return whether a path is a folder with a set's file."""
    return (folder / SET_FILE).is_file()


def read_set(folder: Path) -> ModelSet:
    """Return the set in a folder; raises MalformedFileError for a file that cannot be one's."""
    place = folder / SET_FILE
    try:
        content = json.loads(place.read_text("utf-8"))
        model, listed = content["model"], content["drafters"]
        drafters = [(str(each["method"]), folder / str(each["file"])) for each in listed]
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = "does not name a model and its drafters: convert it again"
        raise MalformedFileError(f"{place} {problem}") from error
    unknown = next((method for method, _ in drafters if method not in METHODS), None)
    if unknown is not None or not isinstance(model, str) or not drafters:
        raise MalformedFileError(f"{place} names {unknown or 'no'} drafter that is known here")
    return ModelSet(folder, folder / model, drafters)


def _shell(text: str) -> str:
    """Return a word of a command line, quoted if it has to be."""
    if os.name == "nt":
        return f'"{text}"' if " " in text else text
    import shlex

    return shlex.quote(text)
