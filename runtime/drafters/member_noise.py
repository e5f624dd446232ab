"""Apart from each other: the draws of drafters that share one round's noise."""

from __future__ import annotations

from specrun.runtime.law import Law
from specrun.runtime.noise import NoiseSource

__all__ = ["MemberNoise"]

_STREAMS = 1_000_003  # more than any position, so that members and positions never meet
_POSITION_BITS = 0x7FFF_FFFF_FFFF_FFFF


class MemberNoise:
    """A member's own draws: the same keys for two members would make their drafts dependent, and biased."""

    def __init__(self, noise: NoiseSource, index: int) -> None:
        self._noise = noise
        self._index = index

    def seek(self, position: int) -> None:
        """Turn to this member's draws of a position; ensembles inside ensembles stay apart too."""
        self._noise.seek((position * _STREAMS + self._index + 1) & _POSITION_BITS)

    def accept(self, probability: float) -> bool:
        """Pass on."""
        return self._noise.accept(probability)

    def choose(self, law: Law) -> int:
        """Pass on."""
        return self._noise.choose(law)

    def for_drafting(self, round_start: int) -> NoiseSource:
        """Return a source for a drafter of this member's, keyed apart from the other members'."""
        return MemberNoise(self._noise.for_drafting(round_start), self._index)
