"""The paper's model of lookahead against enumeration, and the width planned for a cost curve."""

from __future__ import annotations

import itertools

import pytest

from specrun.runtime.drafters.lookahead import (
    GUESS_PRIORS,
    guessed_tokens,
    kind_of,
    planned_width,
)
from specrun.runtime.planning import (
    TYPICAL_CPU,
    TYPICAL_GPU,
    CostCurve,
    MatchAcceptance,
    typical_curve,
)


@pytest.mark.parametrize("acceptance", [0.0, 0.425, 1.0])
@pytest.mark.parametrize(("n_draft", "n_guesses"), [(4, 0), (4, 1), (2, 2), (3, 2), (2, 4)])
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
        lengths = [guess.index(False) if False in guess else n_draft for guess in guesses]
        mean += probability * (max(lengths, default=0) + 1)
    assert guessed_tokens(acceptance, n_draft, n_guesses) == pytest.approx(mean, abs=1e-12)


@pytest.mark.parametrize("ngram", [2, 5, 7])
def test_the_plan_is_the_best_of_all_widths(ngram: int) -> None:
    """Tokens a second if one round in 3.106 guesses well, a token with 0.425: equation 5."""
    curve = CostCurve((1, 16, 64, 256), (1.0, 1.05, 1.3, 4.0), (1.0,) * 4)
    speeds = {
        width: (2.106 + guessed_tokens(0.425, ngram - 1, width))
        / curve.seconds(2 * width * (ngram - 1))
        for width in range(1, 16)
    }
    assert planned_width(curve, ngram) == max(speeds, key=lambda width: speeds[width])


def test_a_steep_machine_does_not_look_ahead_and_a_flat_one_looks_far() -> None:
    assert planned_width(TYPICAL_CPU, 5) == 0
    assert planned_width(CostCurve.flat([1.0, 2.0]), 5) == 0
    assert 1 <= planned_width(TYPICAL_GPU, 5) <= 15
    assert planned_width(CostCurve.flat([1.0, 1.0]), 5) == 15


def test_typical_curves_stand_for_what_was_not_measured() -> None:
    assert typical_curve(0) is TYPICAL_CPU
    assert typical_curve(3) is TYPICAL_GPU
    assert typical_curve(-1) is TYPICAL_GPU  # all layers


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


def test_acceptance_follows_a_text_that_changes() -> None:
    acceptance = MatchAcceptance(GUESS_PRIORS)
    for _ in range(300):
        acceptance.learn([kind_of(4)], 0)
    # What held of matches of 4 speaks for those of 2, too, until these fail.
    assert min(acceptance.chance(kind_of(matched), 0) for matched in (2, 4)) > 0.9
    for most in (0.3, 0.1):
        for number in range(30):
            acceptance.learn([kind_of(1 + number % 7)], None)
        assert acceptance.chance(kind_of(4), 0) < 0.85
        assert acceptance.chance(kind_of(2), 0) < most
    for _ in range(300):
        acceptance.learn([kind_of(3)], 0)
    assert acceptance.chance(kind_of(3), 0) > 0.9
