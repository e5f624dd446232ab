"""The order of samplers: llama.cpp's names, letters and aliases, and what settings come to."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from specrun.bindings.errors import OptionError
from specrun.runtime import SamplingParams
from specrun.runtime.laws import DEFAULT_ORDER, read_sampler_letters, read_samplers, transformed_law

OFF = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (";".join(DEFAULT_ORDER), DEFAULT_ORDER),
        ("top-k;topp;min_p", ("top_k", "top_p", "min_p")),
        ("Nucleus; TEMP ;typ", ("top_p", "temperature", "typ_p")),
        ("top-n-sigma;topnsigma", ("top_n_sigma", "top_n_sigma")),
    ],
)
def test_names_are_llamas(text: str, names: tuple[str, ...]) -> None:
    assert read_samplers(text) == names
    assert SamplingParams(samplers=text).samplers == names
    assert SamplingParams(samplers=list(names)).samplers == names  # type: ignore[arg-type]


def test_letters_are_llamas() -> None:
    assert read_sampler_letters("edskypmxt") == DEFAULT_ORDER
    assert read_sampler_letters("tt") == ("temperature", "temperature")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("top_k;top_q", "there is no sampler 'top_q': did you mean 'top_p'?"),
        ("mirostat", "there is no sampler 'mirostat'"),
        ("top_k;;temp", "there is no sampler ''"),
        ("infill", "llama.cpp's sampler 'infill' is not in specrun"),
        ("adaptive-p", "llama.cpp's sampler 'adaptive_p' is not in specrun"),
    ],
)
def test_unknown_names_are_answered(text: str, problem: str) -> None:
    with pytest.raises(OptionError, match=f"^{problem.replace('?', '[?]')}"):
        SamplingParams(samplers=text)


@pytest.mark.parametrize(
    ("letters", "problem"),
    [("ekz", "'z' is no sampler's letter"), ("i", "llama.cpp's sampler 'infill'"), ("", "the seq")],
)
def test_unknown_letters_are_answered(letters: str, problem: str) -> None:
    with pytest.raises(OptionError, match=f"^{problem}"):
        read_sampler_letters(letters)


@pytest.mark.parametrize(
    ("changes", "chain"),
    [
        ({}, ()),
        ({"repeat_penalty": 1.1, "repeat_last_n": 0}, ()),
        ({"repeat_penalty": 1.1, "dry_multiplier": 1.0}, ("penalties", "dry")),
        ({"dry_multiplier": 1.0, "dry_penalty_last_n": 0}, ()),
        ({"xtc_probability": 0.5}, ("xtc",)),
        ({"xtc_probability": 0.5, "xtc_threshold": 0.51}, ()),
        ({"top_n_sigma": 0.0}, ()),
        ({"top_p": 0.9, "top_k": 5, "samplers": "top_p;top_k"}, ("top_p", "top_k")),
        ({"dynatemp_range": 0.5}, ("temperature",)),
        ({"mirostat": 2, "top_k": 5, "repeat_penalty": 1.1}, ("mirostat",)),
        ({"mirostat": 1, "temperature": 0.5}, ("temperature", "mirostat")),
        (
            {
                "temperature": 0.0,
                "repeat_penalty": 1.2,
                "top_k": 2,
                "samplers": "top_k;temp;penalties",
            },
            ("top_k", "temperature"),
        ),
    ],
    ids=str,
)
def test_the_chain_is_what_does_something(changes: dict[str, object], chain: tuple) -> None:
    assert OFF.replace(**changes).chain == chain


@pytest.mark.parametrize(
    ("changes", "is_greedy", "is_plain"),
    [
        ({}, True, True),
        ({"repeat_penalty": 1.2, "top_k": 3, "top_n_sigma": 1.0}, True, True),
        ({"typical_p": 0.5}, True, False),
        ({"xtc_probability": 0.5}, False, False),
        ({"xtc_probability": 0.5, "samplers": "temperature;xtc"}, True, True),
        ({"dynatemp_range": 0.5}, False, False),
        ({"dynatemp_range": 0.5, "mirostat": 2}, True, True),
        ({"samplers": "top_k"}, False, True),
        ({"repeat_penalty": 1.2, "top_k": 3, "samplers": "top_k;penalties;temp"}, True, False),
        ({"dry_multiplier": 1.0}, True, False),
    ],
    ids=str,
)
def test_temperature_0_is_greedy_where_it_leaves_one_token(
    changes: dict[str, object], is_greedy: bool, is_plain: bool
) -> None:
    params = OFF.replace(temperature=0.0, **changes).effective()
    assert (params.is_greedy, params.is_plain) == (is_greedy, is_plain)


def test_what_is_left_out_is_off() -> None:
    """And has the quick ways of settings in which it is switched off."""
    params = SamplingParams(samplers="top_k;temperature", repeat_penalty=1.3)
    same = params.effective()
    assert (same.top_p, same.min_p, same.repeat_penalty) == (1.0, 0.0, 1.0)
    assert not params.is_plain
    assert same.is_plain
    row = np.random.default_rng(0).standard_normal(200).astype(np.float32)
    ours, theirs = (transformed_law(row, each, [1, 2]) for each in (params, same))
    np.testing.assert_array_equal(ours.ids, theirs.ids)
    np.testing.assert_allclose(ours.probs, theirs.probs, atol=1e-12)


def test_another_order_stays_as_it_is() -> None:
    params = SamplingParams(samplers="temperature;top_k")
    assert params.effective() is params
    usual = SamplingParams(top_k=3)
    assert usual.effective() is usual


def test_the_window_reaches_as_far_as_the_longest() -> None:
    params = OFF.replace(repeat_penalty=1.1, repeat_last_n=9, dry_multiplier=1.0)
    assert (params.has_penalties, params.window_size) == (True, 64)
    assert params.replace(dry_penalty_last_n=-1).window_size == -1
    assert params.replace(samplers="penalties").window_size == 9
    assert not params.replace(mirostat=2).has_penalties


def test_copies_know_what_settings_come_to() -> None:
    params = SamplingParams(mirostat=2, samplers="top_k", dry_sequence_breakers=["a", "b"])  # type: ignore[arg-type]
    for same in (copy.copy(params), copy.deepcopy(params), pickle.loads(pickle.dumps(params))):
        assert same == params
        assert (same.chain, same.is_adaptive) == (params.chain, True)


def test_favourites_are_greedy_whatever_the_samplers() -> None:
    for changes in ({"xtc_probability": 0.5}, {"dynatemp_range": 1.0}, {"samplers": "top_k"}):
        assert OFF.replace(**changes).favourites().is_greedy
