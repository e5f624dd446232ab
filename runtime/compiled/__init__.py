"""Inner loops in C, where there was a compiler when specrun was installed.

Whoever uses a loop has the same in Python beside it: both give the same bits, and a law of a few
dozen tokens is not worth a numpy call for every step. Only `log_mass` rounds otherwise than numpy's
exponentials: it decides thresholds of rules that are not exact, and no draw.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt

_logger = logging.getLogger(__name__)

Numbers = npt.NDArray[np.float64]
Ids = npt.NDArray[np.intp]

Matrix = memoryview | tuple[memoryview, tuple[int, ...]]
"""All rows of an evaluation, [rows, n_vocab]; with the places of the wanted ones among them."""

RowSource = Callable[[int], npt.NDArray[np.float32]] | Matrix
"""The rows of an evaluation: a function of their numbers, or a matrix."""

UnmadeLaw = tuple[bytes, int, int, int]
"""A law that lies among others in bytes: these, its number, how many tokens each has room for, and
how many it has. Law i begins at i times that room, with ids; probabilities follow (law_room.h)."""

DrawnSiblings = dict[int, tuple[int, tuple[int, ...], UnmadeLaw]]
"""Children drawn without replacement, by parent: the first one's node, their tokens, their law."""

Methods = tuple[Callable[[int], object], Callable[[float], bool], Callable[[UnmadeLaw], int]]
"""A noise source's `seek`, its `accept`, and its `choose`, which is given a law that is unmade."""

Decisions = tuple[int, int] | Methods
"""What decides: the key and the stream of an answer's own numbers, or another source's methods."""

Draws = tuple[int, int, int, int] | tuple[*Methods, int, int]
"""As `Decisions`, then the position of the first draw and at how many positions there are draws."""

MOST_RANKED = 256
"""The most entries that `Loops.truncate` ranks."""


class Loops(Protocol):
    """The functions in C, over contiguous arrays; their docstrings say what they do."""

    BATCH_BYTES: int
    """Bytes of llama.cpp's batch, as `greedy_chain` knows it."""

    def truncate(
        self,
        row: npt.NDArray[np.float32],
        ids: Ids,
        probs: Numbers,
        exp: np.ufunc,
        share: float,
        lowest: float,
        temperature: float,
    ) -> int:
        """Make the law of a row's highest; return how many truncation leaves."""

    def truncate_rows(
        self,
        rows: list[npt.NDArray[np.float32]],
        names: npt.NDArray[np.int32] | None,
        ids: Ids,
        probs: Numbers,
        array: Numbers,
        cuts: tuple[np.ufunc, float, float, float],
    ) -> list[int]:
        """Make the laws of several rows' highest, side by side; return their sizes."""

    def scale_to_one(self, weights: Numbers) -> float:
        """Divide by the sum, unless that is not positive."""

    def place_at(self, probs: Numbers, uniform: float) -> int:
        """Return the place at a number of the cumulative law."""

    def draw_distinct(
        self, probs: Numbers, ids: Ids | None, count: int, noise: Decisions
    ) -> list[int]:
        """Draw up to `count` tokens, each from what the earlier ones left.

        Numbers are a position's own: its word, and the number of the first draw.
        """

    def race(self, probs: Numbers, ids: Ids | None, key: int) -> int:
        """Return the token that arrives first."""

    def left_over(
        self,
        probs: Numbers,
        ids: Ids,
        draft_probs: Numbers,
        draft_ids: Ids,
        share: float,
        out: Numbers,
    ) -> None:
        """Write max(0, share P - Q)."""

    def interleave(
        self,
        row: npt.NDArray[np.float32],
        lowest: float,
        draft_probs: Numbers,
        draft_ids: Ids,
        target_probs: Numbers,
        target_ids: Ids,
        probs: Numbers,
        ids: Ids,
    ) -> int:
        """Write the draft's law of tokens that reach `lowest`, and the target's of the rest."""

    def join(
        self,
        draft_probs: Numbers,
        draft_ids: Ids,
        target_probs: Numbers,
        target_ids: Ids,
        draft: Numbers,
        target: Numbers,
        ids: Ids,
    ) -> int:
        """Write two laws side by side; return of how many tokens."""

    def distance(self, probs: Numbers, ids: Ids, draft_probs: Numbers, draft_ids: Ids) -> float:
        """Return the sum of max(0, P - Q)."""

    def highest(self, row: npt.NDArray[np.float32]) -> float:
        """Return the highest entry."""

    def log_mass(self, row: npt.NDArray[np.float32], highest: float) -> tuple[float, float]:
        """Return, of x = entry - highest, the sums of exp(x) and x exp(x)."""

    def rough_mass(self, row: npt.NDArray[np.float32]) -> tuple[float, float, float]:
        """Return the highest, and the sums of `log_mass` within 0.01 %."""

    def place_of(self, token: int, ids: Ids) -> int:
        """Return the place of a token, -1 if it is not there."""

    def walk_highest(
        self,
        logits: RowSource,
        tokens: tuple[int, ...],
        draws: Callable[[int], tuple[tuple[int, object], ...] | None],
    ) -> tuple[tuple[int, ...], int, bool] | None:
        """Walk down a tree of point masses as the highest entries of its rows say."""

    def verify(
        self,
        logits: RowSource,
        tokens: tuple[int, ...],
        draws: Callable[[int], tuple[object, ...] | None],
        array: Numbers,
        cuts: tuple[np.ufunc, float, float, float],
        noise: Decisions,
        position: int,
        as_block: bool,
    ) -> tuple[tuple[int, ...], int, bool] | None:
        """Walk down a tree of draws as an exact rule does, with laws made of its rows."""

    def digest(self, *numbers: int) -> int:
        """Return BLAKE2b's digest of 8 bytes of up to 16 whole numbers of 64 bits."""

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
        cuts: tuple[np.ufunc, float, float, float],
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
        cuts: tuple[np.ufunc, float, float, float],
        sequences: tuple[int, list[int]],
        nodes: tuple[list[int], list[int], list[int]],
    ) -> tuple[int, float, tuple[tuple[int, ...], tuple[int, ...], DrawnSiblings, int]]:
        """Evaluate a text's end, draw from the law after it, evaluate what was drawn, and so on."""

    def drawn_depth(
        self,
        rows: RowSource,
        names: npt.NDArray[np.int32] | None,
        level: tuple[list[tuple[int, ...]], list[int], int],
        shape: Mapping[int, tuple[int, ...]],
        noise: Draws,
        scratch: Numbers,
        cuts: tuple[np.ufunc, float, float, float],
        tree: tuple[list[int], list[int], DrawnSiblings],
    ) -> tuple[list[tuple[int, ...]], list[int], list[int], list[int]] | None:
        """Draw below a depth's nodes, of which the rows are given; say what is evaluated next."""

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
