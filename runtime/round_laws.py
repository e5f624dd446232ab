"""The laws of a round: the target's after each node, and beside it the drafter's own.

And what rules that weigh the drafter's laws ask of it: drafters that tell none are refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from specrun.bindings.errors import OptionError
from specrun.runtime.acceptance import LawAt, LawPair, PairAt, PairRule, RawLaw, Rule
from specrun.runtime.backend_laws import CutRows
from specrun.runtime.drafter import Drafter
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


def require_laws(rule: Rule, drafter: Drafter, params: SamplingParams | None = None) -> None:
    """Raise `OptionError` for a rule that needs laws of a drafter that tells none.

    Without `params`, whatever the settings of an answer will be.
    """
    # What drafts nothing trades nothing: each token is the target's.
    if not isinstance(rule, PairRule) or drafter.keeps_rows or not drafter.max_nodes:
        return
    if rule.takes_points and (params is None or params.is_greedy):
        return
    if rule.takes_points and params is not None:
        needs = f"at temperature {params.temperature:g} weighs the drafter's own laws"
    else:
        needs = "weighs the drafter's own laws"
    without = "at temperature 0 cascade-token-v3, -v2 and top-beta need none, typical never does"
    problem = f"{rule.name} {needs}, and {drafter.name} tells none"
    raise OptionError(f"{problem}: let a draft model draft alone, as in draft(FILE); {without}")


def _law_after(
    tokens: Sequence[int], tree: DraftTree, node: int, row: Logits, params: SamplingParams
) -> Law:
    if not params.has_penalties:
        return transformed_law(row, params)
    above = [tree.tokens[i] for i in tree.path_to(node)]
    return transformed_law(row, params, penalty_window(tokens, above, params))
