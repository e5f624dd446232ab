"""A noise source that enumerates: every outcome of a random program, with its exact probability."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable

import numpy as np

from specrun.runtime.law import Law


class BranchingNoise:
    """Replays a script of decisions, then takes the first possible branch and notes the others.

    `accept` and `choose` are the only sources of randomness in the shipped loop, so running it
    under every script enumerates the law of what it produces.
    """

    def __init__(self, script: list[int]) -> None:
        self._script = script
        self.taken: list[tuple[int, int]] = []  # (branch, number of branches)
        self.probability = 1.0

    def seek(self, position: int) -> None:
        """Positions only key seeded noise."""

    def accept(self, probability: float) -> bool:
        if probability >= 1.0:
            return True
        if probability <= 0.0:
            return False
        return self._branch([probability, 1.0 - probability]) == 0

    def choose(self, law: Law) -> int:
        support = np.flatnonzero(law.probs)
        index = int(support[self._branch([float(law.probs[place]) for place in support])])
        return index if law.ids is None else int(law.ids[index])

    def for_drafting(self, round_start: int) -> BranchingNoise:
        return self

    def _branch(self, probabilities: list[float]) -> int:
        step = len(self.taken)
        branch = self._script[step] if step < len(self._script) else 0
        self.taken.append((branch, len(probabilities)))
        self.probability *= probabilities[branch]
        return branch


def enumerate_law(program: Callable[[BranchingNoise], Hashable]) -> dict[Hashable, float]:
    """Return the exact law of what `program` returns."""
    law: dict[Hashable, float] = defaultdict(float)
    script: list[int] = []
    while True:
        noise = BranchingNoise(script)
        outcome = program(noise)
        law[outcome] += noise.probability
        taken = noise.taken
        while taken and taken[-1][0] + 1 == taken[-1][1]:
            taken.pop()
        if not taken:
            return dict(law)
        script = [branch for branch, _ in taken[:-1]] + [taken[-1][0] + 1]
