"""The bytes of a vocabulary as a tree, over which grammars find the tokens that may follow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]
Bits = npt.NDArray[np.uint64]

# Places within a character of UTF-8: which bytes may come there, and where they lead.
BETWEEN, _WRONG = 0, 8
UTF8: tuple[tuple[tuple[int, int, int], ...], ...] = (
    (
        (0x00, 0x7F, 0),
        (0xC2, 0xDF, 1),
        (0xE0, 0xE0, 3),
        (0xE1, 0xEC, 2),
        (0xED, 0xED, 4),
        (0xEE, 0xEF, 2),
        (0xF0, 0xF0, 5),
        (0xF1, 0xF3, 6),
        (0xF4, 0xF4, 7),
    ),
    ((0x80, 0xBF, 0),),
    ((0x80, 0xBF, 1),),
    ((0xA0, 0xBF, 1),),
    ((0x80, 0x9F, 1),),
    ((0x90, 0xBF, 2),),
    ((0x80, 0xBF, 2),),
    ((0x80, 0x8F, 2),),
    (),
)
OTHERS, NEVER = np.uint64(1 << 62), np.uint64(1 << 63)
"""The bit of characters that are not ASCII; and that of bytes which no state passes over."""
MOST_BITS = 62


def _utf8_table() -> npt.NDArray[np.uint8]:
    table = np.full((len(UTF8), 256), _WRONG, np.uint8)
    for place, ranges in enumerate(UTF8):
        for low, high, following in ranges:
            table[place, low : high + 1] = following
    return table


class TokenTree:
    """The bytes of a vocabulary's tokens as a tree, in order of depth; node 0 is the root."""

    def __init__(self, spelled: Sequence[bytes], without: Iterable[int]) -> None:
        n_tokens = len(spelled)
        lengths = np.fromiter(map(len, spelled), np.int64, n_tokens)
        text = np.frombuffer(b"".join(spelled) + b"\0", np.uint8)
        begins = lengths.cumsum() - lengths
        self.has_text = (lengths > 0) & (text[begins] > 0)
        """By token: whether it is a text for llama.cpp, where NUL ends one."""
        lengths[list(without)] = 0
        self.node_of = np.zeros(n_tokens, np.int32)
        """By token: the node that its bytes lead to; the root for those without any."""
        parents, bytes_, alive = [np.zeros(1, np.int64)], [np.zeros(1, np.uint8)], lengths > 0
        utf8, places = _utf8_table(), [np.zeros(1, np.uint8)]
        self._levels = [(0, 1)]
        while alive.any():
            depth, n_nodes = len(self._levels) - 1, self._levels[-1][1]
            tokens = alive.nonzero()[0]
            keys = self.node_of[tokens].astype(np.int64) << 8 | text[begins[tokens] + depth]
            found, inverse = np.unique(keys, return_inverse=True)
            self.node_of[tokens] = n_nodes + inverse
            parents.append(found >> 8)
            bytes_.append((found & 255).astype(np.uint8))
            places.append(utf8[places[-1][parents[-1] - self._levels[-1][0]], bytes_[-1]])
            self._levels.append((n_nodes, n_nodes + len(found)))
            alive &= lengths > depth + 1
        self.bytes, self._parents = np.concatenate(bytes_), np.concatenate(parents)
        self._is_wrong = np.concatenate(places) == _WRONG
        self.n_children = np.bincount(self._parents[1:], minlength=len(self.bytes))
        self.first_child = 1 + self.n_children.cumsum() - self.n_children
        self._sort()

    def _sort(self) -> None:
        """Put the tokens in an order in which those below a node lie side by side."""
        texts = self.node_of.nonzero()[0]
        own = np.bincount(self.node_of[texts], minlength=len(self.bytes))
        self.n_below = own.copy()
        for begin, end in reversed(self._levels[1:]):
            np.add.at(self.n_below, self._parents[begin:end], self.n_below[begin:end])
        self.first_below = np.zeros_like(own)
        for begin, end in self._levels[1:]:
            before = self.n_below[begin:end].cumsum() - self.n_below[begin:end]
            parents = self._parents[begin:end]
            before -= before[self.first_child[parents] - begin]
            self.first_below[begin:end] = self.first_below[parents] + own[parents] + before
        order = np.argsort(self.first_below[self.node_of[texts]], kind="stable")
        self.sorted = texts[order]

    def bits_below(self, bit_of: Bits) -> Bits:
        """Return for each node the bits of all bytes below it, by those of the bytes."""
        own = bit_of[self.bytes]
        own[self._is_wrong] = NEVER
        found = np.zeros(len(own), np.uint64)
        for begin, end in reversed(self._levels[1:]):
            np.bitwise_or.at(found, self._parents[begin:end], own[begin:end] | found[begin:end])
        return found
