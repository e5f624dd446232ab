"""Mutants of models and heads: none ends, hangs or surprises the process that opens it.

`--sweep whole` opens 20,000 of them, in about a quarter of an hour.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.gguf_mutants import mutant, take_apart
from support.mutant_runs import (
    HEADS,
    MODELS,
    Worker,
    again_as_users_do,
    run,
    table,
    write_bases,
)

from specrun.bindings.gguf import read_header


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mutants")
    write_bases(folder)
    return folder


def test_no_mutant_is_met_by_whoever_opens_it(folder: Path, whole_sweep: bool) -> None:
    """A mutant that dies in a trial is opened again, tried in another process: this one must live.

    The mutants' numbers are fixed, so that the same ones are opened each time.
    """
    count, sample = (20_000, 300) if whole_sweep else (120, 3)
    outcomes = list(run(folder, count))
    again = list(again_as_users_do(folder, outcomes, sample))
    faults = [outcome for outcome in (*outcomes, *again) if outcome.is_fault]
    assert faults == [], table(outcomes)
    # Mutants that nothing ever opens, or nothing ever refuses, would test nothing.
    endings = {outcome.ending for outcome in outcomes}
    assert {"ran", "refused", "refused by a check"} <= endings


def test_what_ends_the_worker_is_counted(folder: Path) -> None:
    """The negative control: a recurrent state that does not fit its tensors ends a trial."""
    with Worker(folder) as worker:
        outcome = worker.open("qwen35", _deadly(folder))
        assert outcome.died
        assert not outcome.is_fault
        assert worker.open("llama", -1).stage in ("trial", "use")  # it was started again
        (again,) = again_as_users_do(folder, [outcome], 0)
    assert (again.stage, again.ending) == ("product", "refused")


def _deadly(folder: Path) -> int:
    """Return the number of the first mutant whose `ssm.inner_size` alone is another."""
    parts = take_apart(folder / "qwen35.gguf")
    path = folder / "candidate.gguf"
    for seed in range(10_000):
        path.write_bytes(mutant(parts, seed))
        try:
            changed = take_apart(path)
        except Exception:
            continue
        if len(changed.entries) != len(parts.entries) or changed.tensors != parts.tensors:
            continue
        pairs = zip(parts.entries, changed.entries, strict=True)
        if [old.key for old, new in pairs if old != new] == [b"qwen35.ssm.inner_size"]:
            return seed
    raise AssertionError("no such mutant")


@pytest.mark.parametrize("name", [*MODELS, *HEADS])
def test_files_are_put_together_as_they_were(folder: Path, name: str) -> None:
    path = folder / f"{name}.gguf"
    again = folder / "again.gguf"
    again.write_bytes(take_apart(path).laid_out())
    first, second = read_header(path), read_header(again)
    assert first.metadata == second.metadata
    assert first.tensors == second.tensors
