"""Measuring what is planned: piece by piece, within a budget, stored after each."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from measure.benchmarks.plan import Piece, Planned
from measure.benchmarks.records import FOLDER, ROOT, Record, commit, read_record, write_record
from specrun.bench.report import machine_facts
from specrun.bindings.errors import SpecrunError
from specrun.bindings.machine.other_load import OtherLoad

_RUN: Mapping[str, tuple[str, ...]] = {
    "specrun": (sys.executable, "-c", "from specrun.cli.entry import main; main()"),
    "measure": (sys.executable, str(ROOT / "tools" / "measure")),
    "offloaded": (sys.executable, str(Path(__file__).with_name("offloaded.py"))),
    "pytest": (sys.executable, str(Path(__file__).with_name("device_tests.py"))),
}
_COUNTED = (
    *("drafter", "rule", "temperature", "category", "n_prompts", "max_tokens", "tokens"),
    *("mean_accepted_length", "acceptance_rate", "acceptance_by_position", "text", "prompt_tokens"),
)
"""What is kept of results without a clock."""

Say = Callable[[str], None]


def record_of(planned: Planned, folder: Path = FOLDER) -> Record:
    """Return the stored record of a plan, or a new one without pieces."""
    path = folder / f"{planned.name}.json"
    if path.exists():
        return read_record(path)
    first = planned.pieces[0].command
    return Record(planned.title, first, "", "", conditions=planned.conditions, kind=planned.kind)


def missing_pieces(planned: Planned, record: Record) -> list[tuple[Piece, float]]:
    """Return the pieces that are not there, with seconds that they will take.

    Estimates are corrected by what pieces of the same record took, up to five times.
    """
    done = [piece for piece in planned.pieces if piece.name in record.pieces]
    guessed = sum(piece.seconds for piece in done)
    took = sum(record.pieces[piece.name] for piece in done)
    factor = min(5.0, max(0.2, took / guessed)) if guessed else 1.0
    missing = (piece for piece in planned.pieces if piece.name not in record.pieces)
    return [(piece, factor * piece.seconds) for piece in missing]


def measure_planned(
    chosen: Sequence[Planned],
    minutes: float,
    *,
    anyway: bool,
    say: Say,
    folder: Path = FOLDER,
    machine: OtherLoad | None = None,
) -> list[str]:
    """Measure pieces in their order, as many as fit the budget; return those that failed.

    A timed piece waits for a quiet machine and is measured again, once, if other programs disturbed
    it, unless `anyway`, which the record then says. Ctrl-C loses the piece that runs, and no other.
    """
    folder.mkdir(parents=True, exist_ok=True)
    machine = machine or OtherLoad(os.cpu_count() or 1)
    until, failed = time.monotonic() + 60 * minutes, []
    for planned in chosen:
        record = record_of(planned, folder)
        for piece, seconds in missing_pieces(planned, record):
            record = _told(record, planned, "")
            name, tries = f"{planned.name}, {piece.name}", 1 if planned.counted or anyway else 2
            for _ in range(tries):
                quiet = planned.counted or _is_quiet(machine, until - seconds, anyway=anyway)
                if not quiet or time.monotonic() + seconds > until:
                    break
                say(f"{name} (about {seconds / 60:.1f} minutes)")
                begun = time.monotonic()
                machine.since_last()
                try:
                    results = _counted(run(piece)) if planned.counted else run(piece)
                except SpecrunError as error:
                    failed.append(f"{name}: {error}")
                    break
                took = time.monotonic() - begun
                load = "" if planned.counted else machine.disturbance()
                if load and not anyway:
                    failed.append(f"{name}: {load} meanwhile")
                    continue
                record = _told(record, planned, load).with_piece(piece.name, took, results)
                write_record(record, folder / f"{planned.name}.json")
                break
    return failed


def _is_quiet(machine: OtherLoad, until: float, *, anyway: bool) -> bool:
    """Wait until no other program is at work, as long as there is time; return whether it is so."""
    while not anyway and machine.now():
        if time.monotonic() > until:
            return False
    return True


def run(piece: Piece) -> list[dict[str, Any]]:
    """Run a piece's command; return its results with the piece's labels, no path among them."""
    files = {key: make() for key, (make, _) in piece.files.items()}
    command = [*_RUN[piece.program], *piece.arguments(files)]
    environment = {**os.environ, "SPECRUN_ANYWAY": "yes"}  # the load was looked at, or is no matter
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment, check=False
    )
    if done.returncode != 0:
        raise SpecrunError(f"{piece.command} ended with {done.returncode}")
    text = done.stdout
    for key, path in files.items():
        text = text.replace(str(path), piece.files[key][1])
    return [{**piece.labels, **result} for result in _results(json.loads(text))]


def _results(printed: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """Return the results that a command printed: of `specrun tune` its one curve."""
    if "target_costs" in printed:
        return [printed["target_costs"]]
    found: list[Mapping[str, Any]] = printed["results"]
    return found


def _counted(results: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [{name: result[name] for name in _COUNTED} for result in results]


def _told(record: Record, planned: Planned, load: str) -> Record:
    """Return the record with this machine, today's commit and versions; a busy machine stays named.

    Raises SpecrunError if the record has pieces of another machine.
    """
    facts = machine_facts()
    machine = "any: counted, no clock" if planned.counted else _machine(facts)
    if record.pieces and record.machine != machine:
        raise SpecrunError(
            f"{planned.name} has pieces of another machine ({record.machine}): measure it --again, "
            "or into another --folder"
        )
    told = " A busy machine: "
    busy = f"{told}{load}." if load and told not in record.conditions else ""
    return replace(
        record,
        title=planned.title,
        machine=machine,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        commit=commit(),
        versions=f"specrun {facts['specrun']}, llama-cpp-python {facts['llama_cpp_python']}, "
        f"Python {facts['python']}",
        conditions=record.conditions + busy,
    )


def _machine(facts: Mapping[str, Any]) -> str:
    devices = "; ".join(facts["devices"])
    return f"{facts['cores']} cores, {facts['system']}, {devices}"
