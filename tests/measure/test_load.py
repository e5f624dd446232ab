"""Loads: what costs allow, all drafters at all loads, tables and picture; no time is asserted."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from support.commands import results_of
from support.commands import run_measure as run

from measure.load.first_token import measure_first_token
from measure.load.plot import plot_load
from measure.load.tables import first_token_table, load_table
from measure.load.throughput import LoadBench, LoadResult, allowed, measure_load
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import OptionError
from specrun.runtime import SamplingParams
from specrun.runtime.language import quoted
from specrun.runtime.planning import CostCurve

GREEDY = SamplingParams(temperature=0.0)
QUICK = ContextOptions(n_ctx=512, n_threads=1, n_threads_batch=1)


@pytest.fixture(scope="module")
def results(tiny_model: Path, tiny_flat_twin: Path) -> list[LoadResult]:
    bench = LoadBench(
        target=tiny_model,
        drafters=(f"draft({quoted(str(tiny_flat_twin))}, n=3)",),
        conversations=(3,),
        prompts=("one", "two words", "three words here"),
        params=GREEDY,
        max_tokens=8,
        repetitions=2,
        long_prompt=200,
        curve_s=0.1,
        options={"context": QUICK},
    )
    return measure_load(bench)


def test_what_costs_allow() -> None:
    flat = CostCurve((1, 64), (1.0, 1.0), (1.0, 1.0))
    steep = CostCurve((1, 64), (1.0, 64.0), (1.0, 64.0))
    # Evaluations of any width cost the same: n conversations are n times as fast.
    assert allowed(flat, 4.0, 1.0, 4) == pytest.approx(4.0)
    # Every token costs the same: nothing is gained.
    assert allowed(steep, 4.0, 4.0, 4) == pytest.approx(1.0)
    # What is not shared is paid by each: 4 x 2 seconds, or 1 and 4 x 1.
    assert allowed(flat, 4.0, 2.0, 4) == pytest.approx(8 / 5)
    assert allowed(flat, 2.5, 1.0, 1) == 1.0


def test_every_drafter_is_measured_at_every_load(results: list[LoadResult]) -> None:
    assert [each.conversations for each in results] == [1, 3, 1, 3]
    assert [each.drafter[:5] for each in results] == ["none", "none", "draft", "draft"]
    for each in results:
        assert each.n_same == each.n_prompts == 3
        assert each.tokens_per_second.n == 2
        # How many meet in an evaluation hangs on when threads run.
        assert 1.0 <= each.texts_per_evaluation <= each.conversations
    assert results[0].over_plain_alone.value == 1.0
    assert results[0].width == 1.0 < results[2].width


def test_tables_have_all_of_it(results: list[LoadResult]) -> None:
    table = load_table(results)
    assert len(table.rows) == 4
    assert "same text" in table.columns
    waits = first_token_table(results)
    assert [row[0] for row in waits.rows] == [results[0].drafter, results[2].drafter]
    assert load_table([]).rows == ()


def test_the_picture_is_drawn(results: list[LoadResult], tmp_path: Path) -> None:
    plot_load(results, tmp_path / "load.png")
    assert (tmp_path / "load.png").read_bytes()[:4] == b"\x89PNG"
    without = [dataclasses.replace(each, first_token=None) for each in results]
    plot_load(without, tmp_path / "speeds.svg")
    with pytest.raises(OptionError, match="nothing among the results"):
        plot_load([], tmp_path / "none.png")


def test_positions_are_stretched_for_a_long_prompt(tiny_model: Path) -> None:
    """2,000 tokens for a model that was trained for fewer, all drawn anew."""
    found = measure_first_token(tiny_model, "none", 2000, 1, {"context": QUICK})
    assert found.long_prompt == 2000
    assert found.alone_s.n == found.beside_s.n == 1


def test_the_command_prints_all_figures(
    tiny_model: Path, tiny_flat_twin: Path, tmp_path: Path
) -> None:
    plot = tmp_path / "load.png"
    done = run(
        *("load", "-m", tiny_model, "-t", "1", "-c", "512", "-p", "one", "-p", "two"),
        *("--drafter", f"draft({quoted(str(tiny_flat_twin))}, n=2)", "--parallel", "2"),
        *("-n", "6", "-r", "1", "--long", "0", "--curve-seconds", "0.1", "--plot", plot, "--json"),
    )
    assert done.exit_code == 0, done.output
    found = results_of(done)
    assert json.loads(done.stdout)["bench"] == "load"
    assert [each["conversations"] for each in found] == [1, 2, 1, 2]
    assert found[3]["first_token"] is None
    assert plot.exists()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["-m", "MODEL", "-p", "x"], 2),
        (["-m", "MODEL", "-p", "x", "--drafter", "draft(none.gguf)"], 3),
        (["-m", "MODEL", "-p", "x", "--drafter", "prompt-lookup", "--parallel", "0"], 2),
        (["-m", "MODEL", "-p", "x", "--drafter", "prompt-lookup", "--keep", "a.gguf"], 2),
        (["-m", "MODEL", "-p", "x", "--drafter", "prompt-lookup", "--plot", "a.txt"], 2),
    ],
)
def test_bad_input_ends_with_a_sentence_and_a_code(
    arguments: list[str], code: int, tiny_model: Path
) -> None:
    given = [str(tiny_model) if each == "MODEL" else each for each in arguments]
    done = run("load", *given)
    assert done.exit_code == code, done.output
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
