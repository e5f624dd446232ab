"""`measure overhead`: options, results in small, and the table; times are never asserted."""

from __future__ import annotations

import dataclasses

import pytest
from support.commands import results_of, run_measure

from measure.overhead.overhead import DeviceResult, OverheadOptions, OverheadResult
from measure.tables import overhead_table
from specrun.bench.report import Table
from specrun.bench.timing import spread_of
from specrun.bindings.errors import OptionError

DEVICE = DeviceResult(
    share=spread_of([0.1]),
    exposed_us=spread_of([333.0]),
    most=0.1,
    target_bytes=128_000.0,
    drafter_bytes=500.0,
    graphs_reused=0.25,
)
OVERHEAD = OverheadResult(
    setting="chain of 5, greedy",
    vocab_size=32_000,
    n_ctx=4096,
    rounds=100,
    overhead_us=spread_of([100.0, 200.0, 300.0]),
    parts_us={
        name: spread_of([30.0])
        for name in ("draft", "batch", "law", "acceptance", "commit", "text")
    },
    target_native_us=spread_of([1234.0]),
    drafter_native_us=spread_of([567.0]),
    drafted_per_round=5.0,
    accepted_per_round=2.0,
    devices={"3 ms": DEVICE},
)


def cells(table: Table, row: int) -> dict[str, str]:
    return dict(zip(table.columns, table.rows[row], strict=True))


def test_overhead_table_compares_shares_with_their_bounds() -> None:
    over = dataclasses.replace(DEVICE, share=spread_of([0.101]))
    free = dataclasses.replace(DEVICE, most=None)
    rows = [dataclasses.replace(OVERHEAD, devices={"3 ms": each}) for each in (DEVICE, over, free)]
    table = overhead_table(rows)
    assert cells(table, 0)["overhead"] == "200 (150-250)"
    shares = [cells(table, row)["ours at 3 ms"] for row in range(3)]
    assert shares == ["10.0% within", "10.1% over", "10.0%"]
    assert (cells(table, 0)["target"], cells(table, 0)["accepted"]) == ("1,234", "2.00/5.0")
    assert (cells(table, 0)["copied"], cells(table, 0)["reused"]) == ("128.0 kB + 0.5 kB", "25%")
    bare = overhead_table([dataclasses.replace(OVERHEAD, devices={})])
    assert (cells(bare, 0)["copied"], cells(bare, 0)["reused"]) == ("-", "-")
    assert overhead_table([]).rows == ()


def test_overhead_as_json() -> None:
    quick = "overhead --vocab 512 -c 512 --rounds 8 -t 1 --device-ms 1"
    found = results_of(run_measure(quick, "--json"))
    assert [result["setting"] for result in found] == [
        *("plain, greedy", "plain, temp 0.8", "prompt lookup, greedy"),
        *("chain of 5, greedy", "chain of 5, temp 0.8", "tree of 16, temp 0.8"),
        *("medusa tree of 16, greedy", "hydra++ chain of 5, greedy", "hydra++ tree of 16, greedy"),
        *("eagle chain of 5, greedy", "eagle dynamic tree of 16, greedy"),
        *("eagle tree of 16, temp 0.8", "chain of 5, all kept", "chain of 5, V3"),
        *("chain of 5, Chow", "chain of 5, OPT"),
    ]
    assert found[5]["drafted_per_round"] > 4
    parts = {"draft", "batch", "law", "acceptance", "commit", "text"}
    for result in found:
        assert result["rounds"] == result["overhead_us"]["n"] == 8
        assert set(result["parts_us"]) == parts
        assert [found["share"]["n"] for found in result["devices"].values()] == [4]
        assert 0.0 < result["devices"]["1 ms"]["share"]["low"] < 1.0
    copied = [result["devices"]["1 ms"]["target_bytes"] for result in found]
    # Rows of 512 logits: of one token, and of a chain of 5 and its root.
    assert (copied[0], copied[3]) == (4 * 512, 4 * 512 * 6)
    assert [result["devices"]["1 ms"]["graphs_reused"] for result in found[:2]] == [1.0, 1.0]
    cut = results_of(run_measure(quick, "--backend-sampling", "--json"))
    copied = [result["devices"]["1 ms"]["target_bytes"] for result in cut]
    # Of each row the best and eight more, at a temperature 40 and eight, and their ids.
    assert (copied[0], copied[1]) == (8 * 9, 8 * 48)
    assert copied[4] < 8 * 48 * 6 * 2


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"n_ctx": 100}, "a context of 100 is too short"),
        ({"rounds": 0}, "rounds is 0"),
        ({"vocab_sizes": ()}, "vocabularies of 128 tokens or more"),
        ({"vocab_sizes": (3,)}, "vocabularies of 128 tokens or more"),
    ],
)
def test_overhead_options_are_checked(wrong: dict[str, object], problem: str) -> None:
    with pytest.raises(OptionError, match=problem):
        OverheadOptions(**wrong)


@pytest.mark.parametrize(
    "line",
    [
        "overhead --vocab many",
        "overhead --device-ms 0",
        "overhead --json -o csv",
        "overhaed",
    ],
)
def test_bad_input_ends_with_a_sentence_and_a_code(line: str) -> None:
    done = run_measure(line)
    assert (done.exit_code, done.stdout) == (2, "")
    assert len(done.stderr.strip().splitlines()[-1]) > 20
