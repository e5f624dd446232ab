"""Names in messages: of the file that an error is about, and of the option that was meant."""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Iterable

from specrun.bindings.errors import MalformedFileError, UnsupportedModelError


class Named(ABC):
    """Something that was read and has a name in messages: a folder, a file, an object in one."""

    @property
    @abstractmethod
    def shown(self) -> str:
        """The name."""

    def malformed(self, problem: str) -> MalformedFileError:
        """Return the error for content that cannot be; `problem` goes on after the name."""
        return MalformedFileError(f"{self.shown} {problem}")

    def unsupported(self, problem: str) -> UnsupportedModelError:
        """Return the error for content that is not known here or to llama.cpp."""
        return UnsupportedModelError(f"{self.shown} {problem}")


def nearest(typed: str, known: Iterable[str]) -> str:
    """Return " (did you mean X?)" for the nearest `known` name, "" if none is near."""
    found = difflib.get_close_matches(typed, list(known), n=1, cutoff=0.5)
    return f" (did you mean {found[0]}?)" if found else ""
