"""The laws of a round: the target's after each node, and beside it the drafter's own."""

from __future__ import annotations

from collections.abc import Sequence

from specrun.runtime.acceptance import LawAt, LawPair, PairAt, RawLaw
from specrun.runtime.backend_laws import CutRows
from specrun.runtime.law import Law
from specrun.runtime.sampling import SamplingParams
from specrun.runtime.target import EvaluatedRows
from specrun.runtime.transform import Logits, penalty_window, transformed_law
from specrun.runtime.tree import DraftTree


def target_laws(
    tokens: Sequence[int], tree: DraftTree, rows: EvaluatedRows, params: SamplingParams
) -> LawAt:
    """Return what gives the target's law after a node, by the settings of sampling."""
    if isinstance(rows, CutRows):
        return lambda node: rows.law(node + 1, params)
    if not params.has_penalties:
        return lambda node: transformed_law(rows.logits(node + 1), params)
    return lambda node: _law_after(tokens, tree, node, rows.logits(node + 1), params)


def law_pairs(
    tokens: Sequence[int], tree: DraftTree, rows: EvaluatedRows, params: SamplingParams
) -> PairAt:
    """Return what gives both laws after a node, raw and by the settings of sampling."""
    target_law = target_laws(tokens, tree, rows, params)

    def pair_at(node: int) -> LawPair:
        target, raw_target = target_law(node), RawLaw(rows.logits(node + 1))
        draws = tree.draws.get(node, ())
        row = None if tree.rows is None else tree.rows.logits(node)
        raw_draft: Law | None = None if row is None else RawLaw(row)
        # Of several draws, the first is from S(q) itself: later siblings without replacement come
        # from what it left.
        draft = next((draw.law for draw in draws if draw.law is not None), None)
        if draft is None and row is not None:
            draft = _law_after(tokens, tree, node, row, params)
        if draft is None and draws:  # at temperature 0 the drafter's favourite is all its law
            draft = Law.point(tree.tokens[draws[0].node])
        if draft is None:
            return LawPair(raw_target, raw_target, target, target)
        return LawPair(draft if raw_draft is None else raw_draft, raw_target, draft, target)

    return pair_at


def _law_after(
    tokens: Sequence[int], tree: DraftTree, node: int, row: Logits, params: SamplingParams
) -> Law:
    if not params.has_penalties:
        return transformed_law(row, params)
    above = [tree.tokens[i] for i in tree.path_to(node)]
    return transformed_law(row, params, penalty_window(tokens, above, params))
