"""Departures: how far rules that are not exact lead from what the target would say."""

from __future__ import annotations

from collections.abc import Sequence

from specrun.runtime.acceptance import total_variation
from specrun.runtime.law import Law
from specrun.runtime.noise import NoiseSource


class Departures:
    """Adds up, over the tokens of an answer, distances of laws and tokens that became others.

    A round is counted in one assignment, as a whole or not at all, wherever Ctrl-C may come.
    """

    def __init__(self) -> None:
        # Tokens, their distances' sum, and how many of them the target would not have drawn.
        self._counted: tuple[int, float, int] = (0, 0.0, 0)

    def count(
        self,
        laws: Sequence[tuple[Law, Law]],
        tokens: Sequence[int],
        noise: NoiseSource,
        start: int,
    ) -> None:
        """Count a round's tokens, the first at position `start`.

        `laws` are, for each of them, the law that decided it and the target's. The target alone
        would have chosen by the first choice at the token's position: plain decoding's own.
        """
        count, distance, changed = self._counted
        for position, (token, (law, target)) in enumerate(zip(tokens, laws, strict=False), start):
            count += 1
            distance += total_variation(target, law)
            noise.seek(position)
            changed += noise.choose(target) != token
        self._counted = count, distance, changed

    @property
    def total_variation(self) -> float | None:
        """The mean total variation between the law that decided a token and the target's."""
        count, distance, _ = self._counted
        return distance / count if count else None

    @property
    def changed_share(self) -> float | None:
        """The share of tokens that the target alone would not have drawn from the same noise."""
        count, _, changed = self._counted
        return changed / count if count else None
