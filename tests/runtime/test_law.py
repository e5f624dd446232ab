"""Laws, dense and sparse: probabilities, draws, residuals, and the cases without mass."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrun.bindings.errors import OptionError
from specrun.runtime.laws import Law

SIZE = 7


def dense(*probs: float) -> Law:
    return Law(np.array(probs, float))


def sparse(pairs: dict[int, float]) -> Law:
    return Law(np.array(list(pairs.values()), float), np.array(list(pairs), np.intp))


def spread(law: Law, size: int = SIZE) -> np.ndarray:
    """The law as a plain array, by its definition."""
    out = np.zeros(size)
    for index, prob in enumerate(law.probs):
        out[index if law.ids is None else law.ids[index]] += prob
    return out


@st.composite
def laws(draw, positive: bool = False) -> Law:
    weights = draw(
        st.lists(st.integers(1 if positive else 0, 5), min_size=SIZE, max_size=SIZE).filter(any)
    )
    probs = np.array(weights) / sum(weights)
    if draw(st.booleans()):
        return Law(probs)
    ids = np.flatnonzero(probs) if draw(st.booleans()) else np.arange(SIZE)
    return Law(probs[ids], ids)


any_case = settings(max_examples=300, deadline=None, derandomize=True)


@any_case
@given(laws())
def test_probability_is_that_of_the_definition(law):
    assert [law.probability(token) for token in range(SIZE + 2)] == [*spread(law), 0.0, 0.0]


@any_case
@given(laws(), laws())
def test_alignment_keeps_each_tokens_probability(first, other):
    tokens = np.arange(SIZE) if other.ids is None else other.ids
    np.testing.assert_array_equal(first.aligned_to(other), spread(first)[tokens])


@pytest.mark.parametrize(("mine", "others"), [(3, 7), (7, 3)], ids=["shorter", "longer"])
@pytest.mark.parametrize("kinds", ["dd", "ds", "sd", "ss"])
def test_alignment_of_vocabularies_of_different_size(mine, others, kinds):
    def law(size: int, kind: str) -> Law:
        probs = np.arange(1, size + 1) / (size * (size + 1) / 2)
        return Law(probs) if kind == "d" else Law(probs, np.arange(size))

    first, other = law(mine, kinds[0]), law(others, kinds[1])
    np.testing.assert_array_equal(first.aligned_to(other), spread(first)[:others])


@any_case
@given(laws(), laws())
def test_the_residual_is_the_normalised_positive_part(target, draft):
    left = np.maximum(spread(target) - spread(draft), 0.0)
    residual = spread(target.residual(draft))
    if left.sum() == 0.0:
        np.testing.assert_array_equal(residual, spread(target))
    else:
        np.testing.assert_allclose(residual, left / left.sum(), atol=1e-15)


@any_case
@given(laws(), laws())
def test_acceptance_and_residual_add_up_to_the_target(target, draft):
    """sum over x of Q(x) min(1, P(x)/Q(x)) [x] + P(rejection) residual = P."""
    p, q = spread(target), spread(draft)
    kept = np.minimum(p, q)
    np.testing.assert_allclose(
        kept + (1.0 - kept.sum()) * spread(target.residual(draft)), p, atol=1e-12
    )


def test_operations_leave_their_operands_alone():
    target, draft = dense(0.5, 0.3, 0.2), sparse({0: 0.9, 2: 0.1})
    before = target.probs.copy(), draft.probs.copy()
    target.residual(draft)
    target.without(0)
    target.token_at(0.5)
    np.testing.assert_array_equal(target.probs, before[0])
    np.testing.assert_array_equal(draft.probs, before[1])


@any_case
@given(laws(), st.integers(0, SIZE + 1))
def test_without_removes_one_token(law, token):
    expected = spread(law, SIZE + 2)
    removed = expected.copy()
    removed[token] = 0.0
    if removed.sum() > 0.0:
        expected = removed / removed.sum()
    np.testing.assert_allclose(spread(law.without(token), SIZE + 2), expected, atol=1e-15)


def test_a_law_sure_of_a_token_survives_its_rejection():
    """It had probability zero: only rounding gets there, and nothing must become NaN."""
    for law in (Law.point(3), dense(0.0, 0.0, 0.0, 1.0), sparse({1: 0.0, 3: 1.0})):
        assert law.without(3).probability(3) == 1.0
        assert law.residual(Law.point(3)).probability(3) == 1.0


@any_case
@given(laws(), st.floats(0.0, 1.0, exclude_max=True))
def test_a_draw_never_has_zero_mass(law, uniform):
    assert law.probability(law.token_at(uniform)) > 0.0


@pytest.mark.parametrize(
    "uniform", [0.0, 2.0**-53, 0.5, 1.0 - 2.0**-53], ids=["0", "least", "half", "most"]
)
@pytest.mark.parametrize("zeros", [(0, 1), (5, 6), (0, 6), (2, 3)], ids=str)
def test_a_draw_at_the_edges_never_has_zero_mass(uniform, zeros):
    probs = np.full(SIZE, 0.1)
    probs[list(zeros)] = 0.0
    law = Law(probs / probs.sum())
    assert law.probs[law.token_at(uniform)] > 0.0


def test_a_draw_at_the_end_survives_rounding():
    probs = np.full(10, 0.1)  # the sum in floats is not 1
    assert Law(np.append(probs, 0.0)).token_at(1.0 - 2.0**-53) == 9
    assert Law(np.full(3, 1e-310)).token_at(1.0 - 2.0**-53) in (0, 1, 2)


@any_case
@given(laws())
def test_the_inverse_cumulative_law_is_exact(law):
    """Between two neighbouring borders the token is constant, so their distances are the
    probabilities."""
    borders = np.concatenate([[0.0], np.cumsum(spread(law))])
    for token, (low, high) in enumerate(itertools.pairwise(borders)):
        if high - low > 1e-9:
            for uniform in (low + 1e-12, (low + high) / 2, high - 1e-12):
                assert law.token_at(min(uniform, 1.0 - 2.0**-53)) == token


@any_case
@given(laws(), st.floats(0.0, 1.0, exclude_max=True))
def test_one_number_gives_one_token_however_the_law_is_stored(law, uniform):
    full = spread(law)
    ids = np.flatnonzero(full)
    assert Law(full).token_at(uniform) == Law(full[ids], ids).token_at(uniform)


@any_case
@given(laws())
def test_the_most_likely_token_is_the_lowest_of_equals(law):
    probs = spread(law)
    assert law.most_likely == (int(probs.argmax()), probs.max())


def test_a_point():
    point = Law.point(5)
    assert point.token_at(0.99) == 5
    assert point.most_likely == (5, 1.0)
    assert point.probability(4) == 0.0


@pytest.mark.parametrize("weights", [[0.0, 0.0], [np.nan, 1.0], [np.inf, 1.0], []], ids=str)
def test_weights_without_mass_are_refused(weights):
    with pytest.raises(OptionError, match="total mass"):
        Law.normalised(np.array(weights))


def test_weights_are_normalised():
    np.testing.assert_allclose(Law.normalised(np.array([1.0, 3.0])).probs, [0.25, 0.75])
