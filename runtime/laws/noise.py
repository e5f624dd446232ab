# cython: annotation_typing=False, cdivision=True
"""Random draws for acceptance and drafting, hashed from an answer's key and a token's position.

The token at position p is decided once, by draws keyed with (key, p). Plain decoding and every
drafter of point masses therefore make the same choice from the same distribution: their texts agree
at any temperature. An answer's key is a hash of (seed, index, prompt): with the seed alone, a text
that comes back in a prompt at other positions would meet the numbers that made it, and repeat
itself.

This file is compiled by Cython if there is a compiler, and interpreted elsewhere, as `law.py`.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from specrun.runtime.laws.law import SHORT, Law, split_mix, uniform_of

_WORD = 0xFFFFFFFFFFFFFFFF
_IS_COMPILED = not __file__.endswith(".py")


class NoiseSource(Protocol):
    """All that rules and drafters may draw from; tests pass one that enumerates every outcome."""

    def seek(self, position: int) -> None:
        """Turn to the draws that decide the token at `position`."""

    def accept(self, probability: float) -> bool:
        """Return True with the given probability."""

    def choose(self, law: Law) -> int:
        """Return a token drawn from `law`."""

    def for_drafting(self, round_start: int) -> NoiseSource:
        """Return an independent source for drafts of the round that starts at a position.

        A position may be drafted in several rounds, so its draws are keyed by the round as well.
        """


class SeededNoise:
    """Counter-based noise: every draw is a hash of (key, stream, position, number of the draw).

    A source keyed by a counter has no state to save and needs no order of draws. Of `key`, any
    whole number, 64 bits count.
    """

    def __init__(self, key: int, stream: int = 0) -> None:
        self._key, self._stream = key & _WORD, stream
        self._position = self._accepts = self._choices = self._word = 0
        self._has_word = False

    @staticmethod
    def for_answer(seed: int, prompt: Sequence[int], index: int = 0) -> SeededNoise:
        """Return the noise of the answer number `index` to a prompt's tokens.

        Another seed, index or prompt gives independent draws: the keys are hashes of 64 bits.
        """
        # As text, because a seed may have any number of digits; the blanks end seed and index.
        digest = hashlib.blake2b(f"{seed} {index} ".encode(), digest_size=8)
        digest.update(np.array(prompt, "<i8").tobytes())
        return SeededNoise(int.from_bytes(digest.digest(), "little"))

    @property
    def source(self) -> tuple[int, int]:
        """The key and the stream: with a position, all that its draws are made of."""
        return self._key, self._stream_number()

    def seek(self, position: int) -> None:
        """Turn to the draws of `position`."""
        self._position = position
        self._accepts = self._choices = 0
        self._has_word = False

    def accept(self, probability: float) -> bool:
        """Return True with the given probability, by the next acceptance draw of this position."""
        # Ratios come unclipped: this is the min(1, P/Q) of the papers.
        if probability >= 1.0:
            return True
        self._accepts += 1
        # Tests take the odd numbers, choices the even ones: none decides twice.
        return uniform_of(self._hash(2 * self._accepts + 1)) < probability

    def choose(self, law: Law) -> int:
        """Return a token of `law`, the winner of a race between its tokens.

        Token i arrives after an exponential time of rate probs[i], made from a hash of the position
        and i; the first to arrive is a draw from the distribution (Gumbel-max in other words).
        Backends round batches differently, and one uniform number on the cumulative distribution
        would feel every such difference; here the choice changes with about the probability by
        which the distributions differ, and a token that truncation drops or adds changes no other
        token's time.
        """
        if law.size == 1:
            return law.token_at(0.0)
        self._choices += 1
        return law.first_to_arrive(self._hash(2 * self._choices))

    def for_drafting(self, round_start: int) -> DraftNoise:
        """Return the drafting stream of the round that starts at `round_start`.

        It depends on this source's own stream: a drafter that drafts for a drafter draws other
        numbers.
        """
        return DraftNoise(self._key, self._stream_number(), round_start)

    def _stream_number(self) -> int:
        return self._stream

    def _hash(self, index: int) -> int:
        """Return 64 bits: number `index` of the position's own SplitMix64 sequence."""
        return split_mix(self._position_word(), index)

    def _position_word(self) -> int:
        if not self._has_word:
            # A digest once a position: its further numbers are SplitMix64's, which cost less.
            self._word = digest(3, self._key, self._stream_number() & _WORD, self._position & _WORD)
            self._has_word = True
        return self._word


