"""`accelerate`: finds the fastest drafters for a GGUF file here, and keeps them as a profile.

Looks for drafters, measures, tries and compares (`search`), chooses (`record`), explains why if
nothing pays (`diagnosis`), and stores the choices, which chat, generate and servers then follow.
Whatever was found is kept after every step, so that Ctrl-C loses nothing and a second call goes on.
"""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrun.bench.accelerate.candidates import cut_file, files_in, is_drafted_by
from specrun.bench.accelerate.prompts import SearchPrompts, search_prompts
from specrun.bench.accelerate.record import LeftOut, Measured, Record, choices, measured
from specrun.bench.accelerate.search import (
    LEAST_SWEEPS,
    AccelerateOptions,
    Machine,
    Search,
    SearchOptions,
    Tell,
)
from specrun.bench.accelerate.this_machine import ThisMachine
from specrun.bench.diagnosis.diagnosis import IN_SHORT, Diagnosis, diagnose
from specrun.bindings.files import require_writable
from specrun.bindings.gguf import read_header
from specrun.runtime.planning import (
    Choice,
    CostCurve,
    Profile,
    describe_file,
    describe_settings,
    known_profile_file,
    load_profile,
    mixture,
    profile_file,
    save_profile,
)


@dataclass(frozen=True, slots=True)
class AccelerateResult:
    """The results: the choices, everything that was measured, and why.

    `rows` are by temperature and workload, in the contenders' order. `diagnoses` are of the fastest
    drafter at each temperature and workload, whether it pays or not. `profile` is the file;
    `interrupted` if Ctrl-C ended the search, which another call goes on with. It is not `complete`
    if its time did not suffice to compare everything twice.
    """

    target: Path
    profile: Path | None
    choices: tuple[Choice, ...]
    rows: tuple[Measured, ...]
    sources: dict[str, str]
    left_out: tuple[LeftOut, ...]
    diagnoses: tuple[Diagnosis, ...]
    curve: CostCurve | None
    interrupted: bool
    seconds: float
    complete: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Return everything as a mapping, ready for JSON."""
        fields = {
            name: getattr(self, name) for name in ("sources", "interrupted", "seconds", "complete")
        }
        rows = [
            {
                **{name: getattr(row, name) for name in ("drafter", "temperature", "workload")},
                "repetitions": row.repetitions,
                "speed_up": row.speed_up.value,
                "speed_up_low": row.speed_up.low,
                "speed_up_high": row.speed_up.high,
                "tokens_per_second": row.work.tokens_per_second,
                "plain_tokens_per_second": row.plain.tokens_per_second,
                "tokens_per_round": row.work.tokens_per_round,
                "acceptance": row.work.acceptance,
            }
            for row in self.rows
        ]
        return {
            "target": str(self.target),
            "profile": None if self.profile is None else str(self.profile),
            "choices": [dataclasses.asdict(choice) for choice in self.choices],
            "measured": rows,
            "left_out": [dataclasses.asdict(left) for left in self.left_out],
            "why": [diagnosis.to_dict() for diagnosis in self.diagnoses],
            "curve": None if self.curve is None else self.curve.to_dict(),
            **fields,
        }


def accelerate(
    options: AccelerateOptions,
    tell: Tell = lambda _: None,
    *,
    warn: Callable[[str], None] = lambda _: None,
    machine: Machine | None = None,
) -> AccelerateResult:
    """Search, keep the profile and return the results.

    `tell` is given the present trial, `warn` the reason why an earlier profile does not count.
    `machine` measures; without one this machine does. Ctrl-C ends the search, and the results so
    far are returned. Raises as opening the target does, and SpecrunError if the profile cannot be
    written.
    """
    started = time.perf_counter()
    prompts = search_prompts(options.prompts)
    search_options = options.search(prompts)  # raises before anything takes time
    for path in options.drafts:
        read_header(path)  # so does this
    finder = _Finder(options, prompts, search_options)
    record = finder.earlier(warn)
    finder.require_place()
    curve, interrupted = None, False
    try:
        if machine is not None:
            curve = Search(machine, search_options, record, tell, finder.keep).run()
        else:
            with finder.this_machine() as own:
                curve = Search(own, search_options, record, tell, finder.keep).run()
    except KeyboardInterrupt:
        interrupted = True
    finder.know(curve)
    if not interrupted:
        finder.drop_unused_cut(record)
    path = finder.save(record, finished=not interrupted)
    least = min(LEAST_SWEEPS, search_options.repetitions)
    return AccelerateResult(
        target=options.target,
        profile=path,
        choices=tuple(finder.choices(record)),
        rows=tuple(finder.rows(record)),
        sources={found.drafter: found.source for found in record.contenders},
        left_out=tuple(record.left_out),
        diagnoses=tuple(finder.diagnoses(record)),
        curve=curve,
        interrupted=interrupted,
        seconds=time.perf_counter() - started,
        complete=record.is_compared(search_options.temperatures, search_options.workloads, least),
    )


class _Finder:
    """The result of a record: choices, diagnoses and the stored profile."""

    def __init__(
        self, options: AccelerateOptions, prompts: SearchPrompts, search: SearchOptions
    ) -> None:
        self._options, self._prompts, self._search = options, prompts, search
        self._settings = describe_settings(options.runtime)
        self._mixture = mixture(read_header(options.target))
        self._curve: CostCurve | None = None
        self._before: Profile | None = None

    def know(self, curve: CostCurve | None) -> None:
        """Take the curve that diagnoses read."""
        self._curve = curve

    @property
    def _basis(self) -> str:
        """A record's conditions, in addition to target, machine and settings."""
        samplers = sorted(
            {repr(params.replace(temperature=0.0, seed=None)) for params in self._options.params}
        )
        return f"{self._prompts.digest}; {self._options.n_tokens} tokens; {'; '.join(samplers)}"

    def earlier(self, warn: Callable[[str], None]) -> Record:
        """Return the record of an earlier call, or an empty one."""
        self._before = load_profile(self._options.target, self._settings, warn=warn)
        if self._before is None or self._options.again:
            return Record(self._basis)
        path = known_profile_file(self._options.target)
        return Record.read(self._before.record, self._basis, lambda why: warn(f"{path}: {why}"))

    def require_place(self) -> None:
        """Raise unless the profile can be written: checked before long work."""
        path = profile_file(self._options.target)
        path.parent.mkdir(parents=True, exist_ok=True)
        require_writable(path)

    def this_machine(self) -> ThisMachine:
        """Return this machine, as the options open its target."""
        return ThisMachine(self._options, self._prompts)

    def keep(self, record: Record) -> None:
        """Store the results so far."""
        self.save(record, finished=False)

    def save(self, record: Record, *, finished: bool) -> Path:
        """Store the profile; return its file.

        Until something was compared, the choices of an earlier one stay.
        """
        found = self.choices(record)
        if not found and self._before is not None:
            found = list(self._before.choices)
        names = {name for choice in found for name in files_in(choice.drafter)}
        profile = Profile(
            settings=self._settings,
            choices=tuple(found),
            files={name: describe_file(Path(name)) for name in sorted(names)},
            measured=datetime.date.today().isoformat(),
            finished=finished,
            record=record.to_dict(),
        )
        return save_profile(profile, self._options.target)

    def choices(self, record: Record) -> list[Choice]:
        """Return the choices as far as anything was compared."""
        search = self._search
        reasons = {
            (found.temperature, found.workload): IN_SHORT[found.reasons[0].kind]
            for found in self.diagnoses(record)
            if found.reasons and not found.pays
        }
        return choices(record, search.temperatures, search.workloads, reasons)

    def rows(self, record: Record) -> list[Measured]:
        """Return everything that was compared."""
        return [
            row
            for temperature in self._search.temperatures
            for workload in self._search.workloads
            for row in measured(record, temperature, workload)
        ]

    def diagnoses(self, record: Record) -> list[Diagnosis]:
        """Return why the fastest drafter of each temperature and workload is as fast as it is."""
        if self._curve is None:
            return []
        return [
            diagnose(
                best.drafter,
                best.temperature,
                best.plain,
                best.work,
                self._curve,
                speed_up=best.speed_up,
                mixture=self._mixture,
                workload=best.workload,
            )
            for best in self._fastest(record)
        ]

    def _fastest(self, record: Record) -> Sequence[Measured]:
        """Return the fastest drafter of each setting, of those that drafted anything."""
        found = []
        for temperature in self._search.temperatures:
            for workload in self._search.workloads:
                rows = measured(record, temperature, workload)
                rows = [row for row in rows if row.work.drafting_rounds] or rows
                if rows:
                    found.append(max(rows, key=lambda row: row.speed_up.value))
        return found

    def drop_unused_cut(self, record: Record) -> None:
        """Remove a cut that was tried and not chosen: it is as large as a part of the target."""
        path = cut_file(self._options.target)
        if any(is_drafted_by(choice.drafter, path) for choice in self.choices(record)):
            return
        for row in self.rows(record):
            if is_drafted_by(row.drafter, path):
                speed = f"it gave {row.speed_up.value:.2f} times the speed of plain decoding"
                record.leave_out(row.drafter, f"{speed} ({row.workload})")
        path.unlink(missing_ok=True)
