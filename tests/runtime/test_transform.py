"""Logits to law: against a plain reference, against llama.cpp's own samplers, and at the edges."""

from __future__ import annotations

import ctypes
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_cpp import llama_cpp

from specrun.bindings.errors import DecodeFailedError, OptionError
from specrun.runtime import SamplingParams
from specrun.runtime.laws import Law, transformed_law
from specrun.runtime.laws.transform import log_probability, penalty_window

OFF = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


def spread(law: Law, size: int) -> np.ndarray:
    out = np.zeros(size)
    out[np.arange(len(law.probs)) if law.ids is None else law.ids] = law.probs
    return out


def reference(logits: np.ndarray, params: SamplingParams, window: list[int]) -> np.ndarray:
    """The law token by token, as llama.cpp's documentation puts it; sorting is by (logit, lower id
    first)."""
    values = {token: np.float32(value) for token, value in enumerate(logits)}
    for token, bias in params.logit_bias.items():
        if token in values:
            values[token] = np.float32(values[token] + np.float32(bias))
    if params.has_penalties:
        for token in set(window) & set(values):
            value, times = values[token], window.count(token)
            scale = np.float32(params.repeat_penalty)
            value = value * scale if value <= 0 else value / scale
            value = value - np.float32(times) * np.float32(params.frequency_penalty)
            values[token] = value - np.float32(params.presence_penalty)
    order = sorted(values, key=lambda token: (-values[token], token))
    law = np.zeros(len(logits))
    if params.temperature == 0.0:
        law[order[0]] = 1.0
        return law
    if params.top_k > 0:
        order = order[: params.top_k]
    weights = [math.exp(float(values[token]) - float(values[order[0]])) for token in order]
    if params.top_p < 1.0:
        total, kept = 0.0, 0
        while total < params.top_p * math.fsum(weights) or kept == 0:
            total += weights[kept]
            kept += 1
        order, weights = order[:kept], weights[:kept]
    if params.min_p > 0.0:
        order = [
            token
            for token, weight in zip(order, weights, strict=True)
            if weight >= params.min_p * weights[0]
        ]
    tempered = [
        math.exp((float(values[token]) - float(values[order[0]])) / params.temperature)
        for token in order
    ]
    law[order] = np.array(tempered) / math.fsum(tempered)
    return law


@st.composite
def cases(draw) -> tuple[np.ndarray, SamplingParams, list[int]]:
    size = draw(st.sampled_from([1, 2, 5, 40, 200]))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    logits = (draw(st.sampled_from([0.0, 1.0, 5.0])) * generator.standard_normal(size)).astype(
        np.float32
    )
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.1, 0.8, 1.0, 3.0])),
        top_k=draw(st.sampled_from([0, 1, 2, 7, 1000])),
        top_p=draw(st.sampled_from([0.0, 0.3, 0.9, 1.0])),
        min_p=draw(st.sampled_from([0.0, 0.03, 0.4, 1.0])),
        repeat_penalty=draw(st.sampled_from([1.0, 1.3, 0.7])),
        presence_penalty=draw(st.sampled_from([0.0, 0.7, -0.7])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.4])),
        logit_bias=draw(st.sampled_from([{}, {0: 2.5}, {1: -math.inf, 3: 1.0, 10**6: 5.0}])),
    )
    window = draw(st.lists(st.integers(0, size + 3), max_size=12))
    return logits, params, window


@settings(max_examples=600, deadline=None, derandomize=True)
@given(cases())
def test_equals_the_plain_reference(case):
    logits, params, window = case
    before = logits.copy()
    law = transformed_law(logits, params, window)
    np.testing.assert_allclose(
        spread(law, len(logits)), reference(logits, params, window), atol=1e-9
    )
    np.testing.assert_array_equal(logits, before)  # the row is a view of llama.cpp's memory
    if law.ids is not None:
        assert (np.diff(law.ids) > 0).all()


class NativeChain:
    """llama.cpp's samplers over one row."""

    def __init__(self, params: SamplingParams, size: int) -> None:
        self.chain = llama_cpp.llama_sampler_chain_init(
            llama_cpp.llama_sampler_chain_default_params()
        )
        native = llama_cpp
        for sampler in (
            self._penalties(params, size),
            native.llama_sampler_init_top_k(params.top_k),
            native.llama_sampler_init_top_p(params.top_p, 0),
            native.llama_sampler_init_min_p(params.min_p, 0),
            native.llama_sampler_init_temp(params.temperature),
            native.llama_sampler_init_dist(0),  # the last one computes the probabilities
        ):
            native.llama_sampler_chain_add(self.chain, sampler)

    @staticmethod
    def _penalties(params: SamplingParams, size: int):
        return llama_cpp.llama_sampler_init_penalties(
            size,
            params.repeat_last_n,
            params.repeat_penalty,
            params.frequency_penalty,
            params.presence_penalty,
        )

    def law(self, logits: np.ndarray, window: list[int]) -> np.ndarray:
        for token in window:
            llama_cpp.llama_sampler_accept(self.chain, token)
        data = (llama_cpp.llama_token_data * len(logits))()
        for token, value in enumerate(logits):
            data[token].id, data[token].logit = token, value
        array = llama_cpp.llama_token_data_array(data, len(logits), -1, False)
        llama_cpp.llama_sampler_apply(self.chain, ctypes.byref(array))
        law = np.zeros(len(logits))
        for index in range(array.size):
            law[array.data[index].id] = array.data[index].p
        llama_cpp.llama_sampler_free(self.chain)
        return law


