"""A drafter that is drafted for: exact whatever the inner drafter does, and what it must not leave
out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from support.enumeration import (
    PROMPT,
    TOLERANCE,
    branching_tree,
    chain,
    drafter_bias,
    mixed_tree,
    top_k_points,
)
from support.scripted import PLAIN, LawTable, ScriptedDrafter, TableDraftModel, TableRows, law_of

from specrun.runtime.acceptance import AcceptanceRule, BlockRule, ExactRule
from specrun.runtime.drafters.combinators import CascadeDrafter
from specrun.runtime.drafters.growing.kept_rows import KeptRows
from specrun.runtime.drafters.retrieval import PromptLookupDrafter
from specrun.runtime.laws import Law, SeededNoise
from specrun.runtime.round import Drafter, DraftRequest, NoDrafter
from specrun.runtime.round.drafter import RoundOutcome
from specrun.runtime.round.results import RoundCounter
from specrun.runtime.trees import DraftTree

Make = Callable[[], Drafter]


scripted = partial(ScriptedDrafter, max_nodes=8)


def inner_drafters(seed: int, size: int = 3) -> dict[str, Make]:
    """Drafters for the draft model; their laws are neither its own nor the target's."""
    table = LawTable(size, seed + 300)
    return {
        "none": NoDrafter,
        "chain": lambda: scripted(chain(table, 1)),
        "long chain": lambda: scripted(chain(table, 3)),
        "siblings": lambda: scripted(branching_tree(table, (2,), False)),
        "points": lambda: scripted(top_k_points(table, 2, 2)),
        "mixed": lambda: scripted(mixed_tree(table, seed)),
        "lookup": lambda: PromptLookupDrafter(min_ngram=1),
        "cascade": lambda: CascadeDrafter(
            TableDraftModel(table), scripted(chain(LawTable(size, 9), 1))
        ),
    }


def cascade(seed: int, inner: str, n: int = 2, size: int = 3, **options: float) -> Make:
    drafts = LawTable(size, seed + 200)
    make = inner_drafters(seed, size)[inner]
    return lambda: CascadeDrafter(TableDraftModel(drafts), make(), num_draft_tokens=n, **options)  # type: ignore[arg-type]


# -- exactness -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "inner", [drafter for drafter in inner_drafters(0) if drafter != "cascade"]
)
@pytest.mark.parametrize("seed", range(2))
def test_cascades_give_the_targets_law(inner: str, seed: int) -> None:
    length = 3 if inner in ("none", "chain", "lookup") else 2
    assert drafter_bias(ExactRule(), cascade(seed, inner), LawTable(3, seed), length) < TOLERANCE


@pytest.mark.parametrize("rule", [ExactRule(), BlockRule()], ids=["token", "exact"])
@pytest.mark.parametrize("inner", ["none", "chain", "long chain", "points", "cascade"])
def test_longer_cascades_over_two_tokens(rule: AcceptanceRule, inner: str) -> None:
    for seed in (1, 2):
        make = cascade(seed, inner, n=3, size=2)
        assert (
            drafter_bias(rule, make, LawTable(2, seed, 0.0), 4 if inner != "cascade" else 3)
            < TOLERANCE
        )


@pytest.mark.parametrize("options", [{"max_rounds": 1}, {"max_rounds": 2}, {"p_min": 0.6}], ids=str)
@pytest.mark.parametrize("inner", ["chain", "long chain", "points"])
def test_stopping_by_rounds_or_confidence_keeps_the_law(
    options: dict[str, float], inner: str
) -> None:
    make = cascade(3, inner, n=3, size=2, **options)
    assert drafter_bias(ExactRule(), make, LawTable(2, 3, 0.0), 4) < TOLERANCE


def test_argmax_cascades_are_point_masses_and_exact() -> None:
    drafts = LawTable(3, 200)

    def make() -> Drafter:
        return CascadeDrafter(
            TableDraftModel(drafts), inner_drafters(0)["points"](), sampling="argmax"
        )

    assert drafter_bias(ExactRule(), make, LawTable(3, 0)) < TOLERANCE
    tree = ask(make(), list(PROMPT))
    assert all(draw.law is None for draws in tree.draws.values() for draw in draws)
    prefix = list(PROMPT)
    for token in tree.tokens:
        assert token == int(np.argmax(drafts(prefix)))
        prefix.append(token)


class _AcceptedTokensOnly(CascadeDrafter):
    """Wrong: leaves out the token that the draft model itself put where it rejected a guess, or
    after the last."""

    def _draft(self, request: DraftRequest, count: int, rows: KeptRows | None) -> list[Law]:
        self._max_rounds, self._counter = 1, RoundCounter()
        return super()._draft(request, count, rows)[: self._counter.accepted]


class _StatesTheInnerLaw(CascadeDrafter):
    """Wrong: gives the inner drafter's law for what it guessed and the draft model accepted."""

    def propose(self, request: DraftRequest) -> DraftTree:
        tree = super().propose(request)
        other = LawTable(3, 300)
        prefixes = [[*request.tokens, *tree.tokens[:i]] for i in range(len(tree))]
        laws = [law_of(0.5 * other(prefix) + 0.5 / 3) for prefix in prefixes]
        return DraftTree.chain(list(tree.tokens), laws)


