"""`measure heads`: the bytes it counts are the heads', and the floor follows from them."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path

import numpy as np
import pytest
from support.commands import results_of
from support.commands import run_measure as run

from measure.heads.measure import CopyProbe, HeadsOptions, measure_heads
from measure.heads.random_heads import write_eagle, write_hydra, write_medusa, write_target
from measure.tables import heads_table
from specrun.bench.report import to_markdown
from specrun.bench.timing import Spread
from specrun.bindings.errors import OptionError
from specrun.bindings.gguf import read_header

TINY = HeadsOptions(
    hidden=(64,), vocab_size=320, widths=(1, 3), repetitions=3, n_threads=1, copy_bytes=1 << 20
)


def q8(*shape: int) -> int:
    """Bytes of a Q8_0 matrix: 34 for each 32 numbers."""
    return int(np.prod(shape)) // 32 * 34


def test_each_head_is_measured_with_the_bytes_that_it_must_read(tmp_path: Path) -> None:
    found = list(measure_heads(HeadsOptions(**{**vars_of(TINY), "folder": tmp_path})))
    assert [(result.head, result.width) for result in found] == [
        *(("medusa", 1), ("hydra", 1), ("hydra", 3)),
        *(("hydra++ layer", 1), ("eagle", 1), ("eagle", 3)),
    ]
    wide = int(2.6875 * 64) // 32 * 32
    medusa = q8(64, 64) + 64 * 4 + q8(320, 64)
    cached = 2 * 64 * 64 * 4
    layer = 4 * q8(64, 64) + 3 * q8(64, wide) + cached
    hydra = 2 * (q8(64, 128) + 64 * 4) + q8(320, 64)
    eagle = q8(64, 128) + layer + 64 * 4 + q8(320, 64)
    of_hydra = [hydra + q8(1, 64), hydra + q8(3, 64), layer + 3 * 64 * 4]
    of_eagle = [eagle + q8(1, 64), eagle + q8(3, 64)]
    assert [result.n_bytes for result in found] == [medusa, *of_hydra, *of_eagle]
    for result in found:
        assert result.time_us.n == result.native_us.n == result.copy_bytes_per_s.n == 3
        assert 0 < result.native_us.median <= result.time_us.median
        rate = result.copy_bytes_per_s
        # Of three repetitions the median's floor is the floor of the median.
        assert result.floor_us == pytest.approx(1e6 * result.n_bytes / rate.median)
        ratio, seconds = result.over_floor, result.time_us
        assert 0 < ratio.low <= ratio.value <= ratio.high
        # Each repetition has its own ratio: whatever the clock said, of a time and a rate in these.
        least, most = (t * r / 1e6 / result.n_bytes for t, r in _extremes(seconds, rate))
        assert least * (1 - 1e-9) <= ratio.low
        assert ratio.high <= most * (1 + 1e-9)
        assert result.n_threads == 1
    assert not list(tmp_path.iterdir())


def _extremes(first: Spread, second: Spread) -> list[tuple[float, float]]:
    return [(first.low, second.low), (first.high, second.high)]


def vars_of(options: HeadsOptions) -> dict[str, object]:
    return {name: getattr(options, name) for name in options.__dataclass_fields__}


@pytest.mark.parametrize("type_name", ["F32", "F16", "Q8_0"])
def test_random_files_are_of_the_type_and_size_that_was_asked(
    tmp_path: Path, type_name: str
) -> None:
    heads = {"medusa": write_medusa, "hydra": write_hydra, "eagle": write_eagle}
    for kind, write in {**heads, "llama": write_target}.items():
        write(tmp_path / kind, 64, 320, type_name)  # type: ignore[operator]
        header = read_header(tmp_path / kind)
        assert header.architecture == kind
        matrices = {tensor.type_name for tensor in header.tensors if len(tensor.shape) == 2}
        assert matrices == {type_name}


def test_the_table_says_what_was_measured() -> None:
    text = to_markdown(heads_table(list(measure_heads(TINY))))
    assert re.search(r"\| medusa +\| +64 \| +320 \| Q8_0 +\| +1 \|", text)
    assert "each byte counted once though it is read and written" in text
    assert "with 1 threads" in text


def test_the_command_prints_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    done = run("heads --hidden 64 --vocab 320 --width 2 -r 1 -t 1 --json")
    heads = [result["head"] for result in results_of(done)]
    assert heads == ["medusa", "hydra", "hydra++ layer", "eagle"]
    assert json.loads(done.stdout)["bench"] == "heads"
    assert not list(tmp_path.iterdir())


def test_copies_are_whole_whatever_the_number_of_threads() -> None:
    for n_threads in (1, 3):
        probe = CopyProbe(n_threads, 1000)
        assert probe.measure() > 0
        assert probe._copy.all()
        probe.close()


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"hidden": (100,)}, "multiples of 64"),
        ({"hidden": ()}, "1 or more"),
        ({"widths": (0,)}, "1 or more"),
        ({"vocab_size": 3}, "16 to 1,000,000"),
        ({"type_name": "Q9"}, "use F32, F16, Q8_0"),
    ],
)
def test_options_that_make_no_sense_are_refused(given: dict[str, object], problem: str) -> None:
    with pytest.raises(OptionError, match=problem):
        HeadsOptions(**given)  # type: ignore[arg-type]
