"""k-SEQ: its root, residual and acceptance against their definitions; exactness is in
test_exactness.py too."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from support.enumeration import (
    PROMPT,
    TOLERANCE,
    Propose,
    accepted_lengths,
    bias,
    branching_tree,
    chain,
    top_k_points,
)
from support.scripted import PLAIN, LawTable, ScriptedDrafter, TableTarget, conversation_of, law_of

from specrun.bindings.errors import OptionError
from specrun.runtime.acceptance import (
    AcceptanceRule,
    ExactRule,
    KSeq,
    KSeqRule,
    build_rule,
    kseq,
    rule_names,
)
from specrun.runtime.laws import Law, SeededNoise
from specrun.runtime.round import DraftRequest, NoDrafter
from specrun.runtime.round.loop import DecodeSettings, RoundLimits, decode_rounds
from specrun.runtime.trees import ROOT, DraftTree, TreeBuilder

any_case = settings(max_examples=150, deadline=None, derandomize=True, database=None)
weights = st.lists(st.integers(0, 6), min_size=4, max_size=4).filter(any)


def normalised(values: list[int]) -> np.ndarray:
    return np.array(values) / sum(values)


def pass_probability(target: np.ndarray, draft: np.ndarray, rho: float) -> float:
    return float(np.minimum(draft, target / rho).sum())


def recursive_rejection(target: np.ndarray, draft: np.ndarray, k: int) -> float:
    """What the exact rule accepts of k i.i.d. draws."""
    remaining, rejected = target, 1.0
    for _ in range(k):
        rejected *= 1.0 - np.minimum(remaining, draft).sum()
        left = np.maximum(remaining - draft, 0.0)
        if not left.any():
            return 1.0
        remaining = left / left.sum()
    return 1.0 - rejected


def best_transport(target: np.ndarray, draft: np.ndarray) -> float:
    """The most that any rule can accept of two i.i.d. draws: SpecTr's linear programme, by a
    solver."""
    size = len(target)
    cases = [(a, b, y) for a, b in itertools.product(range(size), repeat=2) for y in {a, b}]
    pairs = np.array(
        [[(a, b) == pair for a, b, _ in cases] for pair in itertools.product(range(size), repeat=2)]
    )
    outputs = np.array([[y == token for _, _, y in cases] for token in range(size)])
    limits = np.concatenate([np.outer(draft, draft).ravel(), target])
    return -float(linprog(-np.ones(len(cases)), A_ub=np.vstack([pairs, outputs]), b_ub=limits).fun)


# -- the scale -------------------------------------------------------------------------------------


@any_case
@given(weights, weights, st.integers(1, 8))
def test_the_scale_is_the_root_of_its_equation(
    target_weights: list[int], draft_weights: list[int], k: int
) -> None:
    target, draft = normalised(target_weights), normalised(draft_weights)
    plan = KSeq(Law(target), Law(draft), k)
    b = pass_probability(target, draft, plan.scale)
    assert 1.0 <= plan.scale <= k
    assert 1.0 - (1.0 - b) ** k == pytest.approx(plan.scale * b, abs=1e-12)
    assert plan.acceptance == pytest.approx(1.0 - (1.0 - b) ** k, abs=1e-12)


@any_case
@given(weights, weights, st.integers(1, 8))
def test_what_is_accepted_and_what_is_left_make_the_target(
    target_weights: list[int], draft_weights: list[int], k: int
) -> None:
    target, draft = normalised(target_weights), normalised(draft_weights)
    plan = KSeq(Law(target), law_of(draft), k)
    b = pass_probability(target, draft, plan.scale)
    passed = np.minimum(draft, target / plan.scale)
    accepted = sum(passed * (1.0 - b) ** earlier for earlier in range(k))
    residual = plan.residual().probs
    assert residual.min() >= 0.0
    assert residual.sum() == pytest.approx(1.0, abs=1e-12)
    np.testing.assert_allclose(accepted + (1.0 - b) ** k * residual, target, atol=1e-13)


@any_case
@given(weights, weights, st.integers(2, 6))
def test_it_accepts_at_least_what_recursive_rejection_does(
    target_weights: list[int], draft_weights: list[int], k: int
) -> None:
    target, draft = normalised(target_weights), normalised(draft_weights)
    assert (
        KSeq(Law(target), Law(draft), k).acceptance >= recursive_rejection(target, draft, k) - 1e-12
    )


@settings(any_case, max_examples=25)
@given(weights, weights)
def test_it_is_within_its_bound_of_the_best_transport(
    target_weights: list[int], draft_weights: list[int]
) -> None:
    target, draft = normalised(target_weights), normalised(draft_weights)
    best = best_transport(target, draft)
    assert 0.75 * best - 1e-9 <= KSeq(Law(target), Law(draft), 2).acceptance <= best + 1e-9


@any_case
@given(weights, weights)
def test_one_draw_is_the_token_wise_rule(
    target_weights: list[int], draft_weights: list[int]
) -> None:
    target, draft = normalised(target_weights), normalised(draft_weights)
    assume(not np.array_equal(target, draft))
    plan = KSeq(Law(target), Law(draft), 1)
    assert plan.scale == 1.0
    assert plan.acceptance == pytest.approx(np.minimum(target, draft).sum(), abs=1e-15)
    np.testing.assert_allclose(
        plan.residual().probs, Law(target).residual(Law(draft)).probs, atol=1e-15
    )


@pytest.mark.parametrize("k", [1, 2, 5])
def test_equal_laws_accept_the_first_draw(k: int) -> None:
    law = Law(np.array([0.1, 0.2, 0.7]))
    plan = KSeq(law, law, k)
    assert (plan.scale, plan.acceptance) == (1.0, pytest.approx(1.0, abs=1e-15))
    np.testing.assert_allclose(plan.residual().probs.sum(), 1.0)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_laws_without_a_common_token_leave_the_target(k: int) -> None:
    plan = KSeq(Law(np.array([0.4, 0.6, 0.0])), Law.point(2), k)
    assert (plan.scale, plan.acceptance) == (pytest.approx(k, rel=1e-13), 0.0)
    np.testing.assert_array_equal(plan.residual().probs, [0.4, 0.6, 0.0])


# -- the rule --------------------------------------------------------------------------------------


@pytest.mark.parametrize("zeros", [0.0, 0.4])
@pytest.mark.parametrize("seed", range(3))
def test_four_draws_give_the_targets_law(seed: int, zeros: float) -> None:
    table, drafts = LawTable(3, seed, zeros), LawTable(3, seed + 9, zeros)
    assert bias(KSeqRule(), branching_tree(drafts, (4,), True), table, 2) < TOLERANCE


@pytest.mark.parametrize("k", [2, 3])
def test_the_loop_accepts_as_often_as_the_formula_says(k: int) -> None:
    table, drafts = LawTable(3, 5, 0.0), LawTable(3, 6, 0.0)
    wanted = KSeq(Law(table(PROMPT)), Law(drafts(PROMPT)), k).acceptance
    found = accepted_lengths(KSeqRule(), branching_tree(drafts, (k,), True), table, 2)[1]
    assert found == pytest.approx(wanted, abs=1e-12)
    by_rejection = accepted_lengths(ExactRule(), branching_tree(drafts, (k,), True), table, 2)[1]
    assert by_rejection == pytest.approx(
        recursive_rejection(table(PROMPT), drafts(PROMPT), k), abs=1e-12
    )
    assert found > by_rejection + 1e-3


def text(rule: AcceptanceRule, propose: Propose | None, seed: int) -> list[int]:
    table = LawTable(3, 11)
    drafter = NoDrafter() if propose is None else ScriptedDrafter(propose)
    limits = RoundLimits(n_ctx=64, max_nodes=32, max_tokens=30)
    conversation = conversation_of(drafter, PROMPT, SeededNoise(seed))
    list(decode_rounds(TableTarget(table), conversation, DecodeSettings(rule, PLAIN, limits)))
    return conversation.tokens


@pytest.mark.parametrize("seed", range(6))
def test_where_no_law_repeats_it_is_the_exact_rule(seed: int) -> None:
    plain = text(ExactRule(), None, seed)
    assert text(KSeqRule(), top_k_points(LawTable(3, 12), 2, 3), seed) == plain
    for propose in (chain(LawTable(3, 12), 3), branching_tree(LawTable(3, 12), (2, 2), False)):
        assert text(KSeqRule(), propose, seed) == text(ExactRule(), propose, seed)


def test_draws_are_a_run_if_their_laws_are_equal() -> None:
    law, other = Law(np.array([0.5, 0.5])), Law(np.array([0.4, 0.6]))
    equal, sparse = Law(np.array([0.5, 0.5])), Law(np.array([0.5, 0.5]), np.array([0, 2]))
    tree = TreeBuilder()
    for drawn in (law, law, equal, other, law, sparse, sparse, None, None, law):
        tree.add(ROOT, 0, drawn)
    runs = list(kseq._runs(tree.build().draws[ROOT]))
    assert [len(run) for run in runs] == [3, 1, 1, 2, 1, 1, 1]
    assert not list(kseq._runs(()))


def test_a_token_its_draft_law_excludes_is_an_error() -> None:
    law = Law(np.array([0.0, 1.0]))
    with pytest.raises(OptionError, match="token 0 was drafted from a distribution that lacks it"):
        KSeqRule().accept(DraftTree.chain([0], [law]), lambda _: law, SeededNoise(0), 0)


def test_rules_are_built_by_name_and_the_nearest_name_is_told() -> None:
    assert set(rule_names()) >= {"exact", "token", "kseq"}
    for name in ("exact", "token", "kseq"):
        rule = build_rule(name)
        assert (rule.name, rule.exact) == (name, True)
    assert (build_rule("block").name, "block" in rule_names()) == ("exact", False)
    for wrong, near in {"k-seq": "kseq", "tokn": "token"}.items():
        with pytest.raises(OptionError, match=f"did you mean '{near}'"):
            build_rule(wrong)
    with pytest.raises(OptionError, match="the acceptance rule token has no options"):
        build_rule("token(2)")


# -- negative controls -----------------------------------------------------------------------------


def scale_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepts like the token-wise rule k times; the residual would have to be negative."""
    monkeypatch.setattr(kseq, "_scale", lambda target_probs, draft_probs, k: 1.0)


