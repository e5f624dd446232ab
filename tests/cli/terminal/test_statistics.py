"""The line of statistics, and numbers as people read them."""

from __future__ import annotations

import dataclasses
import re

import pytest

from specrun.cli.options.types import format_logit_bias, parse_logit_bias
from specrun.cli.terminal.answer import gain_line, statistics_line
from specrun.cli.terminal.screen import bytes_text, count_text
from specrun.runtime import GenerationResult, OptionError, SpecStats, Usage
from specrun.runtime.planning import CostCurve

STATS = SpecStats(
    drafter="draft",
    rule="exact",
    exact=True,
    rounds=36,
    drafted=148,
    accepted=117,
    acceptance_rate=117 / 148,
    mean_accepted_length=3.541,
    acceptance_by_position=(0.9, 0.8),
    tokens_per_second=41.74,
    prompt_tokens_per_second=841.2,
    time_to_first_token_s=0.611,
    target_s=2.0,
    drafter_s=1.0,
    overhead_s=0.1,
    wall_s=3.1,
)
NOTHING = dataclasses.replace(
    STATS,
    drafted=0,
    accepted=0,
    acceptance_rate=None,
    mean_accepted_length=None,
    tokens_per_second=None,
    prompt_tokens_per_second=None,
    time_to_first_token_s=None,
)


def line(stats: SpecStats, usage: Usage) -> str:
    return statistics_line(GenerationResult("", [], "stop", usage, stats, 7))


def test_the_whole_line() -> None:
    expected = (
        "prompt 512 tok 841.2 tok/s | gen 128 tok 41.7 tok/s | draft 117/148 accepted 79.1% | "
        "3.54 tok/round | TTFT 0.61 s | seed 7"
    )
    assert line(STATS, Usage(512, 128)) == expected
    assert "prompt 512 tok (500 cached) 841.2" in line(STATS, Usage(512, 128, 500))


def test_nothing_counted_is_a_dash() -> None:
    assert (
        line(NOTHING, Usage(1, 0))
        == "prompt 1 tok - tok/s | gen 0 tok - tok/s | draft - | - tok/round | TTFT - | seed 7"
    )


def test_a_rule_that_is_not_exact_is_named() -> None:
    lossy = dataclasses.replace(STATS, rule="typical", exact=False)
    assert line(lossy, Usage(1, 1)).endswith("| not exact: typical")
    counted = dataclasses.replace(lossy, total_variation=0.1234, changed_share=0.051)
    measured = (
        "| not exact: typical, TV 0.123 from the target's distribution, 5.1% of tokens changed"
    )
    assert line(counted, Usage(1, 1)).endswith(measured)


def test_what_auto_chose_is_shown() -> None:
    arms = [{"drafter": "draft(n=5)", "rounds": 9}, {"drafter": "prompt-lookup", "rounds": 0}]
    arms.append({"drafter": "none", "rounds": 27})
    drafting = {"arms": arms, "choices": [[0, 9], [2, 27]]}
    assert line(dataclasses.replace(STATS, drafting=drafting), Usage(1, 1)).endswith(
        "auto none 75%, draft(n=5) 25%"
    )


@pytest.mark.parametrize(
    ("count", "text"),
    [(999, "999"), (36_480, "36.5k"), (6_300_000, "6.3M"), (8_030_000_000, "8.03B")],
)
def test_counts(count: int, text: str) -> None:
    assert count_text(count) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (13_844, "13.5 KiB"), (14_559_840, "13.9 MiB"), (2**42, "4.00 TiB")],
)
def test_sizes(size: int, text: str) -> None:
    assert bytes_text(size) == text


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("5+1", (5, 1.0)),
        ("5-0.5", (5, -0.5)),
        ("5-inf", (5, float("-inf"))),
        ("0+1e2", (0, 100.0)),
        ("7-0.123456789", (7, -0.123456789)),
        ("7+1e-09", (7, 1e-9)),
    ],
)
def test_logit_bias(text: str, pair: tuple[int, float]) -> None:
    assert parse_logit_bias(text) == pair
    assert parse_logit_bias(format_logit_bias(*pair)) == pair


@pytest.mark.parametrize("text", ["", "5", "+1", "5+", "5+inf", "-5+1", "5+nan", "5 1", "x+1"])
def test_logit_bias_nonsense(text: str) -> None:
    problem = "can only forbid" if "inf" in text else "is not a token id with a bias"
    with pytest.raises(OptionError, match=f"^'{re.escape(text)}'.*{problem}"):
        parse_logit_bias(text)


CURVE = CostCurve.flat([0.030, 0.031, 0.033, 0.036])


def test_the_gain_over_plain_decoding_is_that_of_the_measured_curve() -> None:
    result = GenerationResult("", [], "stop", Usage(512, 128), STATS, 7)
    assert gain_line(result, CURVE) == "41.7 tok/s, 1.3x plain, 79 % of guesses kept"
    assert gain_line(result, None) == "41.7 tok/s, 79 % of guesses kept"


def test_a_gain_that_no_tokens_a_round_allow_is_not_shown() -> None:
    result = GenerationResult("", [], "stop", Usage(512, 128), STATS, 7)
    slow = CostCurve.flat(
        [0.1, 0.1]
    )  # 41.7 tok/s would be 4.17 times plain, of 3.54 tokens a round
    assert gain_line(result, slow) == "41.7 tok/s, 79 % of guesses kept"
    cheaper = CostCurve.flat([0.1, 0.08])  # two tokens for less than one allow it
    assert gain_line(result, cheaper) == "41.7 tok/s, 4.2x plain, 79 % of guesses kept"


def test_plain_decoding_and_lossy_rules_say_so() -> None:
    plain = dataclasses.replace(STATS, drafted=0, acceptance_rate=None, mean_accepted_length=1.0)
    result = GenerationResult("", [], "stop", Usage(512, 128), plain, 7)
    assert gain_line(result, CURVE) == "41.7 tok/s"
    lossy = dataclasses.replace(STATS, exact=False, rule="typical")
    result = GenerationResult("", [], "stop", Usage(512, 128), lossy, 7)
    assert gain_line(result, None).endswith("kept | not exact: typical")
