"""Block verification: exact (beside all other rules in test_exactness.py), and never keeps less on
average."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.enumeration import (
    PROMPT,
    TOLERANCE,
    FixedTable,
    Propose,
    accepted_lengths,
    bias,
    branching_tree,
    chain,
    numbers_used,
    top_k_points,
)
from support.scripted import PLAIN, LawTable, ScriptedDrafter, TableTarget, conversation_of, law_of

from specrun.bindings.errors import OptionError
from specrun.runtime.acceptance import (
    Acceptance,
    AcceptanceRule,
    BlockRule,
    ExactRule,
    LawAt,
    exact,
)
from specrun.runtime.laws import Law, NoiseSource, SeededNoise
from specrun.runtime.round import DraftRequest, NoDrafter
from specrun.runtime.round.loop import DecodeSettings, RoundLimits, decode_rounds
from specrun.runtime.trees import ROOT, DraftTree, TreeBuilder

TABLES = {
    "some zeros": (LawTable(3, 1), LawTable(3, 2)),
    "many zeros": (LawTable(3, 3, zeros=0.5), LawTable(3, 4, zeros=0.5)),
    "no zeros": (LawTable(3, 5, zeros=0.0), LawTable(3, 6, zeros=0.0)),
    "one law": (LawTable(3, 7), LawTable(3, 7)),
    "nearly one law": (LawTable(3, 7, sharpness=1.5), LawTable(3, 7, sharpness=1.5 + 1e-9)),
    "sharp drafts": (LawTable(3, 8, sharpness=0.5), LawTable(3, 8, sharpness=6.0)),
}


@pytest.mark.parametrize("name", list(TABLES))
def test_chains_of_three_give_the_targets_law(name: str) -> None:
    table, drafts = TABLES[name]
    assert bias(BlockRule(), chain(drafts, 3), table, 4) < TOLERANCE


def test_drafts_that_the_target_never_says_are_exact() -> None:
    """p_i is zero at once, and the residual is the target's whole law."""
    table, drafts = FixedTable(0.5, 0.5, 0.0, 0.0), FixedTable(0.0, 0.0, 0.25, 0.75)
    assert bias(BlockRule(), chain(drafts, 2), table, 3) < TOLERANCE
    assert accepted_lengths(BlockRule(), chain(drafts, 2), table, 3) == pytest.approx({0: 1.0})


def test_where_nothing_can_be_refused_rounding_keeps_the_draft_and_the_targets_law() -> None:
    """p_i = 1 and S_i = 0: h_i would be 0/0."""
    law = Law(np.array([0.5, 0.5]))
    level = exact._Level(1.0, law, law)
    assert level.keep_probability == 1.0
    assert level.residual() is law


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    seed=st.integers(0, 10**6),
    size=st.integers(2, 3),
    length=st.integers(1, 3),
    zeros=st.sampled_from([0.0, 0.3]),
    sharpness=st.floats(0.2, 3.0),
)
def test_every_length_is_reached_at_least_as_often_as_token_by_token(
    seed: int, size: int, length: int, zeros: float, sharpness: float
) -> None:
    table, drafts = LawTable(size, seed, zeros), LawTable(size, seed + 1, zeros, sharpness)
    by_block = at_least(BlockRule(), chain(drafts, length), table, length)
    by_token = at_least(ExactRule(), chain(drafts, length), table, length)
    assert all(exact >= token - 1e-12 for exact, token in zip(by_block, by_token, strict=True))
    assert by_block == pytest.approx(
        [mean_share(table, drafts, count) for count in range(1, length + 1)], abs=1e-12
    )


def at_least(rule: AcceptanceRule, propose: Propose, table: LawTable, length: int) -> list[float]:
    """The probability of keeping at least 1, 2, ... tokens; their sum is the expected accepted
    length."""
    law = accepted_lengths(rule, propose, table, length + 1)
    return [
        sum(law.get(kept, 0.0) for kept in range(least, length + 1))
        for least in range(1, length + 1)
    ]


