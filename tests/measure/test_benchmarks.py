"""The page of benchmarks: what it is written from, and how records grow; nothing is timed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.commands import run_measure

from measure.benchmarks import measurement
from measure.benchmarks.measurement import measure_planned, record_of
from measure.benchmarks.models import SHAPES, random_model
from measure.benchmarks.page import PAGE, page_text
from measure.benchmarks.pictures import draw_pictures
from measure.benchmarks.plan import Piece, Planned, plans
from measure.benchmarks.records import FOLDER, Record, read_record, read_records, write_record
from measure.benchmarks.summaries import summary
from specrun.bench.report import Table
from specrun.bindings.errors import MalformedFileError, SpecrunError
from specrun.bindings.machine import other_load
from specrun.bindings.machine.other_load import OtherLoad, Times
from specrun.runtime import Runtime
from specrun.runtime.demo import demo_target

RECORDS = sorted(read_records())
PIECE = Piece("first", "specrun", "bench", 60.0)


def spread(value: float) -> dict[str, float]:
    names = ("median", "mean", "low", "lower_quartile", "upper_quartile", "high")
    return {"n": 3, "sd": 0.0, **dict.fromkeys(names, value)}


def arm(program: str, drafting: str, category: str, speed: float, **more: Any) -> dict[str, Any]:
    return {
        "program": program,
        "drafting": drafting,
        "category": category,
        "temperature": 0.0,
        "tokens_per_second": spread(speed),
        "speed_up": None if speed == 10.0 else {"value": speed / 10.0, "low": 0.0, "high": 9.0},
        "n_answers": 2,
        "n_same": None,
        "weights": "F16",
        "threads": 2,
        **more,
    }


def peers() -> Record:
    """Return made-up arms: llama-server at 10 (n-grams 12), specrun's default at 15, best 18."""
    results = [
        made
        for category, times in (("code", 1.0), ("chats", 2.0))
        for made in (
            arm("llama-server", "plain", category, 10.0),
            arm("llama-server", "ngram-mod", category, 12.0),
            arm("llama-cpp-python", "plain", category, 9.0),
            arm("specrun", "plain", category, 10.0, n_same=2),
            arm("specrun", "as it chooses", category, 15.0 * times, n_same=1),
            arm("specrun", "eagle3", category, 18.0 * times, n_same=2),
        )
    ]
    record = Record("a model, as it is", "measure peers", "2026-01-02", "a machine", kind="peers")
    return record.with_piece("all", 12.345, results)


def test_the_page_is_the_one_that_is_written() -> None:
    """`make benchmarks` after a change of the template or a record in docs/benchmarks."""
    assert PAGE.read_text(encoding="utf-8") == page_text()


@pytest.mark.parametrize("name", RECORDS)
def test_records_say_where_they_are_from(name: str) -> None:
    record = read_record(FOLDER / f"{name}.json")
    assert record.machine
    assert record.title
    told = record.command or "command was not recorded" in record.conditions
    assert told or name == "reported"
    assert record.date or name == "reported"
    text = (FOLDER / f"{name}.json").read_text(encoding="utf-8")
    assert re.findall(r"(?<![\w.~])/(?:root|home|tmp|work|Users)/", text) == []


def test_all_that_is_planned_has_a_place_on_the_page() -> None:
    page = (FOLDER / "page.md").read_text(encoding="utf-8")
    assert [plan.name for plan in plans() if f"{{table {plan.name}}}" not in page] == []
    for plan in plans():
        names = [piece.name for piece in plan.pieces]
        assert len(names) == len(set(names))
        for piece in plan.pieces:
            assert "{" not in piece.command
            assert "/root" not in piece.command


def test_peers_by_category() -> None:
    (row,) = summary(peers()).rows
    found = dict(zip(summary(peers()).columns, row, strict=True))
    assert found["plain tok/s"] == "10.0"
    assert (found["specrun plain"], found["python"]) == ("1.00x", "0.90x")
    assert (found["code"], found["chats"]) == ("1.50x (1.50x)", "3.00x (3.00x)")
    assert found["questions"] == "-"
    assert found["mean"] == "2.12x (2.12x)"
    assert found["differ"] == "2 of 12"


def test_records_grow_and_are_kept(tmp_path: Path) -> None:
    record = peers().with_piece("more", 1.0, [{"speed": 1 / 3}])
    again = record.with_piece("more", 2.0, [{"speed": 2 / 3}])
    assert again.results[-1] == {"piece": "more", "speed": 0.66667}
    assert len(again.results) == len(record.results)
    path = tmp_path / "some.json"
    write_record(again, path)
    assert read_record(path) == again
    table = Record("t", "", "", "m", table=Table(("a", "b"), (("1", "2|3"),)))
    write_record(table, path)
    assert read_record(path) == table
    path.write_text('{"title": "t", "table": {"columns": ["a"], "rows": [["1", "2"]]}}')
    with pytest.raises(MalformedFileError, match="more or fewer cells"):
        read_record(path)


