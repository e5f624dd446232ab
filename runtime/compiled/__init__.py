"""Loops that move cells, in C where there was a compiler.

Code that uses a loop has the same in Python beside it, with the same results.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt

from specrun.runtime.laws.law import Law
from specrun.runtime.laws.noise import DraftNoise, NoiseSource

_logger = logging.getLogger(__name__)


class Loops(Protocol):
    """The functions in C, over contiguous arrays; their docstrings say what they do."""

    def follow(
        self,
        addresses: tuple[int, int, int],
        source: int,
        first: int,
        end: int,
        moves: tuple[tuple[int, int, bool], ...],
    ) -> bool:
        """Let sequences take over what they lack of another one's positions."""

    def keep_path(
        self,
        memory: tuple[int, int, int],
        nodes: tuple[list[int], list[int], list[int]],
        text: list[int],
        base: int,
        main: int,
        synced: list[int],
    ) -> tuple[int, int] | None:
        """Keep the nodes that spell a text's beginning; drop the others from a memory."""


def _load() -> Loops | None:
    if np.dtype(np.intp).itemsize != 8:
        return None  # ids are read as numbers of 64 bits
    try:
        found = importlib.import_module("specrun.runtime.compiled._loops")
    except ImportError:
        return None
    missing = missing_loops(found)
    if missing:  # of a checkout that was compiled before it was brought up to date
        names = ", ".join(missing)
        _logger.warning(
            "the compiled loops are older than specrun and lack %s, so Python's are used, which "
            "are slower: install specrun again (pip install -e .)",
            names,
        )
        return None
    return cast(Loops, found)


def missing_loops(module: object) -> list[str]:
    """Return what a compiled module lacks of `Loops`."""
    wanted = [name for name in vars(Loops) if not name.startswith("_")]
    return sorted(name for name in wanted if not hasattr(module, name))


LOOPS = _load()
"""The loops, None where they were not compiled."""