def recursive_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    """The residual of one rejection, however many draws were rejected."""
    monkeypatch.setattr(KSeq, "residual", lambda self: self._target.residual(self._draft))


def first_draw_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the first draw of a run a second chance."""
    runs = kseq._runs
    monkeypatch.setattr(kseq, "_runs", lambda draws: [[*run, run[0]] for run in runs(draws)])


@pytest.mark.parametrize(
    "wrong", [scale_of_one, recursive_residual, first_draw_twice], ids=lambda value: value.__name__
)
def test_wrong_variants_are_caught(wrong, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong(monkeypatch)
    worst = max(
        bias(
            KSeqRule(),
            branching_tree(LawTable(3, seed + 1, 0.0), (2,), True),
            LawTable(3, seed, 0.0),
            2,
        )
        for seed in range(4)
    )
    assert worst > 1e-3


def until_two_differ(drafts: LawTable) -> Propose:
    """Draws a third time only if the first two draws were equal."""

    def propose(request: DraftRequest) -> DraftTree:
        tree = TreeBuilder()
        if request.max_depth < 1:
            return tree.build()
        law = law_of(drafts(request.tokens))
        first, second = (tree.add(ROOT, request.noise.choose(law), law) for _ in range(2))
        if first == second:
            tree.add(ROOT, request.noise.choose(law), law)
        return tree.build()

    return propose


def test_how_many_draws_there_are_must_not_depend_on_the_draws() -> None:
    """The limit the rule's docstring states: the exact rule allows such drafters, k-SEQ does
    not."""
    propose, table = until_two_differ(LawTable(3, 6, 0.0)), LawTable(3, 5, 0.0)
    assert bias(ExactRule(), propose, table, 2) < TOLERANCE
    assert bias(KSeqRule(), propose, table, 2) > 1e-3
