"""Invariant 1: every exact rule, run through the shipped loop, gives the target's law to 1e-12.

The loop runs under a noise source that enumerates every outcome with its probability, so nothing
here is sampled: a bias of one part in a million million fails. Known wrong variants run through the
same test and must fail it, which is what shows that the test can see a bias.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from support.enumeration import (
    PROMPT,
    TOLERANCE,
    Propose,
    accepted_lengths,
    bias,
    chain,
    mixed_tree,
    numbers_used,
    proposals,
)
from support.scripted import LawTable
from support.wrong_drafts import WRONG_DRAFTERS, DropsDuplicates, falsely_stated

from specrun.bench.prove.rules import BranchingNoise, enumerate_law
from specrun.runtime.acceptance import (
    Acceptance,
    AcceptanceRule,
    ExactRule,
    LawAt,
    build_rule,
    rule_names,
)
from specrun.runtime.laws import Law, NoiseSource
from specrun.runtime.trees import ROOT, DraftTree

EXACT_RULES = [name for name in rule_names() if build_rule(name).exact]


@pytest.mark.parametrize("name", list(proposals(3, 0)))
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rule", EXACT_RULES)
def test_exact_rules_give_the_targets_law(rule: str, name: str, seed: int) -> None:
    length = {
        "without replacement": 2,
        "i.i.d. siblings": 2,
        "two drafters": 2,
        "wandering chain": 4,
    }.get(name, 3)
    assert bias(build_rule(rule), proposals(3, seed)[name], LawTable(3, seed), length) < TOLERANCE


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("rule", EXACT_RULES)
def test_arbitrary_trees_give_the_targets_law(rule: str, seed: int) -> None:
    assert (
        bias(
            build_rule(rule), mixed_tree(LawTable(4, seed + 50), seed), LawTable(4, seed), length=2
        )
        < TOLERANCE
    )


@pytest.mark.parametrize("name", ["chain", "point masses", "mixed"])
@pytest.mark.parametrize("rule", EXACT_RULES)
def test_an_end_token_inside_an_accepted_path_ends_the_text(rule: str, name: str) -> None:
    assert (
        bias(build_rule(rule), proposals(3, 5)[name], LawTable(3, 5), 3, frozenset({2})) < TOLERANCE
    )


@pytest.mark.parametrize("rule", EXACT_RULES)
def test_a_drafter_that_equals_its_target_is_always_accepted(rule: str) -> None:
    table = LawTable(3, 1)
    assert accepted_lengths(build_rule(rule), chain(table, 2), table, 3) == pytest.approx({2: 1.0})


@pytest.mark.parametrize("name", list(proposals(3, 0)))
@pytest.mark.parametrize("rule", EXACT_RULES)
def test_no_number_decides_twice(rule: str, name: str) -> None:
    """Enumeration takes every decision for independent; with seeded noise that holds if no key
    comes back."""
    for seed in range(5):
        used = numbers_used(build_rule(rule), proposals(3, seed)[name], seed)
        assert len(used) == len(set(used)) > 0


# -- negative controls: what must not pass ---------------------------------------------------------


class ForgetsTheResidual(ExactRule):
    """Draws from the target's law, not from the residual, after a rejection."""

    def accept(
        self, tree: DraftTree, law_at: LawAt, noise: NoiseSource, position: int
    ) -> Acceptance:
        path: list[int] = []
        node = ROOT
        while True:
            law = law_at(node)
            for draw in tree.draws.get(node, ()):
                token = tree.tokens[draw.node]
                chance = law.probability(token) / (draw.law.probability(token) if draw.law else 1.0)
                if noise.accept(min(1.0, chance)):
                    path.append(draw.node)
                    node = draw.node
                    break
            else:
                return Acceptance(tuple(path), noise.choose(law), True)


