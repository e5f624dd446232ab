"""Enumeration: the exact law of what a program returns, and small trees of every kind to run it on.

A noise source that branches replays a program under every script of decisions, so the law of what
the program returns is computed and not sampled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Literal

import numpy as np

from specrun.bindings.errors import SpecrunError
from specrun.runtime.laws import Law, NoiseSource
from specrun.runtime.trees import ROOT, DraftTree, TreeBuilder, most_likely

Shape = Literal["chain", "siblings", "without replacement", "point masses", "mixed"]
SHAPES: tuple[Shape, ...] = (
    "chain",
    "siblings",
    "without replacement",
    "point masses",
    "mixed",
)
_WIDTHS: dict[Shape, tuple[int, int]] = {
    "chain": (1, 1),
    "siblings": (2, 1),
    "without replacement": (2, 1),
    "point masses": (2, 2),
    "mixed": (2, 1),
}


class WentAnotherWay(SpecrunError):
    """A program that was replayed did not decide as it had."""


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
        """Return each of both answers in turn, unless one is certain."""
        if probability >= 1.0:
            return True
        if probability <= 0.0:
            return False
        return self._branch([probability, 1.0 - probability]) == 0

    def choose(self, law: Law) -> int:
        """Return each token of the law's support in turn."""
        support = np.flatnonzero(law.probs)
        index = int(support[self._branch([float(law.probs[place]) for place in support])])
        return index if law.ids is None else int(law.ids[index])

    def for_drafting(self, round_start: int) -> BranchingNoise:
        """Return this source: drafts are enumerated with all else."""
        return self

    def _branch(self, probabilities: list[float]) -> int:
        step = len(self.taken)
        branch = self._script[step] if step < len(self._script) else 0
        if branch >= len(probabilities):
            raise WentAnotherWay("it must depend on nothing but the noise")
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


def grow(
    shape: Shape, law_after: Callable[[tuple[int, ...]], Law], noise: NoiseSource
) -> DraftTree:
    """Return a tree of depth 2 drawn from the draft laws; nothing but draws is random."""
    tree = TreeBuilder()
    parents: dict[int, tuple[int, ...]] = {ROOT: ()}
    for width in _WIDTHS[shape]:
        children: dict[int, tuple[int, ...]] = {}
        for parent, text in parents.items():
            law = law_after(text)
            ranked = most_likely(law, width)
            for rank in range(width):
                if shape == "point masses" or (shape == "mixed" and rank == 0):
                    if rank == len(ranked):  # the law has no more tokens
                        break
                    token, drawn_from = ranked[rank][0], None
                else:
                    token, drawn_from = noise.choose(law), law
                children[tree.add(parent, token, drawn_from)] = (*text, token)
                if shape == "without replacement" and drawn_from is not None:
                    law = law.without(token)
        parents = children
    return tree.build()
