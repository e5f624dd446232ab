"""How the children of a node are proposed from its draft law: three schemes of the literature.

- with replacement: i.i.d. draws (SpecInfer, Miao et al. 2023, algorithm 2). Equal draws share a node, and each
  stays a draw that acceptance tests.
- without replacement: each draw is from the law without its earlier siblings, renormalised (Sequoia, Chen et
  al. 2024, algorithm 2). When nothing is left of the law, there are no more siblings.
- most likely: the top k as point masses (Medusa, EAGLE-2, greedy trees).

Every draw is stored with the law that it was really drawn from.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Literal

import numpy as np

from specrun.runtime.law import Law, LawWithout
from specrun.runtime.noise import DraftNoise, NoiseSource, choose_in_turn
from specrun.runtime.ranked_law import RankedLaw
from specrun.runtime.tree import TreeBuilder

__all__ = [
    "Child",
    "Propose",
    "TreeSampling",
    "most_likely",
    "proposal_scheme",
    "propose_most_likely",
    "propose_with_replacement",
    "propose_without_replacement",
]

TreeSampling = Literal["with", "without", "argmax"]
Child = tuple[int, int]
"""A child's node and its token."""

Propose = Callable[[TreeBuilder, int, Law, int, NoiseSource], list[Child]]
"""Adds up to so many draws from a law below a parent; returns the distinct children in the order they were made."""


def propose_with_replacement(
    builder: TreeBuilder, parent: int, law: Law, count: int, noise: NoiseSource
) -> list[Child]:
    """Draw `count` times from the same law."""
    children: list[Child] = []
    for _ in range(count):
        token = noise.choose(law)
        child = builder.add(parent, token, law), token
        if child not in children:
            children.append(child)
    return children


def propose_without_replacement(
    builder: TreeBuilder, parent: int, law: Law, count: int, noise: NoiseSource
) -> list[Child]:
    """Draw up to `count` different tokens, each from what the earlier ones left of the law."""
    # All siblings at once, because none of their laws depends on anything but the earlier tokens.
    tokens = noise.choose_distinct(law, count) if isinstance(noise, DraftNoise) else choose_in_turn(noise, law, count)
    children: list[Child] = [(builder.add(parent, tokens[0], law), tokens[0])]
    for earlier, token in pairwise(tokens):
        law = LawWithout(law, earlier)
        children.append((builder.add(parent, token, law), token))
    return children


def propose_most_likely(builder: TreeBuilder, parent: int, law: Law, count: int, noise: NoiseSource) -> list[Child]:
    """Take the `count` most likely tokens as point masses."""
    return [(builder.add(parent, token), token) for token, _ in most_likely(law, count)]


def proposal_scheme(sampling: TreeSampling) -> Propose:
    """Return the scheme of a name."""
    return _SCHEMES[sampling]


def most_likely(law: Law, count: int) -> list[tuple[int, float]]:
    """Return the `count` most likely tokens with their probabilities, lower ids first among equals, none of zero."""
    if isinstance(law, RankedLaw):
        return law.best(count)
    probs = law.probs
    if len(probs) > 8 * count + 64:
        near = np.argpartition(probs, len(probs) - count)[len(probs) - count :]
        # All of the last one's probability, so that ties fall to the lower ids.
        near = np.flatnonzero(probs >= probs[near].min())
        order = near[np.argsort(-probs[near], kind="stable")[:count]]
    else:
        order = np.argsort(-probs, kind="stable")[:count]
    tokens = order if law.ids is None else law.ids[order]
    return [(token, prob) for token, prob in zip(tokens.tolist(), probs[order].tolist(), strict=True) if prob > 0.0]


_SCHEMES: dict[TreeSampling, Propose] = {
    "with": propose_with_replacement,
    "without": propose_without_replacement,
    "argmax": propose_most_likely,
}
