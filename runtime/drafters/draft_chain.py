"""Drafts a chain from a source of laws: what a draft model does, without the model."""

from __future__ import annotations

from collections.abc import Callable

from specrun.runtime.law import Law
from specrun.runtime.noise import NoiseSource
from specrun.runtime.tree import DraftTree

__all__ = ["draft_chain"]


def draft_chain(
    law_after: Callable[[list[int]], Law],
    noise: NoiseSource,
    start: int,
    *,
    most: int,
    points: bool,
    threshold: float = 0.0,
    always_first: bool = False,
    end_tokens: frozenset[int] = frozenset(),
) -> DraftTree:
    """Return a chain of up to `most` tokens, the first at position `start`.

    `law_after(tokens)` is the draft law after the tokens drafted so far. With `points` the most
    likely token is a point mass; otherwise each token is drawn, and its law stored. The chain ends
    before a token whose law gives none the probability `threshold`: that is read before the draw,
    so exactness holds. `always_first` excepts the first token. Nothing follows one of `end_tokens`.
    """
    tokens: list[int] = []
    laws: list[Law] = []
    while len(tokens) < most and not (tokens and tokens[-1] in end_tokens):
        law = law_after(tokens)
        best, best_prob = law.most_likely
        if best_prob < threshold and not (always_first and not tokens):
            break
        if points:
            tokens.append(best)
            continue
        noise.seek(start + len(tokens))
        tokens.append(noise.choose(law))
        laws.append(law)
    return DraftTree.chain(tokens, None if points else laws)
