"""Acceptance rules: their interface, the walk of token-wise rules, and walks in compiled code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from specrun.runtime.compiled import LOOPS, Matrix
from specrun.runtime.laws.law import Law
from specrun.runtime.laws.noise import NoiseSource, NotedNoise, SeededNoise, methods_of
from specrun.runtime.laws.sampling import SamplingParams
from specrun.runtime.laws.transform import Logits, greedy_token, transformed_law
from specrun.runtime.trees.tree import ROOT, DraftTree, Draw

# == Acceptance rules ==============================================================================
#
# That is the walk down the draft tree, and the single draw that settles point masses.


LawAt = Callable[[int], Law]
"""The target's transformed law after a node (or ROOT); computed only for nodes a rule visits."""


@dataclass(slots=True)
class Acceptance:
    """The accepted nodes from the root down, and the target's own token after them.

    `rejected` is True if the walk ended by rejecting every draw of a node (the token is then
    recovered), False if it reached a node without draws (a bonus token). `laws` are, under a rule
    that emits a stated law in place of the target's, that law and the target's for each token of
    the path and the next.
    """

    # Not frozen: that costs a call for every field, in every round.
    path: tuple[int, ...]
    next_token: int
    rejected: bool
    laws: tuple[tuple[Law, Law], ...] = ()


class AcceptanceRule(Protocol):
    """Decides one round."""

    name: str
    exact: bool

    def accept(
        self, tree: DraftTree, law_at: LawAt, noise: NoiseSource, position: int
    ) -> Acceptance:
        """Return what is kept of `tree`.

        `position` is where the first new token will stand; the token at `position + depth` is
        decided by draws keyed with that position.
        """


Decide = Callable[[DraftTree, tuple[Draw, ...], Law, NoiseSource], tuple[int | None, int]]
"""From a node's draws and the target's law to the accepted child (None: none) and next token."""


def walk(
    tree: DraftTree,
    law_at: LawAt,
    noise: NoiseSource,
    position: int,
    decide: Decide,
) -> Acceptance:
    """Return the path that `decide` keeps, one token per node, with draws keyed by its position.

    `law_at(node)` is the target's law after a node; the first new token stands at `position`.
    """
    path: list[int] = []
    node, all_draws = ROOT, tree.draws
    while True:
        noise.seek(position + len(path))
        draws = all_draws.get(node, ())
        child, token = decide(tree, draws, law_at(node), noise)
        if child is None:
            return Acceptance(tuple(path), token, rejected=bool(draws))
        path.append(child)
        node = child


def count_to_test(draws: tuple[Draw, ...]) -> int:
    """Return how many draws must be tested in turn: all up to the last one that was sampled."""
    count = len(draws)
    # Point masses at the end are settled by one draw. One before a sampled draw has to be tested,
    # because the sampled one faces what its rejection left.
    while count and draws[count - 1].law is None:
        count -= 1
    return count


def settle_point_masses(
    tree: DraftTree,
    draws: tuple[Draw, ...],
    law: Law,
    noise: NoiseSource,
) -> tuple[int | None, int]:
    """Return the child that one draw from `law` names, if there is one, and the token.

    Testing point masses one by one and then drawing from what remains is the same as drawing
    once and descending if the token was drafted. That single draw is plain decoding's own, so
    deterministic drafters repeat plain decoding's text at every temperature, given equal logits.
    """
    token = noise.choose(law)
    tokens = tree.tokens
    for draw in draws:
        if tokens[draw.node] == token:
            return draw.node, token
    return None, token


# == Whole walks in compiled code ==================================================================
#
# At temperature 0 each law is a point mass: every exact rule then keeps the nodes that spell the
# target's own tokens, and over point masses only the highest entry of each visited row is read. At
# other temperatures truncation leaves a few dozen tokens: compiled code walks the whole rule and
# makes the laws of the rows it visits. Python's own walk takes several times as long and gives the
# same.


@dataclass(slots=True)
class FollowedLaws:
    """The laws that settings make of rows, to ask or to follow.

    `logits(0)` is the row of the root, `logits(i + 1)` that of node i. `matrix` has all of them, if
    they lie side by side in any order. Both may be replaced.
    """

    logits: Callable[[int], Logits]
    params: SamplingParams
    matrix: Matrix | None = None

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