def test_pieces_that_fit_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed piece is named and tried again; one that is too long waits; nothing runs twice."""
    ran: list[str] = []

    def run(piece: Piece) -> list[dict[str, Any]]:
        ran.append(piece.name)
        if piece.name == "bad" and len(ran) < 4:
            raise SpecrunError("no such model")
        return [{**dict.fromkeys(measurement._COUNTED, 1), "seconds": 7}]

    monkeypatch.setattr(measurement, "run", run)
    pieces = (PIECE, Piece("bad", "specrun", "", 1.0), Piece("long", "specrun", "", 1e6))
    plan = Planned("some", "counted", "counted", "A title", "Conditions.", pieces, counted=True)

    def measured(minutes: float) -> Sequence[str]:
        return measure_planned([plan], minutes, anyway=False, say=lambda _: None, folder=tmp_path)

    assert measured(10.0) == ["some, bad: no such model"]
    assert ran == ["first", "bad"]
    record = record_of(plan, tmp_path)
    assert list(record.pieces) == ["first"]
    assert "seconds" not in record.results[0]
    assert (record.machine, record.commit != "") == ("any: counted, no clock", True)
    measured(10.0)
    assert measured(10.0) == []
    assert ran == ["first", "bad", "bad", "bad"]


def test_a_disturbed_piece_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits while others are at work; what they disturbed is no result."""
    ran: list[str] = []
    monkeypatch.setattr(
        measurement, "run", lambda piece: ran.append(piece.name) or [{"speed": len(ran)}]
    )
    plan = Planned("some", "real", "curves", "A title", "Conditions.", (PIECE,))
    busy, seconds, steps = 1.9, 1.0, iter(range(100))
    first_look, second_look, first_try = (0.0, busy), (0.0, 0.0), (0.0, busy)
    others = iter((0.0, *first_look, *second_look, *first_try, *second_look, 0.0, 0.0))
    worked = 0.0

    def read() -> Times:
        nonlocal worked
        worked += seconds * next(others)
        return Times(seconds * next(steps), worked, 0.0)

    monkeypatch.setattr(other_load, "_SPARE", 0.25)  # tests run on busy machines
    monkeypatch.setattr(other_load, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(other_load, "read_times", read)
    monkeypatch.setattr(other_load.os, "cpu_count", lambda: 2)
    load = OtherLoad(2)
    failed = measure_planned(
        [plan], 10.0, anyway=False, say=lambda _: None, folder=tmp_path, machine=load
    )
    assert failed == ["some, first: other programs used 1.9 of 2 processors meanwhile"]
    assert ran == ["first", "first"]
    record = record_of(plan, tmp_path)
    assert [result["speed"] for result in record.results] == [2]
    assert "busy" not in record.conditions


def test_machines_are_not_mixed(tmp_path: Path) -> None:
    plan = Planned("some", "counted", "counted", "A title", "Conditions.", (PIECE,), counted=True)
    elsewhere = Record("t", "c", "2026-01-02", "a machine", kind="counted", pieces={"other": 1.0})
    write_record(elsewhere, tmp_path / "some.json")
    with pytest.raises(SpecrunError, match="pieces of another machine"):
        measure_planned([plan], 10.0, anyway=False, say=lambda _: None, folder=tmp_path)


def test_pictures_of_made_up_records(tmp_path: Path) -> None:
    """The same records give the same bytes; light and dark ones differ."""
    folder, again = tmp_path / "benchmarks", tmp_path / "again"
    for each in (folder, again):
        each.mkdir()
        write_record(peers(), each / "peers-some.json")
    curve = {"file": "a model, F16", "threads": 2, "sizes": [1, 2, 4], "reused": [1.0, 1.5, 2.0]}
    curves = Record("costs", "", "", "m", kind="curves").with_piece("one", 1.0, [curve])
    write_record(curves, folder / "curves.json")
    common = {"temperature": 0.0, "category": "", "rule": "exact"}
    nodes = [
        {"drafter": f'eagle3("h", nodes={n})', "mean_accepted_length": 1.0 + n, **common}
        for n in (1, 2)
    ]
    counted = Record("nodes", "", "", "m", kind="counted").with_piece("one", 1.0, nodes)
    write_record(counted, folder / "nodes.json")
    assert {path.name for path in draw_pictures(folder)} == {
        f"{name}-{theme}.svg"
        for name in ("peers", "curves", "nodes")
        for theme in ("light", "dark")
    }
    light, dark = ((folder / f"peers-{theme}.svg").read_bytes() for theme in ("light", "dark"))
    draw_pictures(again)
    assert (again / "peers-light.svg").read_bytes() == light != dark


def test_the_command_shows_what_is_missing() -> None:
    done = run_measure("benchmarks --measure gpu --list")
    assert done.exit_code == 0, done.output
    assert re.search(r"gpu-8b +2 of 2 pieces", done.output) or "gpu-8b" in RECORDS
    assert run_measure("benchmarks --only gpu-8b").exit_code == 2


def test_models_with_random_weights_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the vocabulary of a published model, here the embedded one's stands in."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("measure.benchmarks.models.fetch_packaged", lambda _: demo_target())
    path = random_model(SHAPES["tiny"], "Q4_K_M")
    with Runtime(path, drafter="none", n_ctx=256) as runtime:
        assert len(runtime.generate("a", max_tokens=3).token_ids) >= 1
    assert random_model(SHAPES["tiny"], "Q4_K_M") == path
    assert path.name == "random-tiny.Q4_K_M.gguf"
