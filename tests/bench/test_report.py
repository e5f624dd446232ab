"""The forms of results: tables, Markdown, CSV, JSON, and the advice and notes that go with them."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from pathlib import Path

import pytest

from specrun.bench.drafters.comparison import DrafterResult, TargetFacts, TextComparison
from specrun.bench.plots import check_plot_file, plot_drafters
from specrun.bench.report import (
    CONSTANT_COLUMNS,
    Table,
    drafters_table,
    to_csv,
    to_json,
    to_markdown,
)
from specrun.bench.timing import Ratio, ratio_of, spread_of
from specrun.bindings.errors import OptionError

FACTS = TargetFacts("target.gguf", 770_000_000, 386_000_000, 379_000_000, "CPU", 0)
PLAIN = DrafterResult(
    target=FACTS,
    drafter="none",
    rule="exact",
    temperature=0.0,
    n_prompts=2,
    max_tokens=16,
    repetitions=3,
    tokens=96,
    tokens_per_second=spread_of([10.0, 11.0, 12.0]),
    speed_up=None,
    time_to_first_token_s=spread_of([0.1]),
    acceptance_rate=None,
    mean_accepted_length=1.0,
    acceptance_by_position=(),
    round_us=spread_of([90_000.0]),
    overhead_us_per_round=spread_of([80.0]),
    text=None,
)
DRAFTED = dataclasses.replace(
    PLAIN,
    drafter="draft(small.gguf, n=4)",
    tokens_per_second=spread_of([19.0, 22.0, 23.0]),
    speed_up=ratio_of([19.0, 22.0, 24.0], [10.0, 11.0, 12.0]),
    acceptance_rate=0.614,
    mean_accepted_length=3.1,
    acceptance_by_position=(0.8, 0.5, 0.25, 0.125),
    text=TextComparison(2, 2, None),
)
SLOW = dataclasses.replace(
    DRAFTED, drafter="a|b", speed_up=Ratio(0.8, 0.7, 0.9), text=TextComparison(2, 1, 5)
)


def cells(table: Table, row: int) -> dict[str, str]:
    return dict(zip(table.columns, table.rows[row], strict=True))


def test_drafters_table_says_what_was_measured() -> None:
    table = drafters_table([PLAIN, DRAFTED])
    plain, drafted = cells(table, 0), cells(table, 1)
    assert (plain["drafter"], plain["speed-up"], plain["accept %"], plain["text"]) == (
        "none (plain)",
        "-",
        "-",
        "-",
    )
    assert plain["params"] == "386.00 M"
    assert drafted["tok/s"] == "22.0 (19.0-23.0)"
    assert drafted["speed-up"] == "2.00x (1.90-2.00)"
    assert (drafted["accept %"], drafted["tok/round"], drafted["text"]) == ("61.4", "3.10", "same")


def test_notes_tell_of_padding_differences_and_advice() -> None:
    notes = "\n".join(drafters_table([PLAIN, SLOW]).notes)
    assert "padded: 379 M of its 386 M" in notes
    assert "without changing its outputs" in notes
    assert "round differently" in notes
    assert "a|b at temperature 0 is slower than plain decoding (0.80x)" in notes
    assert cells(drafters_table([PLAIN, SLOW]), 1)["text"] == "1 of 2 differ, first after 5 tokens"
    plain_notes = drafters_table(
        [dataclasses.replace(PLAIN, target=dataclasses.replace(FACTS, padded_parameters=0))]
    ).notes
    assert not any("padded" in note or "Advice" in note for note in plain_notes)


def test_markdown_is_rectangular_and_escapes_bars() -> None:
    lines = [
        line
        for line in to_markdown(drafters_table([PLAIN, DRAFTED, SLOW])).splitlines()
        if line.startswith("|")
    ]
    assert len(lines) == 5
    assert len({len(line) for line in lines}) == 1
    assert "a\\|b" in lines[-1]


def test_folding_takes_out_what_is_the_same_in_every_row() -> None:
    table = drafters_table([PLAIN, DRAFTED]).folded(CONSTANT_COLUMNS)
    assert "model" not in table.columns
    assert "tok/s" in table.columns
    assert ("model", "target.gguf") in table.constants
    assert "\n\nmodel target.gguf, " in to_markdown(table)
    two = drafters_table([PLAIN, dataclasses.replace(DRAFTED, temperature=1.0)]).folded(
        CONSTANT_COLUMNS
    )
    assert "temp" in two.columns


def test_chains_show_eagles_n_alpha_and_trees_do_not() -> None:
    chain = dataclasses.replace(DRAFTED, is_chain=True, acceptance_given_prefix=(0.8, 0.625, 0.5))
    tree = dataclasses.replace(chain, drafter="eagle(head.gguf, tree=2x2)", is_chain=False)
    notes = "\n".join(drafters_table([PLAIN, chain, tree]).notes)
    assert "n-alpha of chains" in notes
    assert "\n- draft(small.gguf, n=4) at temperature 0: 0.80 0.62 0.50" in notes
    assert "tree=2x2" not in notes


def test_rules_that_are_not_exact_are_marked() -> None:
    lossy = dataclasses.replace(DRAFTED, rule="typical(eps=0.09, delta=0.3)", exact=False)
    table = drafters_table([PLAIN, lossy])
    assert (
        cells(table, 1)["drafter"]
        == "draft(small.gguf, n=4), not exact: typical(eps=0.09, delta=0.3)"
    )
    assert any(note.startswith("not exact: typical(eps=0.09, delta=0.3)") for note in table.notes)
    assert not any("not exact" in note for note in drafters_table([PLAIN, DRAFTED]).notes)
    counted = dataclasses.replace(lossy, total_variation=0.0625, changed_share=0.125)
    said = "at temperature 0: TV 0.062 from the target's distribution, 12.5% of tokens changed"
    assert any(said in note for note in drafters_table([PLAIN, counted]).notes)


def test_csv_has_one_row_a_result_and_raw_numbers() -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv([PLAIN, DRAFTED]))))
    assert len(rows) == 2
    assert "speed_up" not in rows[0]  # speed_up_value is in the row
    assert rows[0]["speed_up_value"] == ""
    assert float(rows[1]["speed_up_value"]) == 2.0
    assert float(rows[1]["tokens_per_second_median"]) == 22.0
    assert rows[1]["acceptance_by_position"] == "0.8 0.5 0.25 0.125"
    assert rows[1]["target_model"] == "target.gguf"


def test_json_is_one_object() -> None:
    content = json.loads(to_json("drafters", {"cores": 2}, [PLAIN, DRAFTED]))
    assert (content["bench"], content["machine"]) == ("drafters", {"cores": 2})
    assert content["results"][1]["speed_up"]["value"] == 2.0
    assert content["results"][0]["acceptance_rate"] is None


@pytest.mark.parametrize("name", ["p.png", "p.svg"])
def test_the_picture_is_written_and_overwritten(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    for _ in range(2):
        plot_drafters([PLAIN, DRAFTED, SLOW], path)
        assert path.stat().st_size > 1000
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_pictures_that_cannot_be_drawn_are_refused_early(tmp_path: Path) -> None:
    for path, problem in (
        (tmp_path / "p.txt", "is not a picture"),
        (tmp_path / "none" / "p.png", "there is no folder"),
    ):
        with pytest.raises(OptionError, match=problem):
            check_plot_file(path)
    with pytest.raises(OptionError, match="there is no drafter among the results"):
        plot_drafters([PLAIN], tmp_path / "p.png")
