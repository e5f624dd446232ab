"""Acceptance rules: their interface, and the walk of token-wise rules down the draft tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from specrun.runtime.laws.law import Law
from specrun.runtime.laws.noise import NoiseSource
from specrun.runtime.trees.tree import ROOT, DraftTree, Draw, Siblings

LawAt = Callable[[int], Law]
"""The target's transformed distribution after a node or ROOT, computed when a rule visits it."""


@dataclass(slots=True)
class Acceptance:
    """The accepted nodes from the root down, and the target's own token after them.

    `rejected` is True if the walk ended by rejecting every draw of a node (the token is then
    recovered), False if it reached a node without draws (a bonus token). `laws` are, under a rule
    that emits a stated distribution in place of the target's, that distribution and the target's
    for each token of the path and the next.
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
        """Return the accepted part of `tree`.

        `position` is where the first new token will stand; the token at `position + depth` is
        decided by draws keyed with that position.
        """


Decide = Callable[[DraftTree, Sequence[Draw], Law, NoiseSource], tuple[int | None, int]]
"""From a node's draws and the target's distribution to the accepted child and next token."""


def walk(
    tree: DraftTree,
    law_at: LawAt,
    noise: NoiseSource,
    position: int,
    decide: Decide,
) -> Acceptance:
    """Return the path that `decide` keeps, one token per node, with draws keyed by its position.

    `law_at(node)` is the target's distribution after a node; `position` is the first new token's.
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


def count_to_test(draws: Sequence[Draw]) -> int:
    """Return how many draws must be tested in turn: all up to the last one that was sampled."""
    count = len(draws)
    # Not `isinstance`: of an abstract class that takes as long as a distribution of few tokens.
    if type(draws) is Siblings:
        return count
    # Point masses at the end are settled by one draw. One before a sampled draw has to be tested,
    # because the sampled one faces the residual of its rejection.
    while count and draws[count - 1].law is None:
        count -= 1
    return count


def settle_point_masses(
    tree: DraftTree,
    draws: Sequence[Draw],
    law: Law,
    noise: NoiseSource,
) -> tuple[int | None, int]:
    """Return the child that one draw from `law` names, if there is one, and the token.

    Testing point masses one by one and then drawing from the rest is the same as drawing
    once and descending if the token was drafted. That single draw is plain decoding's own, so
    deterministic drafters repeat plain decoding's text at every temperature, given equal logits.
    """
    token, tokens = noise.choose(law), tree.tokens
    if token in tokens:
        for node, _ in draws:
            if tokens[node] == token:
                return node, token
    return None, token
