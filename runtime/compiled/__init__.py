"""Loops that evaluate drafts and move cells, in C where there was a compiler.

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

Numbers = npt.NDArray[np.float64]
Ids = npt.NDArray[np.intp]

UnmadeLaw = tuple[bytes, int, int, int]
"""A law that lies among others in bytes: these, its number, how many tokens each has room for, and
how many it has. Law i begins at i times that room, with ids; probabilities follow (law_room.h)."""

DrawnSiblings = dict[int, tuple[int, tuple[int, ...], UnmadeLaw]]
"""Children drawn without replacement, by parent: the first one's node, their tokens, their law."""

Methods = tuple[Callable[[int], object], Callable[[float], bool], Callable[[UnmadeLaw], int]]
"""A noise source's `seek`, its `accept`, and its `choose`, which is given a law that is unmade."""

Draws = tuple[int, int, int, int] | tuple[*Methods, int, int]
"""The key and the stream of an answer's own numbers, or another source's methods; then the position
of the first draw and at how many positions there are draws."""

_ID_BYTES = np.dtype(np.intp).itemsize  # and a probability's: elsewhere there are no compiled laws


def made_law(law: UnmadeLaw) -> Law:
    """Return a law that lies among others."""
    laws, number, room, size = law
    ids = np.frombuffer(laws, np.intp, 2 * room, number * 2 * room * _ID_BYTES)
    return Law(ids[room : room + size].view(np.float64), ids[:size])


def methods_of(noise: NoiseSource) -> Methods:
    """Return what compiled code calls for the decisions of any source."""
    return noise.seek, noise.accept, lambda law: noise.choose(made_law(law))


def draws_of(noise: NoiseSource, start: int, count: int) -> Draws:
    """Return what compiled code draws by: the numbers of a `DraftNoise`, or any source's methods.

    The first draw is for position `start`, and `count` positions follow each other.
    """
    if type(noise) is DraftNoise:
        return (*noise.source, start, count)
    return (*methods_of(noise), start, count)


class Loops(Protocol):
    """The functions in C, over contiguous arrays; their docstrings say what they do."""

    BATCH_BYTES: int
    """Bytes of llama.cpp's batch, as `greedy_chain` knows it."""

    def chain_places(
        self,
        positions: memoryview,
        cells: memoryview,
        mask: memoryview,
        into: memoryview,
        given: npt.NDArray[np.float32],
        position: int,
        count: int,
        below: int,
        seen: int,
        spare: int,
    ) -> None:
        """Write a head's rows, where they stand, and what they see."""

    def places(
        self,
        positions: memoryview,
        cells: memoryview,
        mask: memoryview,
        tokens: memoryview,
        into: memoryview | None,
        given: npt.NDArray[np.float32] | None,
        at: Sequence[int],
        own: Sequence[int],
        named: Sequence[int],
        seen: int,
        sees: npt.NDArray[np.bool_],
        spare: int,
    ) -> None:
        """Write a head's rows of tokens, wherever they stand, and what they see."""

    def follow(
        self,
        addresses: tuple[int, int, int],
        source: int,
        first: int,
        end: int,
        moves: tuple[tuple[int, int, bool], ...],
    ) -> bool:
        """Let sequences take over what they lack of another one's positions."""

    def drawn_chain(
        self,
        addresses: tuple[int, ...],
        token: int,
        place: tuple[int, int],
        ends: frozenset[int],
        noise: Draws,
        laws: list[UnmadeLaw],
        scratch: Numbers,
        cuts: tuple[float, float, float],
    ) -> tuple[int, float, list[int]]:
        """Evaluate a token (-1: it was), draw the next one from the law after it, and so on."""

    def drawn_tree(
        self,
        addresses: tuple[int, ...],
        memory: tuple[int, int, int],
        place: tuple[tuple[int, ...], int, int, int],
        shape: Mapping[int, tuple[int, ...]],
        noise: Draws,
        scratch: Numbers,
        cuts: tuple[float, float, float],
        sequences: tuple[int, list[int]],
        nodes: tuple[list[int], list[int], list[int]],
    ) -> tuple[int, float, tuple[tuple[int, ...], tuple[int, ...], DrawnSiblings, int]]:
        """Evaluate a text's end, draw from the law after it, evaluate what was drawn, and so on."""

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

    def greedy_chain(
        self,
        addresses: tuple[int, ...],
        token: int,
        position: int,
        count: int,
        n_known: int,
        ends: frozenset[int],
    ) -> tuple[int, float, list[int]]:
        """Evaluate a token, then the most likely one after it, and so on: up to `count`."""


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
    wanted += Loops.__annotations__
    return sorted(name for name in wanted if not hasattr(module, name))


LOOPS = _load()
"""The loops, None where they were not compiled."""