NATIVE = {
    "off": {},
    "defaults": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.7},
    "top-p-hot": {"top_p": 0.7, "temperature": 2.0},
    "min-p": {"min_p": 0.2},
    "min-p-cold": {"min_p": 0.2, "temperature": 0.3},
    "all": {"temperature": 1.4, "top_k": 20, "top_p": 0.9, "min_p": 0.1},
    "penalties": {"repeat_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    "penalties-and-all": {
        "repeat_penalty": 1.2,
        "frequency_penalty": 0.5,
        "top_k": 10,
        "top_p": 0.8,
    },
    "short-window": {"repeat_penalty": 1.5, "repeat_last_n": 3},
}


@pytest.mark.parametrize("changes", NATIVE.values(), ids=NATIVE)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_equals_llamas_own_samplers(changes, seed):
    params = OFF.replace(**changes)
    generator = np.random.default_rng(seed)
    logits = (2.0 * generator.standard_normal(100)).astype(np.float32)
    tokens = [int(token) for token in generator.integers(0, 100, 20)]
    native = NativeChain(params, 100).law(logits, tokens)
    ours = spread(transformed_law(logits, params, penalty_window(tokens, (), params)), 100)
    assert set(np.flatnonzero(ours)) == set(np.flatnonzero(native))
    np.testing.assert_allclose(ours, native, atol=1e-5)


def test_truncation_reads_the_untempered_law_and_temperature_comes_last():
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05])).astype(np.float32)
    hot = spread(transformed_law(logits, OFF.replace(top_p=0.7, temperature=100.0)), 4)
    np.testing.assert_allclose(hot, [0.5, 0.5, 0.0, 0.0], atol=0.01)
    cold = spread(transformed_law(logits, OFF.replace(min_p=0.2, temperature=0.5)), 4)
    np.testing.assert_array_equal(cold > 0, [True, True, True, False])


def test_penalties_come_before_truncation():
    logits = np.array([2.0, 1.9, 0.0], np.float32)
    law = transformed_law(logits, OFF.replace(top_k=1, presence_penalty=1.0), [0])
    assert law.most_likely == (1, 1.0)


def test_min_p_reads_what_top_p_left():
    logits = np.log(np.array([0.4, 0.35, 0.25])).astype(np.float32)
    assert np.count_nonzero(transformed_law(logits, OFF.replace(top_p=0.7, min_p=0.6)).probs) == 2


@pytest.mark.parametrize("size", [50, 40_000])
@pytest.mark.parametrize(
    ("changes", "kept"), [({"top_k": 3}, 3), ({"top_k": 1}, 1), ({"min_p": 1.0}, None)]
)
def test_of_equal_logits_the_lower_ids_stay(size, changes, kept):
    law = transformed_law(np.zeros(size, np.float32), OFF.replace(**changes))
    kept = size if kept is None else kept
    np.testing.assert_array_equal(np.flatnonzero(spread(law, size)), np.arange(kept))


def test_greedy_takes_the_lowest_of_equals():
    assert transformed_law(
        np.array([1.0, 3.0, 3.0], np.float32), OFF.replace(temperature=0.0)
    ).most_likely == (1, 1.0)


@pytest.mark.parametrize("size", [1_000, 32_000, 32_003, 128_000])
@pytest.mark.parametrize("k", [1, 2, 40, 64, 499])
@pytest.mark.parametrize("kind", ["normal", "few values", "ascending", "mostly -inf"])
def test_top_k_of_large_vocabularies_equals_a_sort(size, k, kind):
    generator = np.random.default_rng([size, k])
    logits = generator.standard_normal(size).astype(np.float32)
    if kind == "few values":
        logits = np.round(logits)
    elif kind == "ascending":
        logits.sort()
    elif kind == "mostly -inf":
        logits[generator.random(size) < 0.999] = -np.inf
        logits[size // 2] = 0.0
    law = transformed_law(logits, OFF.replace(top_k=k))
    expected = np.sort(np.argsort(-logits, kind="stable")[:k])
    expected = expected[np.isfinite(logits[expected])]
    np.testing.assert_array_equal(np.flatnonzero(spread(law, size)), expected)


@pytest.mark.parametrize("top_k", [3, 4, 10**9])
def test_a_top_k_beyond_the_vocabulary_keeps_all(top_k):
    logits = np.array([0.0, 1.0, 2.0], np.float32)
    np.testing.assert_allclose(
        spread(transformed_law(logits, OFF.replace(top_k=top_k)), 3),
        spread(transformed_law(logits, OFF), 3),
    )


SETTINGS = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.9},
    "min-p": {"min_p": 0.1},
    "defaults": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
}


