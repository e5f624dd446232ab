"""Sampling settings: llama.cpp's defaults, ranges, and names that do not exist."""

from __future__ import annotations

import math

import pytest

from specrun.bindings.errors import OptionError
from specrun.runtime import SamplingParams


def test_defaults_are_those_of_llama():
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.8, 40, 0.95, 0.05)
    assert (params.repeat_penalty, params.presence_penalty, params.frequency_penalty) == (
        1.0,
        0.0,
        0.0,
    )
    assert (params.repeat_last_n, params.stop, params.seed) == (64, (), None)
    assert (params.typical_p, params.top_n_sigma) == (1.0, -1.0)
    assert (params.xtc_probability, params.xtc_threshold) == (0.0, 0.1)
    assert (params.dry_multiplier, params.dry_base) == (0.0, 1.75)
    assert (params.dry_allowed_length, params.dry_penalty_last_n) == (2, 64)
    assert params.dry_sequence_breakers == ("\n", ":", '"', "*")
    assert (params.mirostat, params.mirostat_lr, params.mirostat_ent) == (0, 0.1, 5.0)
    assert (params.dynatemp_range, params.dynatemp_exp) == (0.0, 1.0)
    order = "penalties;dry;top_n_sigma;top_k;typ_p;top_p;min_p;xtc;temperature"
    assert ";".join(params.samplers) == order


BAD = [
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "hot"),
    ("temperature", True),
    ("temperature", None),
    ("top_k", -1),
    ("top_k", 1.5),
    ("top_k", True),
    ("top_p", -0.1),
    ("top_p", 1.1),
    ("top_p", math.nan),
    ("min_p", -1e-9),
    ("min_p", 2),
    ("repeat_penalty", 0.0),
    ("repeat_penalty", -1.0),
    ("repeat_penalty", math.inf),
    ("presence_penalty", math.nan),
    ("frequency_penalty", -math.inf),
    ("repeat_last_n", -2),
    ("repeat_last_n", 0.5),
    ("logit_bias", {1: math.nan}),
    ("logit_bias", {1: math.inf}),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {"a": 1.0}),
    ("logit_bias", {1: "a"}),
    ("logit_bias", [1, 2]),
    ("stop", [""]),
    ("stop", ["a", ""]),
    ("stop", ""),
    ("stop", [1]),
    ("stop", 5),
    ("typical_p", 1.1),
    ("top_n_sigma", math.inf),
    ("xtc_probability", -0.1),
    ("xtc_threshold", 1.5),
    ("dry_multiplier", math.nan),
    ("dry_base", 0.99),
    ("dry_allowed_length", -1),
    ("dry_allowed_length", 1.5),
    ("dry_penalty_last_n", -2),
    ("dry_sequence_breakers", ["", "a"]),
    ("dry_sequence_breakers", 5),
    ("mirostat", 3),
    ("mirostat", True),
    ("mirostat_lr", math.nan),
    ("mirostat_ent", "high"),
    ("dynatemp_range", -1),
    ("dynatemp_exp", -0.5),
    ("samplers", 5),
    ("samplers", None),
    ("seed", 0.5),
    ("seed", "x"),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=[f"{name}={value}" for name, value in BAD])
def test_a_value_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(OptionError, match=f"^{name} is"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("value", [-1, -0.5, -1e300])
def test_a_temperature_below_zero_is_greedy(value):
    assert SamplingParams(temperature=value) == SamplingParams(temperature=0.0)


@pytest.mark.parametrize("text", ['["\\n", ":"]', '"\\n", ":"'])
def test_breakers_may_be_json(text):
    assert SamplingParams(dry_sequence_breakers=text).dry_sequence_breakers == ("\n", ":")


GOOD = [
    ("temperature", 0),
    ("temperature", 1e-300),
    ("temperature", 100.0),
    ("top_k", 0),
    ("top_k", 10**9),
    ("top_p", 0),
    ("top_p", 1),
    ("min_p", 0),
    ("min_p", 1.0),
    ("repeat_last_n", -1),
    ("repeat_last_n", 0),
    ("repeat_penalty", 0.5),
    ("presence_penalty", -2.0),
    ("logit_bias", {0: -math.inf, 10**6: 3}),
    ("seed", -1),
    ("seed", 2**70),
]


@pytest.mark.parametrize(("name", "value"), GOOD, ids=[f"{name}={value}" for name, value in GOOD])
def test_a_value_at_the_edge_is_accepted(name, value):
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(
    "stop", ["END", ["END"], ("END",), iter(["END"])], ids=["text", "list", "tuple", "iterator"]
)
def test_stop_strings_come_in_any_form(stop):
    assert SamplingParams(stop=stop).stop == ("END",)


@pytest.mark.parametrize(
    ("wrong", "near"),
    [("temperatur", "temperature"), ("topp", "top_p"), ("repetition_penalty", "repeat_penalty")],
)
def test_an_unknown_name_raises_with_the_nearest(wrong, near):
    for make in (SamplingParams.from_dict, lambda values: SamplingParams().replace(**values)):
        with pytest.raises(OptionError, match=f"did you mean '{near}'"):
            make({wrong: 1.0})


def test_a_name_like_no_other_lists_all():
    with pytest.raises(OptionError, match=r"known are .*temperature"):
        SamplingParams.from_dict({"zzz": 1})


def test_settings_survive_a_mapping():
    params = SamplingParams(temperature=0.3, logit_bias={5: -1.0}, stop=("a", "b"), seed=3)
    assert SamplingParams.from_dict(params.to_dict()) == params


def test_replace_changes_a_copy():
    params = SamplingParams()
    assert params.replace(top_k=7).top_k == 7
    assert params.top_k == 40


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, False),
        ({"repeat_penalty": 1.1}, True),
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": -0.1}, True),
        ({"repeat_penalty": 1.1, "repeat_last_n": 0}, False),
        ({"repeat_penalty": 1.1, "repeat_last_n": -1}, True),
    ],
)
def test_penalties_are_known_to_be_off(changes, expected):
    assert SamplingParams(**changes).has_penalties is expected