@pytest.mark.parametrize("wrong", [_AcceptedTokensOnly, _StatesTheInnerLaw])
def test_wrong_cascades_are_caught(wrong: type[CascadeDrafter]) -> None:
    """Accepted tokens only, and another law than the draft model's own: both bias the text."""

    def make(seed: int) -> Make:
        table = LawTable(3, 300, 0.0)
        return lambda: wrong(
            TableDraftModel(LawTable(3, seed + 200, 0.0)),
            scripted(chain(table, 1)),
            num_draft_tokens=2,
        )

    errors = [drafter_bias(ExactRule(), make(seed), LawTable(3, seed, 0.0), 3) for seed in range(4)]
    assert max(errors) > 1e-2


# -- what it costs and keeps -----------------------------------------------------------------------


def ask(drafter: Drafter, tokens: list[int], max_depth: int = 9, max_nodes: int = 9) -> DraftTree:
    return drafter.propose(
        DraftRequest(tokens, PLAIN, SeededNoise(4).for_drafting(len(tokens)), max_depth, max_nodes)
    )


def outcome(
    tokens: list[int], tree: DraftTree, path: tuple[int, ...], next_token: int
) -> RoundOutcome:
    return RoundOutcome(tokens, tree, path, next_token, TableRows([]))  # type: ignore[arg-type]


def test_a_deterministic_inner_drafter_changes_the_cost_only() -> None:
    """The draft model draws the same tokens from the same numbers, whoever guesses them first."""
    drafts, tokens = LawTable(3, 1), [0, 1, 2, 0, 1, 2, 0]

    def run(inner: Drafter) -> tuple[DraftTree, int]:
        model = TableDraftModel(drafts)
        drafter = CascadeDrafter(model, inner, num_draft_tokens=6)
        drafter.begin(tokens)
        return ask(drafter, tokens), model.evaluations

    alone, evaluations = run(NoDrafter())
    helped, fewer = run(scripted(top_k_points(drafts, 2, 3), max_nodes=14))
    assert helped.tokens == alone.tokens
    assert (evaluations, fewer < 6) == (6, True)
    for a, b in zip(alone.draws.values(), helped.draws.values(), strict=True):
        np.testing.assert_array_equal(a[0].law.probs, b[0].law.probs)  # type: ignore[union-attr]


def test_model_and_inner_drafter_take_back_what_the_target_rejects() -> None:
    told: list[int] = []

    class Witness(PromptLookupDrafter):
        def rewind(self, length: int) -> None:
            told.append(length)
            super().rewind(length)

    model = TableDraftModel(LawTable(3, 1))
    drafter = CascadeDrafter(model, Witness(min_ngram=1), num_draft_tokens=4)
    tokens = [0, 1, 2, 0]
    drafter.begin(tokens)
    told.clear()
    for kept in (0, 2, 4, 1):
        tree = ask(drafter, tokens)
        assert len(tree) == 4
        start = len(tokens)
        other = (tree.tokens[kept] + 1) % 3 if kept < 4 else 1
        tokens += [*tree.tokens[:kept], other]
        told.clear()
        drafter.observe(outcome(tokens, tree, tuple(range(kept)), other))
        assert told == ([start + kept] if kept < 4 else [])
        text = drafter._text
        assert text.tokens == tokens[: start + kept]
        assert text.n_cached == start + min(kept, 3)


def test_chains_keep_every_limit() -> None:
    model = TableDraftModel(LawTable(3, 1))
    drafter = CascadeDrafter(model, scripted(chain(LawTable(3, 2), 3)), num_draft_tokens=4)
    for depth, nodes, expected in ((9, 9, 4), (2, 9, 2), (9, 3, 3), (0, 9, 0), (9, 0, 0)):
        drafter.begin([0, 1])
        assert len(ask(drafter, [0, 1], depth, nodes)) == expected
    for length, expected in ((61, 4), (62, 3), (63, 2), (64, 1), (65, 0), (70, 0)):
        tokens = [0, 1] * length
        drafter.begin(tokens[:length])
        assert len(ask(drafter, tokens[:length])) == expected


def test_rounds_bound_the_evaluations_of_the_model() -> None:
    model = TableDraftModel(LawTable(3, 1))
    drafter = CascadeDrafter(model, NoDrafter(), num_draft_tokens=8, max_rounds=3)
    drafter.begin([0, 1])
    assert len(ask(drafter, [0, 1])) == model.evaluations == 3


def test_what_it_reports_adds_up_and_closes() -> None:
    model = TableDraftModel(LawTable(3, 1))
    closed: list[str] = []

    class Inner(NoDrafter):
        native_seconds = 0.25
        n_params, depth_params = 3, 3.0

        def close(self) -> None:
            closed.append("inner" if not model.closed else "late")
            raise RuntimeError("stuck")

    drafter = CascadeDrafter(model, Inner(), num_draft_tokens=2)
    assert (drafter.native_seconds, drafter.n_params, drafter.depth_params) == (0.75, 10, 10.0)
    assert (drafter.max_leaves, drafter.max_nodes) == (1, 2)
    drafter.begin([0, 1])
    ask(drafter, [0, 1])
    assert drafter.report()["inner"]["rounds"] == 2
    drafter.begin([0, 1])
    assert drafter.report()["inner"]["rounds"] == 0
    with pytest.raises(RuntimeError, match="stuck"):
        drafter.close()
    assert closed == ["inner"]
    assert model.closed
