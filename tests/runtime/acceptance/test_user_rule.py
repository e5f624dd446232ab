"""A rule of one's own: registered by name, refused where it returns no law, proven by one call."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from support.enumeration import TOLERANCE, branching_tree
from support.law_pairs import pair_error
from support.scripted import LawTable

from specrun.bench.prove.rules import LeavesPi, prove_rule
from specrun.bindings.errors import OptionError
from specrun.runtime.acceptance import (
    DEFERRALS,
    TOKEN_RULES,
    LawPair,
    PairRule,
    UserRule,
    build,
    build_rule,
    largest,
    register_rule,
    rule_names,
)
from specrun.runtime.laws import Law


def mean(q: np.ndarray, p: np.ndarray) -> np.ndarray:
    return (q + p) / 2


class SurerOne(PairRule):
    """Reads raw laws: whichever is surer."""

    name = "surer"

    def law(self, pair: LawPair) -> Law:
        surer = largest(pair.raw_draft) > largest(pair.raw_target)
        return pair.draft if surer else pair.target


@pytest.fixture(autouse=True)
def nothing_stays_registered() -> Iterator[None]:
    yield
    build._REGISTERED.clear()


def test_a_function_is_a_rule_by_its_name() -> None:
    register_rule("mean", mean)
    rule = build_rule("mean")
    assert ("mean" in rule_names(), rule.name, rule.exact) == (True, "mean", False)
    assert isinstance(rule, UserRule)
    error = pair_error(
        rule,
        lambda q, p, sq, sp: (sq + sp) / 2,
        lambda drafts: branching_tree(drafts, [2, 1], replace=False),
        LawTable(3, 41),
        LawTable(3, 1),
    )
    assert error < TOLERANCE


def test_the_same_tests_by_one_call() -> None:
    register_rule("mean", mean)
    register_rule("surer", SurerOne())
    for name in ("mean", "surer", *DEFERRALS, *TOKEN_RULES, "lossy", "top-beta"):
        proof = prove_rule(name, times=25)
        assert proof.sound, proof


def test_a_rule_that_looks_elsewhere_does_not_pass() -> None:
    """pi must depend on the two laws alone: a coin of its own makes it another one each time."""
    coin = random.Random(0)
    register_rule("coin", lambda q, p: q if coin.random() < 0.5 else p)
    with pytest.raises(
        OptionError, match="'coin' returned two distributions for the same pair: it must"
    ):
        prove_rule("coin")


def test_a_rule_that_forgets_its_law_does_not_pass() -> None:
    class Forgets(PairRule):
        name = "forgets"

        def law(self, pair: LawPair) -> Law:
            return Law.normalised(mean(pair.draft.aligned_to(pair.target), pair.target.probs))

        def accept(self, *args: object) -> object:  # type: ignore[override]
            return LeavesPi(self).accept(*args)  # type: ignore[arg-type]

    assert prove_rule(Forgets(), times=2).error > 1e-3


def test_exact_rules_are_proven_elsewhere() -> None:
    with pytest.raises(OptionError, match="exact states no distribution of its own"):
        prove_rule("exact")


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (lambda q, p: None, "but NoneType is no array of numbers"),
        (lambda q, p: "half", "but str is no array of numbers"),
        (lambda q, p: 0.5, "but float is no array of numbers"),
        (lambda q, p: p[:2], r"but an array of shape \(2,\), not \(4,\)"),
        (lambda q, p: p / 2, "but probabilities that sum to 0.5"),
        (lambda q, p: 2 * p - q, "but a probability of -0.2"),
        (lambda q, p: p * np.nan, "but numbers that are not finite"),
    ],
)
def test_what_is_no_law_is_refused(
    function: Callable[[np.ndarray, np.ndarray], np.ndarray], problem: str
) -> None:
    q, p = Law(np.array([0.4, 0.3, 0.2, 0.1])), Law(np.array([0.1, 0.2, 0.3, 0.4]))
    register_rule("mine", function)
    rule = build_rule("mine")
    assert isinstance(rule, PairRule)
    with pytest.raises(
        OptionError, match=f"the rule 'mine' returned no distribution, {problem}: give"
    ):
        rule.law(LawPair(q, p, q, p))


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("exact", "'exact' is the name of a rule that exists"),
        ("cascade-token", "is the name of a rule that exists"),
        ("cascade", "is the name of a rule that exists"),
        ("lossy", "is the name of a rule that exists"),
        ("mine(x=1)", "no name for a rule: give letters"),
        ("", "a name or a file is missing"),
    ],
)
def test_names_that_make_no_sense_are_refused(name: str, problem: str) -> None:
    with pytest.raises(OptionError, match=problem):
        register_rule(name, mean)


def test_a_rule_without_a_function_is_refused() -> None:
    with pytest.raises(
        OptionError, match="the rule 'mine' is 3: give a function of two distributions"
    ):
        register_rule("mine", 3)  # type: ignore[arg-type]


def test_an_unknown_rule_names_the_nearest_also_of_ones_own() -> None:
    register_rule("my-mean", mean)
    with pytest.raises(OptionError, match="did you mean 'my-mean'"):
        build_rule("my-men")
    with pytest.raises(OptionError, match="the acceptance rule my-mean has no options"):
        build_rule("my-mean(alpha=1)")
    with pytest.raises(OptionError, match=r"there is no acceptance rule 'lossi': .* 'lossy'"):
        build_rule("lossi")