def mean_share(table: LawTable, drafts: LawTable, length: int) -> float:
    """E[p_i] over all drafts of i tokens, from the definition."""
    mean = 0.0
    for tokens in itertools.product(range(table.size), repeat=length):
        weight = share = 1.0
        for index, token in enumerate(tokens):
            prefix = [*PROMPT, *tokens[:index]]
            draft_prob = drafts(prefix)[token]
            weight *= draft_prob
            share = min(1.0, share * table(prefix)[token] / draft_prob) if draft_prob else 0.0
        mean += weight * share
    return mean


def test_the_papers_example() -> None:
    """Sun et al. 2024, section 1: 11/9 tokens where token-wise acceptance keeps 10/9."""
    table, drafts = FixedTable(1 / 3, 2 / 3), FixedTable(2 / 3, 1 / 3)
    assert sum(at_least(BlockRule(), chain(drafts, 2), table, 2)) == pytest.approx(
        11 / 9, abs=1e-12
    )
    assert sum(at_least(ExactRule(), chain(drafts, 2), table, 2)) == pytest.approx(
        10 / 9, abs=1e-12
    )


# -- what is left to the exact rule ----------------------------------------------------------------


def text(rule: AcceptanceRule, propose: Propose | None, seed: int) -> list[int]:
    table = LawTable(3, 11)
    drafter = NoDrafter() if propose is None else ScriptedDrafter(propose)
    limits = RoundLimits(n_ctx=64, max_nodes=32, max_tokens=30)
    conversation = conversation_of(drafter, PROMPT, SeededNoise(seed))
    list(decode_rounds(TableTarget(table), conversation, DecodeSettings(rule, PLAIN, limits)))
    return conversation.tokens


@pytest.mark.parametrize("seed", range(8))
def test_point_masses_give_plain_decodings_text(seed: int) -> None:
    plain = text(ExactRule(), None, seed)
    assert len(plain) == 32
    for width in (1, 2):
        assert text(BlockRule(), top_k_points(LawTable(3, 12), width, 3), seed) == plain


@pytest.mark.parametrize("seed", range(8))
def test_trees_that_branch_at_the_root_are_decided_by_the_exact_rule(seed: int) -> None:
    # Without zeros, so that there always are two draws at the root: one alone would be a chain.
    propose = branching_tree(LawTable(3, 13, 0.0), (2, 2), False)
    assert text(BlockRule(), propose, seed) == text(ExactRule(), propose, seed)


def test_a_full_chain_ends_with_a_bonus_token_and_a_refused_one_with_a_recovered_token() -> None:
    law = Law(np.array([0.5, 0.5, 0.0]))
    kept = BlockRule().accept(DraftTree.chain([0, 1], [law, law]), lambda _: law, SeededNoise(0), 5)
    assert (kept.path, kept.rejected) == ((0, 1), False)
    other = Law(np.array([0.0, 0.0, 1.0]))
    refused = BlockRule().accept(
        DraftTree.chain([0, 1], [law, law]), lambda _: other, SeededNoise(0), 5
    )
    assert refused == Acceptance((), 2, True)


def test_no_law_is_computed_below_a_token_the_target_never_says() -> None:
    visited: list[int] = []

    def law_at(node: int) -> Law:
        visited.append(node)
        return Law.point(0)

    drafts = Law(np.array([0.5, 0.5]))
    BlockRule().accept(DraftTree.chain([0, 1, 0, 0], [drafts] * 4), law_at, SeededNoise(0), 0)
    assert visited == [ROOT, 0]


def test_a_token_its_draft_law_excludes_is_an_error() -> None:
    law = Law(np.array([0.0, 1.0]))
    with pytest.raises(OptionError, match="token 0 was drafted from a distribution that lacks it"):
        BlockRule().accept(DraftTree.chain([0], [law]), lambda _: law, SeededNoise(0), 0)


# -- negative controls -----------------------------------------------------------------------------


def draws_from_the_target(monkeypatch: pytest.MonkeyPatch) -> AcceptanceRule:
    monkeypatch.setattr(exact._Level, "residual", lambda self: self.law)
    return BlockRule()


def keeps_with_the_share(monkeypatch: pytest.MonkeyPatch) -> AcceptanceRule:
    monkeypatch.setattr(exact._Level, "keep_probability", property(lambda self: self.share))
    return BlockRule()


