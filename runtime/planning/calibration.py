"""Both models' laws along texts: what acceptance by rank is measured on."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specrun.bindings.batch import Batch
from specrun.bindings.context import Context
from specrun.runtime.drafters.model_drafter import ranking_params
from specrun.runtime.law import Law
from specrun.runtime.planning.rank_acceptance import LawPair
from specrun.runtime.sampling import SamplingParams
from specrun.runtime.transform import Logits, transformed_law

__all__ = ["CalibrationText", "law_pairs", "laws_along"]

_RANKED = 40


@dataclass(frozen=True, slots=True)
class CalibrationText:
    """A text the target wrote: `tokens`, of which the first `n_prompt` were given."""

    tokens: tuple[int, ...]
    n_prompt: int


def law_pairs(
    target: Context, draft: Context, text: CalibrationText, params: SamplingParams
) -> tuple[list[LawPair], float]:
    """Return the laws that decided each token the target wrote, and the seconds of making one law.

    Penalties are left out: they hang on the path, and move both laws alike. The contexts are left empty.
    """
    ranking = ranking_params(params, _RANKED)
    shared = min(target.model.vocabulary.size, draft.model.vocabulary.size)
    begin, tokens = text.n_prompt - 1, text.tokens[:-1]
    pairs: list[LawPair] = []
    spent = 0.0
    for ours, theirs in zip(_rows(target, tokens, begin), _rows(draft, tokens, begin), strict=True):
        before = time.perf_counter()
        law = transformed_law(ours, params)
        spent += time.perf_counter() - before
        row = theirs[:shared]
        pairs.append(LawPair(law, transformed_law(row, params), transformed_law(row, ranking)))
    return pairs, spent / max(1, len(pairs))


def laws_along(context: Context, text: CalibrationText, settings: Sequence[SamplingParams]) -> list[tuple[Law, ...]]:
    """Return a model's laws that decided each token the target wrote, one for each of the settings."""
    rows = _rows(context, text.tokens[:-1], text.n_prompt - 1)
    return [tuple(transformed_law(row, params) for params in settings) for row in rows]


def _rows(context: Context, tokens: Sequence[int], begin: int) -> Iterator[Logits]:
    """Yield the logits after each token from index `begin` on; each is valid until the next is asked for."""
    batch = Batch(context.n_batch, 1)
    size = context.model.vocabulary.size
    known = [token if token < size else 0 for token in tokens]
    context.memory.clear()
    start = 0
    while start < len(known):
        wanted = start >= begin
        n = min(context.n_outputs, len(known) - start) if wanted else min(context.n_batch, begin - start)
        batch.fill_chain(known[start : start + n], start, [0], n if wanted else 1)
        rows = context.decode(batch)
        for row in range(n if wanted else 0):
            yield rows.logits(row)
        start += n
    context.memory.clear()
