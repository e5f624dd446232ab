"""Laws of the samplers equal those of llama.cpp's own to 1e-6, alone and in several orders.

Rows are random: broad and peaked ones, with ties, with forbidden tokens, larger than llama.cpp's
thresholds for partial sorting. Of tokens with equal logits llama.cpp keeps any at a cut, so laws
are compared by the mass of each logit there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.llama_samplers import LlamaSamplers

from specrun.bindings.models.model import Model
from specrun.bindings.models.vocabulary import Vocabulary
from specrun.runtime import SamplingParams
from specrun.runtime.laws import DEFAULT_ORDER, Law, transformed_law
from specrun.runtime.laws.samplers import FRESH, SamplerState, mu_after, sequence_breakers
from specrun.runtime.laws.transform import penalty_window, starting_mu

TOLERANCE = 1e-6
OFF = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
ALONE = {
    "top-n-sigma": {"top_n_sigma": 1.0},
    "top-n-sigma-narrow": {"top_n_sigma": 0.2},
    "typical": {"typical_p": 0.7},
    "typical-most": {"typical_p": 0.9},
    "typical-0": {"typical_p": 0.0},
    "top-k": {"top_k": 7},
    "top-p": {"top_p": 0.8},
    "top-p-0": {"top_p": 0.0},
    "min-p": {"min_p": 0.1},
    "hot": {"temperature": 1.7},
    "dynamic": {"temperature": 1.0, "dynatemp_range": 0.5},
    "dynamic-exponent": {"temperature": 0.9, "dynatemp_range": 0.4, "dynatemp_exp": 2.5},
    "dynamic-from-0": {"temperature": 0.0, "dynatemp_range": 1.5},
    "xtc-always": {"xtc_probability": 1.0, "xtc_threshold": 0.05},
    "xtc-off-by-threshold": {"xtc_probability": 1.0, "xtc_threshold": 0.6},
    "greedy": {"temperature": 0.0},
}
ALL = {
    "top_n_sigma": 2.0,
    "top_k": 30,
    "typical_p": 0.95,
    "top_p": 0.9,
    "min_p": 0.02,
    "xtc_probability": 1.0,
    "xtc_threshold": 0.1,
    "temperature": 0.7,
}
ORDERS = [
    DEFAULT_ORDER,
    DEFAULT_ORDER[::-1],
    ("temperature", "min_p", "xtc"),
    ("min_p", "top_k"),
    ("xtc", "typ_p", "temperature", "top_p"),
    ("temperature", "temperature", "top_k"),
    ("top_p", "penalties", "dry", "top_p"),
    (),
]


def rows(kind: str, seed: int) -> np.ndarray:
    generator = np.random.default_rng([seed, len(kind)])
    size = 2000 if kind == "large" else 120
    logits = 2.0 * generator.standard_normal(size)
    if kind == "peaked":
        logits[generator.integers(size)] = 8.0
    if kind == "ties":
        logits = np.round(logits)
    if kind == "forbidden":
        logits[generator.random(size) < 0.4] = -math.inf
    return logits.astype(np.float32)


KINDS = ["broad", "peaked", "ties", "forbidden", "large"]


def spread(law: Law, size: int) -> np.ndarray:
    out = np.zeros(size)
    out[np.arange(len(law.probs)) if law.ids is None else law.ids] = law.probs
    return out


def native_law(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    with LlamaSamplers(params, len(logits)) as native:
        return native.law(logits)[0]


def by_logit(law: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """The probabilities of the different logits, ascending."""
    values, places = np.unique(logits, return_inverse=True)
    return np.bincount(places, law, len(values))


def require_equal(logits: np.ndarray, params: SamplingParams) -> None:
    ours = spread(transformed_law(logits, params), len(logits))
    theirs = native_law(logits, params)
    assert ours.sum() == pytest.approx(1.0, abs=1e-12)
    np.testing.assert_allclose(by_logit(ours, logits), by_logit(theirs, logits), atol=TOLERANCE)
    assert np.count_nonzero(ours) == np.count_nonzero(theirs)
    if len(np.unique(logits[logits > -math.inf])) == np.count_nonzero(logits > -math.inf):
        np.testing.assert_allclose(ours, theirs, atol=TOLERANCE)


@pytest.mark.parametrize("changes", ALONE.values(), ids=ALONE)
@pytest.mark.parametrize("kind", KINDS)
def test_every_sampler_alone(changes: dict[str, float], kind: str) -> None:
    for seed in range(3):
        logits = rows(kind, seed)
        # llama.cpp's entropy of a law with zeros is not a number: see the test below.
        if not (kind == "forbidden" and "typical_p" in changes):
            require_equal(logits, OFF.replace(**changes))


@pytest.mark.parametrize("order", ORDERS, ids=";".join)
@pytest.mark.parametrize("kind", ["broad", "peaked", "large"])
def test_in_every_order(order: tuple[str, ...], kind: str) -> None:
    for seed in range(3):
        params = OFF.replace(**ALL, samplers=order)
        if "typ_p" in order[order.index("top_n_sigma") :] if "top_n_sigma" in order else False:
            params = params.replace(top_n_sigma=-1.0)  # it leaves zeros for typical-p
        require_equal(rows(kind, seed), params)
        require_equal(rows(kind, seed), params.effective())


def test_typical_takes_forbidden_tokens_for_none() -> None:
    """0 log 0 is 0: the law is that of the row without them, which llama.cpp can be asked for."""
    params = OFF.replace(typical_p=0.7)
    for seed in range(3):
        logits = rows("forbidden", seed)
        allowed = logits > -math.inf
        ours = spread(transformed_law(logits, params), len(logits))
        np.testing.assert_allclose(
            ours[allowed], native_law(logits[allowed], params), atol=TOLERANCE
        )
        assert not ours[~allowed].any()


def test_the_quick_ways_say_what_the_chain_says() -> None:
    """Top-k twice is top-k once, and has no quick way."""
    order = ("penalties", "top_k", "top_p", "min_p", "temperature")
    for changes in ({}, {"top_k": 0}, {"temperature": 1.4, "min_p": 0.0}, {"top_p": 0.5}):
        quick = SamplingParams(repeat_penalty=1.3, **changes, samplers=order)
        chained = quick.replace(samplers=(*order[:2], *order[1:]))
        quick = quick.effective()
        assert quick.is_plain
        for seed in range(4):
            logits, window = rows("broad", seed), [3, 4, 4, 90]
            laws = [transformed_law(logits, params, window) for params in (quick, chained)]
            first, second = (spread(law, len(logits)) for law in laws)
            np.testing.assert_allclose(first, second, atol=TOLERANCE)


def test_a_bias_comes_before_all_samplers() -> None:
    params = OFF.replace(**{**ALL, "top_n_sigma": -1.0}, logit_bias={3: 4.0, 5: -2.0})
    for seed in range(3):
        require_equal(rows("broad", seed), params)


# -- XTC: a mixture ----------------------------------------------------------------------------


def cut_and_whole(logits: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """llama.cpp's laws where XTC's number says cut, and where it does not."""
    cut = native_law(logits, params.replace(xtc_probability=1.0))
    return cut, native_law(logits, params.replace(xtc_probability=0.0))


@pytest.mark.parametrize("order", [DEFAULT_ORDER, ("xtc", "top_p", "temperature")], ids=";".join)
def test_the_law_of_xtc_is_the_mixture_of_both_outcomes(order: tuple[str, ...]) -> None:
    """llama.cpp draws whether to cut, then a token: enumerated, that is the law of the token."""
    for seed in range(8):
        logits = rows("peaked", seed)
        params = OFF.replace(
            xtc_probability=0.3, xtc_threshold=0.02, temperature=0.8, top_p=0.95, samplers=order
        )
        cut, whole = cut_and_whole(logits, params)
        ours = spread(transformed_law(logits, params), len(logits))
        np.testing.assert_allclose(ours, 0.3 * cut + 0.7 * whole, atol=TOLERANCE)
        assert np.abs(cut - whole).max() > 0.05


def test_llama_cuts_with_that_chance_for_every_token() -> None:
    """Of 2000 tokens with fresh seeds, 0.3 +- 5 standard deviations are cut (false alarm 1e-6); a
    chance of 0.4 is refused; and in a row, one chain cuts some tokens and others not."""
    logits = rows("peaked", 0)
    params = OFF.replace(xtc_probability=0.3, xtc_threshold=0.02)
    cut, whole = cut_and_whole(logits, params)

    def is_cut(law: np.ndarray) -> bool:
        matches = [np.allclose(law, other, atol=TOLERANCE) for other in (cut, whole)]
        assert sum(matches) == 1
        return matches[0]

    laws = []
    for seed in range(2000):
        with LlamaSamplers(params, len(logits), seed=seed + 1) as native:
            laws.append(native.law(logits)[0])
    share, deviation = np.mean([is_cut(law) for law in laws]), math.sqrt(0.3 * 0.7 / 2000)
    assert abs(share - 0.3) < 5 * deviation < abs(share - 0.4)
    with LlamaSamplers(params, len(logits), seed=5) as native:
        outcomes = {is_cut(native.law(logits)[0]) for _ in range(60)}
    assert outcomes == {True, False}


# -- temperature 0 -------------------------------------------------------------------------------

COLD = {
    "typical": {"typical_p": 0.4},
    "top-n-sigma": {"top_n_sigma": 1.0},
    "xtc-always": {"xtc_probability": 1.0, "xtc_threshold": 0.01},
    "dynamic": {"dynatemp_range": 0.7},
    "temperature-first": {"top_p": 0.5, "samplers": ("temperature", "top_p")},
    "no-temperature": {"top_k": 4, "samplers": ("top_k",)},
    "mirostat": {"mirostat": 2},
    "mirostat-1": {"mirostat": 1},
}


@pytest.mark.parametrize("changes", COLD.values(), ids=COLD)
def test_temperature_0_is_what_llama_makes_of_it(changes: dict[str, object]) -> None:
    """Greedy is a sampler in its place: typical-p may drop the likeliest token before it, dynamic
    temperature is not greedy at 0, and without the sampler there is no temperature."""
    params = OFF.replace(temperature=0.0, **changes)
    is_point = params.is_greedy
    for seed in range(3):
        logits = rows("broad", seed)
        require_equal(logits, params)
        assert not is_point or len(transformed_law(logits, params).probs) == 1
    assert is_point == (changes.keys().isdisjoint({"dynatemp_range", "xtc_probability"})) or (
        changes.get("samplers") == ("top_k",)
    )


def test_xtc_before_temperature_0_is_a_mixture_of_two_tokens() -> None:
    params = OFF.replace(temperature=0.0, xtc_probability=0.25, xtc_threshold=0.01)
    logits = rows("broad", 1)
    cut, whole = cut_and_whole(logits, params)
    ours = spread(transformed_law(logits, params), len(logits))
    np.testing.assert_allclose(ours, 0.25 * cut + 0.75 * whole, atol=TOLERANCE)
    assert np.count_nonzero(ours) == 2


# -- DRY -------------------------------------------------------------------------------------------

DRY = {
    "defaults": {"dry_multiplier": 0.8},
    "long-base": {"dry_multiplier": 1.0, "dry_base": 3.0, "dry_allowed_length": 1},
    "allowed-0": {"dry_multiplier": 0.5, "dry_allowed_length": 0},
    "short-window": {"dry_multiplier": 1.0, "dry_penalty_last_n": 9},
    "whole-text": {"dry_multiplier": 1.0, "dry_penalty_last_n": -1},
    "base-1": {"dry_multiplier": 2.0, "dry_base": 1.0},
    "no-breakers": {"dry_multiplier": 1.0, "dry_sequence_breakers": ()},
    "long-breakers": {"dry_multiplier": 1.0, "dry_sequence_breakers": ("ab", "b\nc", "é", "aab")},
    "with-penalties": {
        "dry_multiplier": 0.7,
        "repeat_penalty": 1.2,
        "repeat_last_n": 5,
        "top_k": 60,
    },
    "after-a-cut": {
        "dry_multiplier": 1.5,
        "top_k": 30,
        "samplers": ("top_k", "dry", "temperature"),
    },
}


@pytest.fixture(scope="module")
def vocabulary(tiny_model: Path) -> Iterator[Vocabulary]:
    with Model(tiny_model) as model:
        yield model.vocabulary


@pytest.mark.parametrize("changes", DRY.values(), ids=DRY)
def test_dry_is_llamas(changes: dict[str, object], vocabulary: Vocabulary) -> None:
    params, size = OFF.replace(**changes), vocabulary.size
    state = SamplerState(sequence_breakers(vocabulary, params.dry_sequence_breakers))
    words = ["aab", "ba", "cab", "b\nc", "é:"]
    spelled = [vocabulary.tokenize(text, add_special=False) for text in words]
    n_changed = 0
    for seed in range(40):
        generator = np.random.default_rng(seed)
        # Few letters, so that much is said again, and a breaker now and then.
        picks = generator.choice(5, 16, p=[0.4, 0.3, 0.2, 0.05, 0.05])
        text = [token for pick in picks for token in spelled[pick]]
        text = text[: int(generator.integers(4, len(text)))]
        logits = (2.0 * generator.standard_normal(size)).astype(np.float32)
        with LlamaSamplers(params, size, vocabulary) as native:
            native.accept(text)
            theirs = native.law(logits)[0]
        window = penalty_window(text, (), params)
        ours = spread(transformed_law(logits, params, window, state), size)
        np.testing.assert_allclose(ours, theirs, atol=TOLERANCE)
        plain = transformed_law(logits, params.replace(dry_multiplier=0.0), window)
        n_changed += not np.allclose(ours, spread(plain, size))
    assert n_changed >= 4


@pytest.mark.parametrize("presence", [-3.0, 1.0])
@pytest.mark.parametrize("order", ["penalties;dry;top_k;typ_p", "dry;top_k;penalties"])
def test_penalties_before_top_k_of_a_large_row(presence: float, order: str) -> None:
    """Only what the k best and the penalised tokens may become is looked at, wherever they were."""
    params = OFF.replace(
        presence_penalty=presence,
        dry_multiplier=2.0,
        dry_sequence_breakers=(),
        top_k=20,
        typical_p=0.95,
        samplers=order,
    )
    for seed in range(4):
        logits = rows("large", seed)
        text = [int(token) for token in np.random.default_rng(seed).integers(0, 2000, 20)] * 2
        with LlamaSamplers(params, len(logits)) as native:
            native.accept(text)
            theirs = native.law(logits)[0]
        ours = transformed_law(logits, params, penalty_window(text, (), params))
        np.testing.assert_allclose(spread(ours, len(logits)), theirs, atol=TOLERANCE)


def test_dry_without_the_breakers_is_another_law(vocabulary: Vocabulary) -> None:
    params = OFF.replace(dry_multiplier=1.0)
    text = vocabulary.tokenize("ab:ab:ab", add_special=False)
    logits = rows("broad", 0)
    state = SamplerState(sequence_breakers(vocabulary, params.dry_sequence_breakers))
    broken = transformed_law(logits, params, text, state)
    assert not np.allclose(broken.probs, transformed_law(logits, params, text, FRESH).probs)


# -- mirostat --------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("target", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_mirostat_is_llamas_token_by_token(version: int, target: float, temperature: float) -> None:
    """Each law, with mu moved by the tokens that llama.cpp draws.

    Where version 1's k is beyond C's int, llama.cpp keeps one token or all, as the processor likes;
    these rows are sharp enough.
    """
    params = SamplingParams(
        temperature=temperature, mirostat=version, mirostat_ent=target, mirostat_lr=0.3
    )
    assert params.is_adaptive
    state, sizes = FRESH, set()
    with LlamaSamplers(params, 120, seed=11) as native:
        for step in range(40):
            generator = np.random.default_rng([step, version])
            logits = (2.0 * generator.standard_normal(120)).astype(np.float32)
            law = transformed_law(logits, params, (), state)
            theirs, token = native.law(logits)
            np.testing.assert_allclose(spread(law, 120), theirs, atol=TOLERANCE)
            sizes.add(len(law.probs))
            mu = starting_mu(params, state)
            state = state.with_mu(mu_after(mu, law.probability(token), target, 0.3))
    assert len(sizes) > 3


def test_mirostat_keeps_one_token_where_all_are_too_surprising() -> None:
    params = SamplingParams(mirostat=2, temperature=1.0)
    law = transformed_law(rows("broad", 0), params, (), FRESH.with_mu(-3.0))
    assert law.most_likely == (int(rows("broad", 0).argmax()), 1.0)


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_of_a_flat_row_keeps_all(version: int) -> None:
    params = SamplingParams(mirostat=version, temperature=1.0)
    assert len(transformed_law(np.zeros(50, np.float32), params).probs) == 50