def forgets_the_share_in_the_residual(monkeypatch: pytest.MonkeyPatch) -> AcceptanceRule:
    """Token-wise acceptance's residual, (P - Q)+, after block verification's tests."""
    monkeypatch.setattr(exact._Level, "residual", lambda self: self.law.residual(self.draft))
    return BlockRule()


class StopsAtTheFirstRefusal(BlockRule):
    """Tests from the front and stops where a test fails, instead of keeping the last that
    passes."""

    def accept(
        self, tree: DraftTree, law_at: LawAt, noise: NoiseSource, position: int
    ) -> Acceptance:
        chain = exact._leading_chain(tree)
        if not chain:
            return ExactRule().accept(tree, law_at, noise, position)
        levels, share = exact._levels(tree, chain, law_at)
        tests = [level.keep_probability for level in levels[1:]] + [share]
        for kept, probability in enumerate(tests):
            if not noise.accept(probability):
                path = tuple(draw.node for draw in chain[:kept])
                return Acceptance(path, noise.choose(levels[kept].residual()), True)
        return self._below(tree, chain, law_at, noise, position)


WRONG = {
    "target's law": draws_from_the_target,
    "share": keeps_with_the_share,
    "token-wise residual": forgets_the_share_in_the_residual,
    "first refusal": lambda _: StopsAtTheFirstRefusal(),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_blocks_are_caught(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = WRONG[wrong](monkeypatch)
    worst = max(
        bias(rule, chain(LawTable(3, seed, 0.0), 2), LawTable(3, seed + 1, 0.0), 3)
        for seed in range(4)
    )
    assert worst > 1e-3


class LeavesForkedTreesToTheExactRule(BlockRule):
    """Chooses the rule by the whole tree, whose shape may depend on the very draws that are
    tested."""

    def accept(
        self, tree: DraftTree, law_at: LawAt, noise: NoiseSource, position: int
    ) -> Acceptance:
        forked = any(len(draws) > 1 for draws in tree.draws.values())
        return (ExactRule() if forked else super()).accept(tree, law_at, noise, position)


def forks_after_a_zero(drafts: LawTable) -> Propose:
    """Two draws in a chain; below a second token 0 hang two more."""

    def propose(request: DraftRequest) -> DraftTree:
        tree, prefix, parent = TreeBuilder(), list(request.tokens), ROOT
        for level in range(min(3, request.max_depth)):
            law = law_of(drafts(prefix))
            if level == 2:
                for _ in range(2 if prefix[-1] == 0 else 0):
                    tree.add(parent, request.noise.choose(law), law)
                break
            prefix.append(request.noise.choose(law))
            parent = tree.add(parent, prefix[-1], law)
        return tree.build()

    return propose


def test_the_rule_may_not_be_chosen_by_what_was_drawn() -> None:
    propose, table = forks_after_a_zero(LawTable(2, 3, 0.0)), LawTable(2, 1, 0.0)
    assert bias(BlockRule(), propose, table, 4) < TOLERANCE
    assert bias(LeavesForkedTreesToTheExactRule(), propose, table, 4) > 1e-3


class KeysTestsByTheirOwnPositions(BlockRule):
    """Tests token i with a number of its own position, which the next round uses again."""

    def accept(
        self, tree: DraftTree, law_at: LawAt, noise: NoiseSource, position: int
    ) -> Acceptance:
        chain = exact._leading_chain(tree)
        if not chain:
            return ExactRule().accept(tree, law_at, noise, position)
        levels, share = exact._levels(tree, chain, law_at)
        tests = [level.keep_probability for level in levels[1:]] + [share]
        for kept in range(len(tests), 0, -1):
            noise.seek(position + kept - 1)
            if noise.accept(tests[kept - 1]):
                break
        else:
            kept = 0
        noise.seek(position + kept)
        law = law_at(chain[-1].node) if kept == len(chain) else levels[kept].residual()
        return Acceptance(
            tuple(draw.node for draw in chain[:kept]), noise.choose(law), kept < len(chain)
        )


def test_numbers_that_refused_a_tail_are_not_used_again() -> None:
    """What test_exactness.py holds for every rule would see the obvious way to key these tests."""
    used = numbers_used(KeysTestsByTheirOwnPositions(), chain(LawTable(3, 5), 3), 0)
    assert len(used) > len(set(used))