class ForgetsToRenormalise(ExactRule):
    """Tests later siblings against max(0, R - Q) as it stands, without the division by its mass."""

    def accept(
        self, tree: DraftTree, law_at: LawAt, noise: NoiseSource, position: int
    ) -> Acceptance:
        path: list[int] = []
        node = ROOT
        while True:
            law = law_at(node)
            left = law.probs.copy()
            for draw in tree.draws.get(node, ()):
                assert draw.law is not None
                token = tree.tokens[draw.node]
                if noise.accept(
                    min(1.0, Law(left, law.ids).probability(token) / draw.law.probability(token))
                ):
                    path.append(draw.node)
                    node = draw.node
                    break
                left = np.maximum(left - draw.law.aligned_to(law), 0.0)
            else:
                return Acceptance(tuple(path), noise.choose(Law.normalised(left, law.ids)), True)


class TakesDrawsForPointMasses(ExactRule):
    """Accepts a drawn token with the target's probability and then removes it (sampled drafts as
    points)."""

    def accept(
        self, tree: DraftTree, law_at: LawAt, noise: NoiseSource, position: int
    ) -> Acceptance:
        draws = {
            parent: tuple(type(draw)(draw.node) for draw in draws)
            for parent, draws in tree.draws.items()
        }
        points = DraftTree(tree.tokens, tree.parents, tree.depths, tree.is_candidate, draws)
        return super().accept(points, law_at, noise, position)


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        (DropsDuplicates(), "i.i.d. siblings"),
        (DropsDuplicates(), "two drafters"),
        (ForgetsToRenormalise(), "i.i.d. siblings"),
        (ForgetsTheResidual(), "chain"),
        (ForgetsTheResidual(), "point masses"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_wrong_rules_are_caught(rule: AcceptanceRule, name: str) -> None:
    assert bias(rule, proposals(3, 2)[name], LawTable(3, 2), 2) > 1e-3


@pytest.mark.parametrize("wrong", WRONG_DRAFTERS, ids=lambda value: value.__name__)
def test_wrong_drafters_are_caught(wrong: Callable[[LawTable], Propose]) -> None:
    biases = [
        bias(ExactRule(), wrong(LawTable(3, seed + 9, 0.0)), LawTable(3, seed, 0.0), 2)
        for seed in range(4)
    ]
    assert max(biases) > 1e-2


def test_a_draw_that_is_not_from_its_stated_law_is_caught() -> None:
    """The stored law must be the one the token was drawn from: a drafter that lies biases the
    text."""
    assert bias(ExactRule(), falsely_stated(LawTable(3, 21, 0.0)), LawTable(3, 3, 0.0), 2) > 1e-2


def test_a_sampled_draft_taken_for_a_point_mass_is_exact_but_accepts_less() -> None:
    """Sample-and-match is unbiased; what it loses is acceptance, which min(1, p/q) keeps."""
    table, drafts = LawTable(3, 8, 0.0), LawTable(3, 9, 0.0)
    propose = chain(drafts, 1)
    assert bias(TakesDrawsForPointMasses(), propose, table, 2) < TOLERANCE

    def accepted(rule: AcceptanceRule) -> float:
        return accepted_lengths(rule, propose, table, 2).get(1, 0.0)

    target_probs, draft_probs = table(PROMPT), drafts(PROMPT)
    assert accepted(ExactRule()) == pytest.approx(
        np.minimum(target_probs, draft_probs).sum(), abs=1e-12
    )
    assert accepted(TakesDrawsForPointMasses()) == pytest.approx(
        (target_probs * draft_probs).sum(), abs=1e-12
    )


def test_the_enumeration_itself_is_complete() -> None:
    """A program of two coins and a die has the product law, and every outcome once."""

    def program(noise: BranchingNoise) -> tuple[bool, int, bool]:
        first = noise.accept(0.25)
        return first, noise.choose(Law(np.array([0.5, 0.0, 0.5]))), noise.accept(0.5)

    wanted = {
        (a, b, c): (0.25 if a else 0.75) * 0.5 * 0.5
        for a, b, c in itertools.product((True, False), (0, 2), (True, False))
    }
    assert enumerate_law(program) == pytest.approx(wanted)