@pytest.mark.parametrize("size", [100, 20_003])
@pytest.mark.parametrize("changes", SETTINGS.values(), ids=SETTINGS)
def test_forbidden_tokens_have_no_mass(changes, size):
    logits = np.full(size, -np.inf, np.float32)
    logits[[7, 70]] = 1.0, 2.0
    law = spread(transformed_law(logits, OFF.replace(**changes)), size)
    assert set(np.flatnonzero(law)) <= {7, 70}
    assert law.sum() == pytest.approx(1.0)
    assert np.isfinite(law).all()


FORBIDDEN = dict.fromkeys(range(200), -math.inf)


@pytest.mark.parametrize(
    "changes", [{}, {"top_k": 3}, {"top_p": 0.5}, {"temperature": 0.0}], ids=str
)
@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            {"logit_bias": FORBIDDEN},
            "none of 200 tokens is left after logit_bias: allow at least one",
        ),
        ({"presence_penalty": 1e39}, "none of 200 tokens is left after presence_penalty:"),
        (
            {"logit_bias": FORBIDDEN, "repeat_penalty": 1.2},
            "after logit_bias and repeat_penalty: allow at least one",
        ),
        (
            {"logit_bias": {3: 3e38, 4: 1.0}, "frequency_penalty": -3e38},
            "the highest logit is inf after logit_bias and frequency_penalty, and 0 before: give",
        ),
    ],
    ids=["bias", "penalty", "both", "overflow"],
)
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_settings_that_leave_no_token_are_blamed_not_the_model(changes, settings, problem):
    params = OFF.replace(**changes, **settings)
    with pytest.raises(OptionError, match=problem):
        transformed_law(np.zeros(200, np.float32), params, list(range(200)))
    # One token that stays is enough.
    if settings == {"logit_bias": FORBIDDEN}:
        assert transformed_law(np.zeros(201, np.float32), params).most_likely == (200, 1.0)
        # A row that is broken without them is the model's fault, whatever the settings.
        with pytest.raises(DecodeFailedError, match="the file or the backend is broken"):
            transformed_law(np.full(200, np.nan, np.float32), params)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("where", [0, 50, -1], ids=["first", "middle", "last"])
@pytest.mark.parametrize("size", [100, 20_003])
@pytest.mark.parametrize("changes", SETTINGS.values(), ids=SETTINGS)
def test_broken_logits_are_an_error_not_a_law(changes, size, where, bad):
    logits = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    logits[where] = bad
    with pytest.raises(DecodeFailedError, match=r"nan|inf"):
        transformed_law(logits, OFF.replace(**changes))


@pytest.mark.parametrize("changes", SETTINGS.values(), ids=SETTINGS)
def test_a_row_without_any_token_is_an_error(changes):
    with pytest.raises(DecodeFailedError):
        transformed_law(np.full(10, -np.inf, np.float32), OFF.replace(**changes))


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-300, 5e-324])
def test_a_temperature_near_zero_is_greedy_without_overflow(temperature):
    logits = np.array([1.0, 3.0, 2.9, -np.inf, -80.0], np.float32)
    law = spread(transformed_law(logits, OFF.replace(temperature=temperature)), 5)
    np.testing.assert_allclose(law, [0, 1, 0, 0, 0], atol=1e-40)


@pytest.mark.parametrize(
    ("last_n", "expected"),
    [(0, []), (1, [9]), (4, [2, 3, 8, 9]), (64, [1, 2, 3, 8, 9]), (-1, [1, 2, 3, 8, 9])],
)
def test_the_penalty_window_ends_with_the_path(last_n, expected):
    params = OFF.replace(repeat_penalty=1.1, repeat_last_n=last_n)
    assert list(penalty_window([1, 2, 3], [8, 9], params)) == expected


def test_without_penalties_there_is_no_window():
    assert list(penalty_window([1, 2, 3], [4], OFF)) == []


@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0])
def test_log_probability_is_a_log_softmax(scale):
    logits = (scale * np.random.default_rng(1).standard_normal(1000)).astype(np.float32)
    exact = logits.astype(np.float64)
    exact = exact - exact.max() - np.log(np.exp(exact - exact.max()).sum())
    for token in (0, 999, int(logits.argmax())):
        assert log_probability(logits, token) == pytest.approx(exact[token], abs=1e-5)


def test_log_probability_of_a_forbidden_token():
    assert log_probability(np.array([0.0, -np.inf], np.float32), 1) == -math.inf
    assert log_probability(np.array([0.0, -np.inf], np.float32), 0) == 0.0
