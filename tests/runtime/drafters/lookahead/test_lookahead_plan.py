"""The paper's model of lookahead against enumeration, and what the plan makes of a cost curve."""

from __future__ import annotations

import itertools

import pytest

from specrun.bindings.errors import OptionError
from specrun.runtime.drafters.lookahead import (
    GUESS_PRIORS,
    guessed_tokens,
    kind_of,
    plan_lookahead,
    step_compression,
)
from specrun.runtime.planning import (
    TYPICAL_CPU,
    TYPICAL_GPU,
    CostCurve,
    MatchAcceptance,
    expected_tokens,
)


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.425, 0.9, 1.0])
@pytest.mark.parametrize(("n_draft", "n_guesses"), [(1, 1), (2, 2), (3, 2), (2, 4)])
def test_guessed_tokens_are_the_longest_of_independent_guesses(
    acceptance: float, n_draft: int, n_guesses: int
) -> None:
    """Every outcome of every token of every guess, with its probability."""
    mean = 0.0
    for outcome in itertools.product((True, False), repeat=n_draft * n_guesses):
        probability = 1.0
        for flag in outcome:
            probability *= acceptance if flag else 1.0 - acceptance
        guesses = [outcome[i * n_draft : (i + 1) * n_draft] for i in range(n_guesses)]
        longest = max(
            next((i for i, is_right in enumerate(guess) if not is_right), n_draft)
            for guess in guesses
        )
        mean += probability * (longest + 1)
    assert guessed_tokens(acceptance, n_draft, n_guesses) == pytest.approx(mean, abs=1e-12)


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 1.0])
def test_one_guess_is_leviathans_chain(acceptance: float) -> None:
    assert guessed_tokens(acceptance, 4, 1) == pytest.approx(expected_tokens(acceptance, 4))
    assert guessed_tokens(acceptance, 4, 0) == 1.0


def test_only_one_round_in_f_is_a_hit() -> None:
    assert step_compression(0.5, 3, 4, 1.0) == pytest.approx(guessed_tokens(0.5, 3, 4))
    assert step_compression(0.5, 3, 4, 4.0) == pytest.approx(
        (3.0 + guessed_tokens(0.5, 3, 4)) / 4.0
    )


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((1.1, 2, 2, 2.0), r"acceptance is 1\.1"),
        ((-0.1, 2, 2, 2.0), r"acceptance is -0\.1"),
        ((0.5, 2, 2, 0.5), r"one good speculation in 0\.5 rounds"),
    ],
)
def test_shares_that_are_none_are_refused(
    arguments: tuple[float, int, int, float], problem: str
) -> None:
    with pytest.raises(OptionError, match=problem):
        step_compression(*arguments)


@pytest.mark.parametrize("ngram", range(2, 8))
def test_the_plan_is_the_best_of_all_widths(ngram: int) -> None:
    curve = CostCurve((1, 16, 64, 256), (1.0, 1.05, 1.3, 4.0), (1.0,) * 4)
    plan = plan_lookahead(curve, ngram)
    speeds = {
        width: step_compression(0.425, ngram - 1, width, 3.106)
        / curve.seconds(2 * width * (ngram - 1))
        for width in range(1, 16)
    }
    best = max(speeds, key=lambda width: speeds[width])
    assert (plan.window, plan.guesses, plan.speed_up) == (best, best, pytest.approx(speeds[best]))


def test_a_steep_machine_does_not_look_ahead_and_a_flat_one_looks_far() -> None:
    assert plan_lookahead(TYPICAL_CPU, 5).window == 0
    assert plan_lookahead(CostCurve.flat([1.0, 2.0]), 5).window == 0
    assert 1 <= plan_lookahead(TYPICAL_GPU, 5).window <= 15
    assert plan_lookahead(CostCurve.flat([1.0, 1.0]), 5).window == 15


def test_acceptance_is_the_share_of_hits_by_match_and_rank() -> None:
    acceptance = MatchAcceptance(GUESS_PRIORS)
    first = acceptance.chance(kind_of(2), 0)
    for number in range(400):
        acceptance.learn([kind_of(2), kind_of(1)], 0 if number % 4 else 1)
    assert acceptance.chance(kind_of(2), 0) == pytest.approx(0.75, abs=0.05) != first
    assert acceptance.chance(kind_of(1), 1) == pytest.approx(0.25, abs=0.05)
    # Of kinds that were not seen what all share is learnt, until they are.
    assert acceptance.chance(kind_of(3), 0) == pytest.approx(0.75, abs=0.05)
    for _ in range(20):
        acceptance.learn([kind_of(3)], None)
    assert acceptance.chance(kind_of(3), 0) < 0.1
    assert acceptance.chance(kind_of(2), 0) > 0.6
    assert acceptance.chance(kind_of(9), 0) == acceptance.chance(kind_of(7), 0)


def test_a_text_on_which_nothing_holds_is_noticed_within_some_tokens() -> None:
    acceptance = MatchAcceptance(GUESS_PRIORS)
    for _ in range(300):
        acceptance.learn([kind_of(4)], 0)
    assert acceptance.chance(kind_of(4), 0) > 0.9
    # What held of matches of 4 speaks for those of 2, too, until these fail.
    assert acceptance.chance(kind_of(2), 0) > 0.9
    for most in (0.3, 0.1):
        for number in range(30):
            acceptance.learn([kind_of(1 + number % 7)], None)
        assert acceptance.chance(kind_of(4), 0) < 0.85
        assert acceptance.chance(kind_of(2), 0) < most


def test_acceptance_forgets_old_texts() -> None:
    acceptance = MatchAcceptance(GUESS_PRIORS)
    for rank in (None, 0):
        for _ in range(300):
            acceptance.learn([kind_of(3)], rank)
    assert acceptance.chance(kind_of(3), 0) > 0.9
