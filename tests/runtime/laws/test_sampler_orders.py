"""Every order of two samplers, and longer ones, equal llama.cpp's own chain to 1e-6.

The text is longer than the windows of penalties and of DRY, and holds tokens of positive and of
negative logits, because the repeat penalty looks at the sign. All laws are compared whole; nothing
is drawn.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator

import numpy as np
import pytest
from support.llama_samplers import LlamaSamplers

from specrun.runtime import SamplingParams
from specrun.runtime.laws import DEFAULT_ORDER, Law, samplers, transformed_law
from specrun.runtime.laws.transform import penalty_window

SIZE = 120
TOLERANCE = 1e-6
ACTIVE = SamplingParams(
    repeat_penalty=1.7,
    frequency_penalty=0.3,
    presence_penalty=-0.4,
    repeat_last_n=8,
    dry_multiplier=0.9,
    dry_allowed_length=1,
    dry_penalty_last_n=12,
    dry_sequence_breakers=(),
    top_n_sigma=1.6,
    top_k=30,
    typical_p=0.9,
    top_p=0.9,
    min_p=0.02,
    xtc_probability=1.0,
    xtc_threshold=0.05,
    temperature=0.7,
)
WARMTHS = {
    "cold": {"temperature": 0.4},
    "hot": {"temperature": 1.6},
    "tiny": {"temperature": 1e-20},
    "greedy": {"temperature": 0.0},
    "dynamic": {"temperature": 0.8, "dynatemp_range": 0.5, "dynatemp_exp": 1.5},
    "dynamic-from-0": {"temperature": 0.3, "dynatemp_range": 1.5},
}
PAIRS = list(itertools.product(DEFAULT_ORDER, repeat=2))
TRIPLES = [
    order
    for order in itertools.product(DEFAULT_ORDER, repeat=3)
    if {"temperature", "penalties"} <= {*order}
]


def situation(seed: int) -> tuple[np.ndarray, list[int]]:
    """A row of logits, and a text that says its best tokens, some others, and a repetition."""
    generator = np.random.default_rng(seed)
    row = (2.5 * generator.standard_normal(SIZE)).astype(np.float32)
    best, others = np.argsort(-row)[:5].tolist(), generator.integers(0, SIZE, 12).tolist()
    text = [*others, best[0], best[1], best[2], others[0], best[0], best[1], best[3], best[0]]
    window = text[-8:]
    assert row[window].max() > 1.0
    assert row[others[0]] in row[window]
    return row, text


SITUATIONS = [situation(seed) for seed in range(3)]


def dense(law: Law) -> np.ndarray:
    out = np.zeros(SIZE)
    out[np.arange(SIZE) if law.ids is None else law.ids] = law.probs
    return out


def our_law(row: np.ndarray, text: list[int], params: SamplingParams) -> np.ndarray:
    return dense(transformed_law(row, params, penalty_window(text, (), params)))


def llamas_law(row: np.ndarray, text: list[int], params: SamplingParams) -> np.ndarray:
    with LlamaSamplers(params, SIZE) as native:
        native.accept(text)
        return native.law(row)[0]


def settings(orders: Iterable[tuple[str, ...]], warmth: str) -> Iterator[SamplingParams]:
    """The orders at one temperature, but those after which llama.cpp's law is not a number.

    Its typical-p takes 0 log 0 for that: nothing before it may leave a token without mass.
    """
    cold = {"temperature"} if warmth in ("greedy", "tiny") else set()
    for order in orders:
        last = max((place for place, name in enumerate(order) if name == "typ_p"), default=0)
        if not ({"top_n_sigma"} | cold) & {*order[:last]}:
            yield ACTIVE.replace(**WARMTHS[warmth], samplers=order)


def largest_distance(orders: Iterable[tuple[str, ...]], warmth: str) -> tuple[float, str]:
    """The largest total variation from llama.cpp's laws, and where it is."""
    worst = 0.0, ""
    for params in settings(orders, warmth):
        for row, text in SITUATIONS:
            ours, theirs = our_law(row, text, params), llamas_law(row, text, params)
            worst = max(worst, (abs(ours - theirs).sum() / 2, ";".join(params.samplers)))
    return worst


@pytest.mark.parametrize("warmth", WARMTHS)
def test_every_pair_in_every_order(warmth: str) -> None:
    assert len(list(settings(PAIRS, warmth))) >= 75
    assert largest_distance(PAIRS, warmth) < (TOLERANCE, "")


