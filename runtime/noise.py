"""Where randomness comes from: two drawing methods, keyed so that a draw depends on its position alone.

The token at position p is decided once, by draws keyed with (seed, p). Plain decoding and every drafter of
point masses therefore make the same choice from the same law: their texts agree at any temperature.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Protocol

from specrun.runtime.law import Law

__all__ = ["NoiseSource", "SeededNoise"]


class NoiseSource(Protocol):
    """All that rules and drafters may draw from; tests pass one that enumerates every outcome."""

    def seek(self, position: int) -> None:
        """Turn to the draws that decide the token at `position`."""

    def accept(self, probability: float) -> bool:
        """Return True with the given probability."""

    def choose(self, law: Law) -> int:
        """Return a token drawn from `law`."""

    def for_drafting(self, round_start: int) -> NoiseSource:
        """Return an independent source for what is drafted in the round that starts at a position.

        A position may be drafted in several rounds, so its draws are keyed by the round as well.
        """


class SeededNoise:
    """Counter-based noise: uniform numbers are a hash of (seed, stream, position, kind, index).

    blake2b keyed by a counter has no state to save, needs no order of draws, and costs about a
    microsecond; 53 bits of the digest make a number in [0, 1).
    """

    def __init__(self, seed: int, stream: int = 0) -> None:
        self.seed = seed & 0xFFFFFFFFFFFFFFFF
        self._stream = stream
        self._position = 0
        self._accepts = 0
        self._choices = 0

    def seek(self, position: int) -> None:
        """Turn to the draws of `position`."""
        self._position = position
        self._accepts = 0
        self._choices = 0

    def accept(self, probability: float) -> bool:
        """Return True with the given probability, by the next acceptance draw of this position."""
        if probability >= 1.0:
            return True
        self._accepts += 1
        return self._uniform(2 * self._accepts + 1) < probability

    def choose(self, law: Law) -> int:
        """Return a token of `law` by the next choice draw of this position."""
        if len(law.probs) == 1:
            return law.token_at(0.0)
        self._choices += 1
        return law.token_at(self._uniform(2 * self._choices))

    def for_drafting(self, round_start: int) -> SeededNoise:
        """Return the drafting stream of the round that starts at `round_start`."""
        return SeededNoise(self.seed, round_start + 1)

    def _uniform(self, index: int) -> float:
        key = struct.pack("<QqqI", self.seed, self._stream, self._position, index)
        digest = hashlib.blake2b(key, digest_size=8).digest()
        return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
