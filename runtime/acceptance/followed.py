"""Laws of rows that an exact rule follows at once, in compiled code, where it would ask one by one.

At temperature 0 each is sure of a token: every exact rule then keeps the nodes that spell what the
target would have said, and over point masses nothing but the highest entry of each row on the way
has to be known. Elsewhere truncation leaves a few dozen tokens: whole rules are walked in compiled
code, which makes the laws that it visits. After an evaluation the interpreter's data is no longer
in the processor's caches: Python's own walk takes several times as long, and gives the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from specrun.runtime.acceptance.rule import Acceptance
from specrun.runtime.compiled import LOOPS
from specrun.runtime.law import Law
from specrun.runtime.noise import NoiseSource, NotedNoise, SeededNoise, methods_of
from specrun.runtime.sampling import SamplingParams
from specrun.runtime.transform import Logits, greedy_token, transformed_law
from specrun.runtime.tree import DraftTree


@dataclass(slots=True)
class FollowedLaws:
    """The laws that settings make of rows, to ask or to follow.

    `logits(0)` is the row of the root, `logits(i + 1)` that of node i. `matrix` has all of them,
    [rows, n_vocab], where they lie side by side. Both may be put in the place of others'.
    """

    logits: Callable[[int], Logits]
    params: SamplingParams
    matrix: memoryview | None = None

    def __call__(self, node: int) -> Law:
        """Return the law after a node."""
        return transformed_law(self.logits(node + 1), self.params)

    def followed(
        self, tree: DraftTree, noise: NoiseSource, position: int, *, as_block: bool
    ) -> Acceptance | NoiseSource:
        """Return what an exact rule keeps of a tree, or the noise by which it has to ask itself.

        `as_block`: of a leading chain of draws by block verification. There may be no compiled
        code, a law that is not short, or a broken row. What was decided by then is decided alike.
        """
        return noise


class CertainLaws(FollowedLaws):
    """Laws at temperature 0, each sure of its highest logit; followed over point masses alone."""

    __slots__ = ()

    def __call__(self, node: int) -> Law:
        """Return the law after a node."""
        return Law.point(greedy_token(self.logits(node + 1), self.params))

    def followed(
        self, tree: DraftTree, noise: NoiseSource, position: int, *, as_block: bool
    ) -> Acceptance | NoiseSource:
        """Return the nodes that spell what the target would have said: nothing is drawn."""
        if LOOPS is None:
            return noise
        rows = self.logits if self.matrix is None else self.matrix
        kept = LOOPS.walk_highest(rows, tree.tokens, tree.draws.get)
        return noise if kept is None else Acceptance(*kept)


class ShortLaws(FollowedLaws):
    """Laws of the few tokens that top-k leaves (`SamplingParams.is_cut`, 128 at most)."""

    __slots__ = ()

    def followed(
        self, tree: DraftTree, noise: NoiseSource, position: int, *, as_block: bool
    ) -> Acceptance | NoiseSource:
        """Walk as the rules do: over draws, siblings and point masses."""
        if LOOPS is None:
            return noise
        k, share, lowest, temperature = self.params.cuts
        cuts = (np.exp, share, lowest, temperature)
        rows = self.logits if self.matrix is None else self.matrix
        drawn = rows, tree.tokens, tree.draws_below, np.empty(k), cuts
        if type(noise) is SeededNoise:
            kept = LOOPS.verify(*drawn, noise.source, position, as_block)
            return noise if kept is None else Acceptance(*kept)
        noted = NotedNoise(noise)
        kept = LOOPS.verify(*drawn, methods_of(noted), position, as_block)
        return noted.again() if kept is None else Acceptance(*kept)