@pytest.mark.parametrize("warmth", WARMTHS)
def test_every_triple_with_temperature_and_penalties(warmth: str) -> None:
    assert len(list(settings(TRIPLES, warmth))) >= 40
    assert largest_distance(TRIPLES, warmth) < (TOLERANCE, "")


@pytest.mark.parametrize("warmth", WARMTHS)
def test_long_orders(warmth: str) -> None:
    """Permutations of all samplers, and sequences with repetitions."""
    generator = np.random.default_rng(5)
    orders = [tuple(generator.permutation(DEFAULT_ORDER).tolist()) for _ in range(25)]
    orders += [tuple(generator.choice(DEFAULT_ORDER, 5).tolist()) for _ in range(50)]
    assert len(list(settings(orders, warmth))) > 20
    assert largest_distance(orders, warmth) < (TOLERANCE, "")


@pytest.mark.parametrize("order", ["temperature;penalties", "top_k;temperature;penalties"])
@pytest.mark.parametrize("shift", [-3.0, 2.0])
def test_logits_that_were_shifted_are_another_law(order: str, shift: float) -> None:
    """The control: the comparison sees a constant that was added before the penalties."""
    params = ACTIVE.replace(samplers=order)
    for row, text in SITUATIONS:
        shifted = our_law(row + np.float32(shift), text, params)
        assert abs(shifted - llamas_law(row, text, params)).sum() / 2 > 0.01


def test_nothing_after_temperature_0_changes_the_token() -> None:
    """Also typical-p, where llama.cpp's law is not a number."""
    for name in DEFAULT_ORDER:
        params = ACTIVE.replace(temperature=0.0, samplers=("temperature", name))
        assert params.is_greedy
        for row, text in SITUATIONS:
            law = our_law(row, text, params)
            assert law[row.argmax()] == 1.0


def test_a_bias_comes_before_a_temperature_that_comes_before_penalties() -> None:
    params = ACTIVE.replace(samplers="temperature;penalties;top_k")
    for row, text in SITUATIONS:
        biased = params.replace(logit_bias={text[-1]: -9.0, text[-2]: 2.5, 7: 4.0})
        ours, theirs = our_law(row, text, biased), llamas_law(row, text, biased)
        np.testing.assert_allclose(ours, theirs, atol=TOLERANCE)
        assert abs(ours - our_law(row, text, params)).sum() > 0.1


def test_forbidden_tokens_stay_forbidden_in_every_order() -> None:
    """As a grammar and a bias of -inf forbid them."""
    for order in itertools.permutations(("temperature", "penalties", "top_k", "min_p")):
        params = ACTIVE.replace(samplers=order, presence_penalty=-3.0)
        for row, text in SITUATIONS:
            masked = row.copy()
            masked[text[-3:]] = -math.inf
            ours, theirs = our_law(masked, text, params), llamas_law(masked, text, params)
            np.testing.assert_allclose(ours, theirs, atol=TOLERANCE)
            assert not ours[text[-3:]].any()


@pytest.mark.parametrize("temperature", [1e-300, 1e-30])
def test_many_temperatures_that_overflow_leave_the_best_tokens(temperature: float) -> None:
    row = np.array([3.0, -2.0, 5.0, 5.0, 4.9], np.float32)
    params = ACTIVE.replace(
        temperature=temperature, samplers=("temperature",) * 20, repeat_penalty=1.0
    )
    np.testing.assert_array_equal(transformed_law(row, params).probs, [0.5, 0.5])


def test_a_sort_of_the_whole_row_says_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [
        (params.effective(), row, text)
        for warmth in WARMTHS
        for params in settings([*PAIRS, DEFAULT_ORDER], warmth)
        for row, text in SITUATIONS[:1]
    ]
    first = [our_law(row, text, params) for params, row, text in cases]
    monkeypatch.setattr(samplers, "_GROUPS", 1)  # a whole sort in place of the few highest
    again = [our_law(row, text, params) for params, row, text in cases]
    np.testing.assert_array_equal(first, again)


# -- XTC draws: a mixture ------------------------------------------------------------------------


@pytest.mark.parametrize("warmth", ["cold", "dynamic"])
def test_xtc_in_every_place_is_a_mixture_of_llamas_laws(warmth: str) -> None:
    orders = itertools.permutations(("xtc", "temperature", "penalties"))
    for params in settings(orders, warmth):
        for row, text in SITUATIONS:
            ours = our_law(row, text, params.replace(xtc_probability=0.3))
            cut, whole = (
                llamas_law(row, text, params.replace(xtc_probability=chance))
                for chance in (1.0, 0.0)
            )
            np.testing.assert_allclose(ours, 0.3 * cut + 0.7 * whole, atol=TOLERANCE)