class DraftNoise(SeededNoise):
    """Noise for drafts, which no run has to repeat: a uniform number on cumulative probabilities.

    It is that of the round that starts at `round_start`, for the drafts of a drafter that draws
    from `stream`.
    """

    def __init__(self, key: int, stream: int, round_start: int) -> None:
        super().__init__(key, stream)
        self._round_start, self._has_stream = round_start, False

    def _stream_number(self) -> int:
        # Only if a draw needs it: most rounds' drafts are point masses, which draw nothing.
        if not self._has_stream:
            number = digest(2, self._stream & _WORD, self._round_start & _WORD, 0)
            self._stream = number - (1 << 64) if number >> 63 else number  # with a sign
            self._has_stream = True
        return self._stream

    def choose(self, law: Law) -> int:
        """Return a token of `law` by the next choice draw of this position."""
        if law.size == 1:
            return law.token_at(0.0)
        self._choices += 1
        return law.token_at(uniform_of(self._hash(2 * self._choices)))

    def choose_distinct(self, law: Law, count: int) -> list[int]:
        """Return up to `count` tokens, each drawn from the rest of `law` after the earlier ones.

        The same numbers give the same tokens as `choose` and `Law.without` in turn, and in less
        time.
        """
        if law.size > SHORT:
            return choose_in_turn(self, law, count)
        tokens = law.draw_distinct(count, self._position_word(), self._choices + 1)
        # A distribution of one token needs no number, here as in `choose`.
        self._choices += len(tokens) if law.size > 1 else 0
        return tokens


def choose_in_turn(noise: NoiseSource, law: Law, count: int) -> list[int]:
    """Return up to `count` different tokens, each chosen from the rest after the earlier ones."""
    tokens: list[int] = []
    while True:
        tokens.append(noise.choose(law))
        if len(tokens) == count:
            return tokens
        rest = law.without(tokens[-1])
        if rest is law:  # the distribution was sure of this token: it is exhausted
            return tokens
        law = rest


# == BLAKE2b (RFC 7693) of one block, without a key ================================================


def digest(count: int, first: int, second: int, third: int) -> int:
    """Return BLAKE2b's digest of 8 bytes of the first `count` numbers of 64 bits, as a number."""
    if _IS_COMPILED:  # without hashlib's objects, which take several times as long
        return blake2b(count, first, second, third)
    packed = struct.pack("<QQQ", first, second, third)[: 8 * count]
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


_START = (
    *(0x6A09E667F3BCC908, 0xBB67AE8584CAA73B, 0x3C6EF372FE94F82B, 0xA54FF53A5F1D36F1),
    *(0x510E527FADE682D1, 0x9B05688C2B3E6C1F, 0x1F83D9ABFB41BD6B, 0x5BE0CD19137E2179),
)
_ORDER = bytes(
    int(place, 16)
    for row in (
        *("0123456789abcdef", "ea489fd61c02b753", "b8c052fdae367194"),
        *("7931dcbe265a40f8", "905724afe1bc683d", "2c6a0b834d75fe19"),
        *("c51fed4a0763928b", "db7ec13950f4862a", "6fe9b308c2d714a5"),
        "a2847615fb9e3cd0",
    )
    for place in row
)


def blake2b(count: int, first: int, second: int, third: int) -> int:
    """Return the same as `digest`, by the loops of the standard."""
    m = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    v = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    m[0], m[1], m[2] = first, second, third
    for i in range(8):
        v[i] = v[i + 8] = _start(i)
    v[0] ^= 0x01010008  # a digest of 8 bytes, no key, one leaf
    start = v[0]
    v[12] ^= 8 * count  # bytes so far,
    v[14] ^= _WORD  # and these are the last
    for turn in range(12):
        at = turn % 10 * 16
        for i in range(8):  # four columns, then four diagonals
            a, shift = i % 4, i // 4
            b, c, d = 4 + (a + shift) % 4, 8 + (a + 2 * shift) % 4, 12 + (a + 3 * shift) % 4
            _mix(v, a, b, c, d, m[_ORDER[at + 2 * i]], m[_ORDER[at + 2 * i + 1]])
    return start ^ v[0] ^ v[8]


def _start(place: int) -> int:
    return _START[place]


def _mix(v: list[int], a: int, b: int, c: int, d: int, x: int, y: int) -> None:
    v[a] = (v[a] + v[b] + x) & _WORD
    v[d] = _turned(v[d] ^ v[a], 32)
    v[c] = (v[c] + v[d]) & _WORD
    v[b] = _turned(v[b] ^ v[c], 24)
    v[a] = (v[a] + v[b] + y) & _WORD
    v[d] = _turned(v[d] ^ v[a], 16)
    v[c] = (v[c] + v[d]) & _WORD
    v[b] = _turned(v[b] ^ v[c], 63)


def _turned(word: int, bits: int) -> int:
    return (word >> bits | word << (64 - bits)) & _WORD
