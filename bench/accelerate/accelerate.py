"""`accelerate`: finds the fastest drafters for a GGUF file here, and keeps them as a profile.

Looks for drafters, measures, tries and compares (`search`), chooses (`record`), explains why if
nothing pays (`diagnosis`), and stores the choices, which chat, generate and servers then follow.
Whatever was found is kept after every step, so that Ctrl-C loses nothing and a second call goes on.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrun.bench.accelerate.candidates import cut_file, files_in, is_drafted_by
from specrun.bench.accelerate.prompts import SearchPrompts, search_prompts
from specrun.bench.accelerate.record import LeftOut, Measured, Record, choices, measured
from specrun.bench.accelerate.search import LEAST_SWEEPS, Search, Tell
from specrun.bench.accelerate.target import AccelerateOptions
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
    machine: ThisMachine | None = None,
) -> AccelerateResult:
    """Search, keep the profile and return the results.

    `tell` is given the present trial, `warn` the reason why an earlier profile does not count.
    `machine` measures; without one this machine does. Ctrl-C ends the search, and the results so
    far are returned. Raises as opening the target does, and SpecrunError if the profile cannot be
    written.
    """
    started = time.perf_counter()
    prompts = search_prompts(options.prompts)  # raises before anything takes time
    for path in options.drafts:
        read_header(path)  # so does this
    found = _Findings(options, prompts, warn)
    record, interrupted = found.record, False
    try:
        with ThisMachine(options, prompts) if machine is None else nullcontext(machine) as own:
            search = Search(own, options, found.workloads, record, tell, found.save)
            found.curve = search.run()
    except KeyboardInterrupt:
        interrupted = True
    else:
        found.drop_unused_cut()
    path = found.save(finished=not interrupted)
    least = min(LEAST_SWEEPS, options.repetitions)
    return AccelerateResult(
        target=options.target,
        profile=path,
        choices=tuple(found.choices()),
        rows=tuple(found.rows()),
        sources={each.drafter: each.source for each in record.contenders},
        left_out=tuple(record.left_out),
        diagnoses=tuple(found.diagnoses()),
        curve=found.curve,
        interrupted=interrupted,
        seconds=time.perf_counter() - started,
        complete=all(len(record.of(*setting)) >= least for setting in found.settings),
    )


class _Findings:
    """The results of a record: choices, diagnoses and the stored profile.

    Diagnoses read `curve`, the cost of evaluations, once it is known.
    """

    def __init__(
        self, options: AccelerateOptions, prompts: SearchPrompts, warn: Callable[[str], None]
    ) -> None:
        self._options = options
        self._stored = describe_settings(options.runtime)
        self._mixture = mixture(read_header(options.target))
        self.curve: CostCurve | None = None
        self.workloads = tuple(prompts.held_out)
        self.settings = list(itertools.product(options.temperatures, self.workloads))
        samplers = sorted(
            {repr(params.replace(temperature=0.0, seed=None)) for params in options.params}
        )
        # A record's conditions, in addition to target, machine and settings.
        basis = f"{prompts.digest}; {options.n_tokens} tokens; {'; '.join(samplers)}"
        self._before = load_profile(options.target, self._stored, warn=warn)
        self.record = Record(basis)
        if self._before is not None and not options.again:
            path = known_profile_file(options.target)
            kept = self._before.record
            self.record = Record.read(kept, basis, lambda why: warn(f"{path}: {why}"))
        path = profile_file(options.target)
        path.parent.mkdir(parents=True, exist_ok=True)
        require_writable(path)  # before long work

    def save(self, *, finished: bool = False) -> Path:
        """Store the profile; return its file.

        Until something was compared, the choices of an earlier one stay.
        """
        found = self.choices()
        if not found and self._before is not None:
            found = list(self._before.choices)
        names = {name for choice in found for name in files_in(choice.drafter)}
        profile = Profile(
            settings=self._stored,
            choices=tuple(found),
            files={name: describe_file(Path(name)) for name in sorted(names)},
            measured=datetime.date.today().isoformat(),
            finished=finished,
            record=self.record.to_dict(),
        )
        return save_profile(profile, self._options.target)

    def choices(self) -> list[Choice]:
        """Return the choices as far as anything was compared."""
        reasons = {
            (found.temperature, found.workload): IN_SHORT[found.reasons[0].kind]
            for found in self.diagnoses()
            if found.reasons and not found.pays
        }
        return choices(self.record, self._options.temperatures, self.workloads, reasons)

    def rows(self) -> list[Measured]:
        """Return everything that was compared."""
        return [row for setting in self.settings for row in measured(self.record, *setting)]

    def diagnoses(self) -> list[Diagnosis]:
        """Return why the fastest drafter of each temperature and workload is as fast as it is.

        The fastest is one of those that drafted anything, if there are any.
        """
        found: list[Diagnosis] = []
        if self.curve is None:
            return found
        for setting in self.settings:
            rows = measured(self.record, *setting)
            drafting = [row for row in rows if row.work.drafting_rounds] or rows
            best = max(drafting, key=lambda row: row.speed_up.value, default=None)
            if best is not None:
                found.append(
                    diagnose(
                        best.drafter,
                        best.temperature,
                        best.plain,
                        best.work,
                        self.curve,
                        speed_up=best.speed_up,
                        mixture=self._mixture,
                        workload=best.workload,
                    )
                )
        return found

    def drop_unused_cut(self) -> None:
        """Remove a cut that was tried and not chosen: it is as large as a part of the target."""
        path = cut_file(self._options.target)
        if any(is_drafted_by(choice.drafter, path) for choice in self.choices()):
            return
        for row in self.rows():
            if is_drafted_by(row.drafter, path):
                speed = f"it gave {row.speed_up.value:.2f} times the speed of plain decoding"
                self.record.leave_out(row.drafter, f"{speed} ({row.workload})")
        path.unlink(missing_ok=True)
