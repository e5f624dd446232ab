"""Ctrl-C at any line: KeyboardInterrupt before the n-th line that specrun's own code runs."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import specrun.bindings
import specrun.runtime

FOLDERS = tuple(
    str(Path(str(package.__file__)).parent) for package in (specrun.bindings, specrun.runtime)
)


class Interrupted:
    """Raises KeyboardInterrupt before the `at`-th line that runs inside the `with` block.

    0 only counts: `lines` is how many there were. The interrupt ends the block and goes no further;
    `happened` says whether there was one. Lines are those of files that begin with one of `files`.
    """

    def __init__(self, at: int = 0, files: Sequence[str] = FOLDERS) -> None:
        self.lines, self.happened = 0, False
        self._at, self._files = at, tuple(files)

    def __enter__(self) -> Interrupted:
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: object, __: TracebackType | None
    ) -> bool:
        sys.settrace(self._before)
        return self.happened and kind is KeyboardInterrupt

    def _call(self, frame: FrameType, event: str, _: object) -> Any:
        return self._line if frame.f_code.co_filename.startswith(self._files) else None

    def _line(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines == self._at:
                self.happened = True
                self.interrupt()
        return self._line

    def interrupt(self) -> None:
        """What happens before the line."""
        raise KeyboardInterrupt


def sampled_points(n_lines: int, n_points: int, *, whole: bool) -> list[int]:
    """Return the lines to interrupt at: all of 1 to `n_lines`, or a sample, always the same."""
    points = range(1, n_lines + 1)
    if whole or n_lines <= n_points:
        return list(points)
    return sorted(random.Random(n_lines).sample(points, n_points))
