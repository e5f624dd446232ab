"""`specrun theory`: tables from numbers and from pairs, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import Result
from support.commands import run

from ..conftest import Models

pytestmark = pytest.mark.usefixtures("own_cache")

NUMBERS = ("--alpha", "0.5", "--cost-ratio", "0.1")
FAST = ("-t", "1", "-c", "256", "-n", "8", "--seconds", "0.05", "-p", "Once upon")


def theory(*arguments: str | Path) -> Result:
    return run("theory", *arguments)


def test_numbers_give_a_table_with_the_papers_equations() -> None:
    result = theory(*NUMBERS, "--length", "2", "--curve", "1:1,2:1.5,4:2")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].endswith("alpha 0.500, c 0.100, c-hat 0.100:")
    assert lines[3].split() == ["2", "1.750", "1.458", "0.897", "1.829", "-"]
    assert "best n: 2 if more tokens cost nothing (section 3.5), 0 with T(n)" in result.stdout
    assert "at least 1.36 times (corollary 3.9)" in result.stdout
    for place in ("equation 1", "theorem 3.8", "theorem 3.11", "section 3.4"):
        assert place in result.stdout


def test_a_drafter_that_costs_more_than_it_gains_is_said_to() -> None:
    result = theory("--alpha", "0.1", "--cost-ratio", "0.2")
    assert "best n: 0" in result.stdout
    assert "alpha <= c: no chain pays" in result.stdout


def test_a_targets_file_says_what_is_read(models: Models) -> None:
    asked = (*NUMBERS, "-m", models.target, "--bandwidth", "1", "--cached", "0")
    result = theory(*asked)
    assert result.exit_code == 0, result.output
    line = next(line for line in result.stdout.splitlines() if line.startswith("at 1 GB/s"))
    plain, megabytes, drafted, n = map(float, re.findall(r"[\d.]+", line)[1:])
    (found,) = json.loads(theory(*asked, "--json").stdout)
    assert plain * megabytes == pytest.approx(1000, rel=0.2)
    assert drafted / plain == pytest.approx(1 / found["rows"][int(n) - 1]["bytes"], rel=1e-3)
    assert found["alpha"] == 0.5
    two = found["rows"][1]
    assert two["bytes"] == pytest.approx((1 + 2 * 0.1) / 1.75, abs=1e-6)


def test_a_pair_is_measured(models: Models) -> None:
    result = theory("-m", models.target, "-md", models.plain, *FAST, "--temp", "0,1", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [each["chains"].split(", ")[1] for each in found] == ["temperature 0", "temperature 1"]
    for each in found:
        assert 0.0 <= each["alpha"] <= 1.0
        assert each["cost_ratio"] > 0.0
        assert each["rows"][0]["measured"] > 0.0
        assert each["rows"][0]["bytes"] > 0.0
    twin = theory("-m", models.plain, "--drafter", f"draft({models.plain})", *FAST, "--json")
    assert json.loads(twin.stdout)[0]["alpha"] == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "give --alpha and --cost-ratio, or a pair to measure"),
        (("--alpha", "0.5"), "give --cost-ratio, or a pair"),
        (("--alpha", "1.5", "--cost-ratio", "1"), "1.5 is not in the range"),
        ((*NUMBERS, "--curve", "fast"), "'fast' is no cost curve"),
        ((*NUMBERS, "--curve", "known"), "--curve known is that of a target"),
        ((*NUMBERS, "--length", "0"), "0 is not in the range"),
        ((*NUMBERS, "--bandwidth", "10"), "--bandwidth needs the files of the models"),
        ((*NUMBERS, "--demo", "--bandwidth", "nan"), "--bandwidth is no number"),
        (("--drafter", "eagle(x.gguf)"), "a drafter is measured with a target"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: tuple[str, ...], problem: str) -> None:
    result = theory(*arguments)
    assert result.exit_code == 2 or isinstance(result.exception, Exception)
    assert problem in result.output + str(result.exception)


def test_drafters_without_a_law_and_numbers_beside_a_pair_are_refused(models: Models) -> None:
    result = theory("-m", models.target, "--drafter", "prompt-lookup", *FAST)
    assert result.exit_code != 0
    assert "prompt-lookup has no distribution" in result.output + str(result.exception)
    result = theory("-m", models.target, "-md", models.plain, *NUMBERS, *FAST)
    assert result.exit_code == 2
    assert "--alpha is measured of a drafter" in result.output
