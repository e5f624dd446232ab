"""Sequoia's acceptance by rank: shares of accepted children of each rank, measured on a text.

At every position of a text the target's law P and the draft law Q are known. For a proposal scheme,
siblings are proposed as a drafter would, and tested by the exact rule (`acceptance.exact`): sibling
r is reached if the earlier ones were rejected, and accepted with min(1, R(x)/Q_r(x)). Summing the
probabilities of acceptance, not their outcomes, leaves only the noise of the draws themselves. The
first draw has none, it is accepted with the sum of min(P, Q), nor have point masses: rank r is
accepted with P(x_r).

This is Sequoia's acceptance vector (Chen et al. 2024, section 3.1): shares of all visits to a node,
so that the ranks add up to the chance that any child is accepted.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from specrun.bindings.contexts.batch import Batch
from specrun.bindings.contexts.context import Context
from specrun.runtime.law import FloatArray, Law
from specrun.runtime.noise import SeededNoise
from specrun.runtime.sampling import SamplingParams
from specrun.runtime.transform import Logits, transformed_law
from specrun.runtime.tree import ROOT, TreeBuilder
from specrun.runtime.trees import TreeSampling, most_likely, proposal_scheme, ranking_params

_REPEATS = 4  # of a proposal that is drawn
_RANKED = 40  # tokens that the draft model ranks


@dataclass(frozen=True, slots=True)
class LawPair:
    """The laws of one position: the target's, the drafter's, and the one that ranks tokens."""

    target: Law
    draft: Law
    ranking: Law


def acceptance_by_rank(
    pairs: Iterable[LawPair], sampling: TreeSampling, ranks: int, *, seed: int = 0
) -> FloatArray:
    """Return the share of positions at which each sibling rank is accepted, [ranks]."""
    noise = SeededNoise(seed).for_drafting(0)
    total = np.zeros(ranks)
    count = 0
    for position, pair in enumerate(pairs):
        # Draws hang on the position, not on how many were drawn before: schemes meet the same
        # noise.
        noise.seek(position)
        count += 1
        # Of point masses the chance to be reached and the residual's probability multiply to P(x_r)
        # again: no draw is needed.
        if sampling == "argmax" or len(pair.draft.probs) == 1:
            for rank, (token, _) in enumerate(most_likely(pair.ranking, ranks)):
                total[rank] += pair.target.probability(token)
            continue
        trials = [_accepted(pair, sampling, ranks, noise) for _ in range(_REPEATS)]
        shares: FloatArray = np.mean(trials, axis=0)
        # The first rank needs no draws: 1 - TV(P, Q). The others share what it leaves.
        first = float(np.minimum(pair.target.probs, pair.draft.aligned_to(pair.target)).sum())
        if shares[0] < 1.0:
            shares[1:] *= (1.0 - first) / (1.0 - shares[0])
        shares[0] = first
        total += shares
    return total / max(1, count)


def _accepted(pair: LawPair, sampling: TreeSampling, ranks: int, noise: SeededNoise) -> FloatArray:
    """Propose siblings once; return the probability that each is accepted, duplicates added."""
    builder = TreeBuilder()
    proposal_scheme(sampling)(builder, ROOT, pair.draft, ranks, noise)
    tree = builder.build()
    accepted = np.zeros(ranks)
    reached, remaining = 1.0, pair.target
    for draw in tree.draws[ROOT]:
        if draw.law is None:
            continue
        token = tree.tokens[draw.node]
        share = min(1.0, remaining.probability(token) / draw.law.probability(token))
        # With replacement a token may be drawn twice: equal draws share a node, and their chances
        # add up.
        accepted[draw.node] += reached * share
        reached *= 1.0 - share
        if reached <= 0.0:
            break
        # norm((R - Q)+), what the exact rule tests the next sibling against.
        remaining = remaining.residual(draw.law)
    return accepted


# -- both models' laws along texts -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CalibrationText:
    """A text the target wrote: `tokens`, of which the first `n_prompt` were given."""

    tokens: tuple[int, ...]
    n_prompt: int


def law_pairs(
    target: Context, draft: Context, text: CalibrationText, params: SamplingParams
) -> tuple[list[LawPair], float]:
    """Return the laws that decided each token the target wrote, and the seconds of making one law.

    Penalties are left out: they hang on the path, and move both laws alike. The contexts are left
    empty.
    """
    ranking = ranking_params(params, _RANKED)
    shared = min(target.model.vocabulary.size, draft.model.vocabulary.size)
    # The law after the prompt's last token decided the first written one; after the last token none
    # did.
    begin, tokens = text.n_prompt - 1, text.tokens[:-1]
    pairs: list[LawPair] = []
    spent = 0.0
    for ours, theirs in zip(_rows(target, tokens, begin), _rows(draft, tokens, begin), strict=True):
        before = time.perf_counter()
        law = transformed_law(ours, params)
        spent += time.perf_counter() - before
        # A drafter never proposes ids that the target lacks.
        row = theirs[:shared]
        pairs.append(LawPair(law, transformed_law(row, params), transformed_law(row, ranking)))
    return pairs, spent / max(1, len(pairs))


def laws_along(
    context: Context, text: CalibrationText, settings: Sequence[SamplingParams]
) -> list[tuple[Law, ...]]:
    """Return a model's laws for each token the target wrote, one for each of the settings."""
    rows = _rows(context, text.tokens[:-1], text.n_prompt - 1)
    return [tuple(transformed_law(row, params) for params in settings) for row in rows]


def _rows(context: Context, tokens: Sequence[int], begin: int) -> Iterator[Logits]:
    """Yield the logits after each token from index `begin` on, valid until the next."""
    batch = Batch(context.n_batch, 1)
    size = context.model.vocabulary.size
    # A token that this model lacks still takes its position; any id will do for it.
    known = [token if token < size else 0 for token in tokens]
    context.memory.clear()
    start = 0
    while start < len(known):
        # The prompt goes in whole batches with one row, the answer in pieces of as many rows as
        # there are.
        wanted = start >= begin
        most, end = (context.n_outputs, len(known)) if wanted else (context.n_batch, begin)
        n = min(most, end - start)
        batch.fill_chain(known[start : start + n], start, [0], n if wanted else 1)
        rows = context.decode(batch)
        for row in range(n if wanted else 0):
            yield rows.logits(row)
        start += n
    context.memory.clear()
