"""The search for the fastest drafter: what is tried in which order, for how long, and kept.

First the cost curve, then what is found (heads, NextN blocks, smaller models), then cuts of the
target's own layers and, with hours, a trained head. All that promises something is then compared
with plain decoding on prompts that nothing was fitted to: in sweeps, which answer every prompt of a
workload with every drafter once. Drafters that fall behind are dropped from later sweeps.

A `Machine` measures, so that the search itself depends on no clock of its own: the
same measurements give the same choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from specrun.bench.accelerate.prompts import SearchPrompts
from specrun.bench.accelerate.record import (
    PLAIN,
    Contender,
    Measured,
    Record,
    Sweep,
    hopeful,
    measured,
)
from specrun.bench.diagnosis.diagnosis import Work
from specrun.bindings.errors import MissingPackageError, OptionError, SpecrunError
from specrun.runtime.drafters.combinators import auto_expression
from specrun.runtime.engine import RuntimeOptions
from specrun.runtime.language import parse_expression, short_label
from specrun.runtime.laws import SamplingParams
from specrun.runtime.planning import CostCurve

WITHOUT_FILE = ("prompt-lookup", "lookahead", "auto")
_NEEDS_NOTHING = "needs no file"
_LEAST_SWEEPS = 2
_FEWEST_TOKENS = 8
_GAIN_OF_CUT = 1.05  # predicted, from which a cut is worth comparing
_LOOK, _CUT = "drafters found", "cut"
_CURVE_S, _PLAN_S, _CUT_S = 12.0, 20.0, 25.0  # seconds, about: of a curve, a model's plan, cuts


@dataclass(frozen=True, slots=True)
class FoundDrafter:
    """A file, or the target's own blocks (None), that could draft; `method` is how."""

    path: Path | None
    method: str
    where: str

    @property
    def name(self) -> str:
        """What users call it."""
        return self.method if self.path is None else self.path.name


@dataclass(frozen=True, slots=True)
class CutFound:
    """A cut of the target's layers: its drafter expression, and its predicted speed-up."""

    drafter: str
    speed_up: float
    layers: str


class Machine(Protocol):
    """What a search asks: everything here takes time, and may raise SpecrunError."""

    def curve(self) -> CostCurve:
        """Measure what evaluations of the target cost, once."""

    def curve_beside(self) -> CostCurve | None:
        """Return what evaluations cost between the answers, None if that was not measured."""

    def look(self) -> Sequence[FoundDrafter]:
        """Return what could draft for the target: in its file, beside it and in the caches."""

    def plans(self, found: FoundDrafter) -> Sequence[str]:
        """Return drafter expressions with a file, planned for this machine."""

    def cut(self) -> CutFound:
        """Search for the best cut of the target's layers."""

    def train(self, hours: float) -> Sequence[str]:
        """Train a head for the target; return drafter expressions with it."""

    def sweep(
        self, temperature: float, workload: str, drafters: Sequence[str], seed: int
    ) -> dict[str, Work | str]:
        """Answer the prompts of a workload with each drafter; a text says why one could not."""

    def now(self) -> float:
        """Return seconds from any fixed moment on."""


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """What to search for.

    Comparing takes about `seconds`, in at most `repetitions` sweeps of each workload at each
    temperature, of which two are made in any case. With `hours` a head is trained.
    """

    temperatures: tuple[float, ...]
    workloads: tuple[str, ...]
    repetitions: int = 4
    seconds: float = 90.0
    hours: float | None = None

    def __post_init__(self) -> None:
        if not self.temperatures or not self.workloads:
            raise OptionError("there is nothing to compare: give temperatures and prompts")
        if self.repetitions < 1:
            raise OptionError(f"{self.repetitions} repetitions measure nothing: give at least 1")
        if not self.seconds > 0.0:
            raise OptionError(f"{self.seconds} seconds are no time to compare in")
        if self.hours is not None and not 0.0 < self.hours <= 24 * 365:
            raise OptionError(f"{self.hours:g} hours are no time to train in: give more than 0")


@dataclass(frozen=True, slots=True)
class AccelerateOptions:
    """What to make faster, and how long to try.

    The profile has choices for each of `params`, one a temperature. `prompts` is a file, one a
    line or JSON lines; without one there are built-in ones. Answers have at most `n_tokens`;
    comparing takes about `seconds`, in up to `repetitions`. `hours` trains a head, too. `memory` is
    how many bytes a target and what drafts for it may take. `drafts` are files to try beside those
    that are found. `again` forgets what was found before. `anyway` measures whatever other programs
    do; without it a comparison that they disturb is made again.
    """

    target: Path
    params: tuple[SamplingParams, ...]
    prompts: Path | None = None
    hours: float | None = None
    memory: int | None = None
    drafts: tuple[Path, ...] = ()
    n_tokens: int = 64
    repetitions: int = 4
    seconds: float = 90.0
    again: bool = False
    anyway: bool = False
    runtime: RuntimeOptions = field(default_factory=RuntimeOptions)

    def __post_init__(self) -> None:
        if self.n_tokens < _FEWEST_TOKENS:
            problem = f"answers of {self.n_tokens} tokens say too little"
            raise OptionError(f"{problem}: give {_FEWEST_TOKENS} or more")
        if self.memory is not None and self.memory < 1:
            raise OptionError(f"{self.memory} bytes of memory hold nothing")

    def search(self, prompts: SearchPrompts) -> SearchOptions:
        """Return the options of the search; raises OptionError for what is none."""
        temperatures = tuple(params.temperature for params in self.params)
        workloads = tuple(prompts.held_out)
        return SearchOptions(
            temperatures, workloads, self.repetitions, self.seconds, hours=self.hours
        )


@dataclass(frozen=True, slots=True)
class Status:
    """What is being tried, the seconds that are left (about), and the best so far."""

    what: str
    share: float
    seconds_left: float | None = None
    best: str = ""


Tell = Callable[[Status], None]
Keep = Callable[[Record], None]


class Search:
    """A search over a record, which is kept after every step."""

    def __init__(
        self, machine: Machine, options: SearchOptions, record: Record, tell: Tell, keep: Keep
    ) -> None:
        self._machine, self._options = machine, options
        self._record, self._tell, self._keep = record, tell, keep
        self._share = 0.0

    def run(self) -> CostCurve:
        """Do every step that the record lacks; return the cost curve, as it was meanwhile."""
        self._say("measuring what evaluations cost", 0.0, self._ahead(_CURVE_S + _CUT_S))
        curve = self._machine.curve()
        self._record.discount = max(1.0, curve.seconds(1) / min(curve.reused))
        self._record.add(Contender(name, _NEEDS_NOTHING) for name in WITHOUT_FILE)
        self._keep(self._record)
        self._say("looking for drafters", 0.1, self._ahead(_CUT_S))
        found = self._machine.look()
        models = sum(drafter.method == "draft" for drafter in found)
        for number, drafter in enumerate(found):
            self._plan(drafter, 0.1 + 0.25 * number / len(found), models)
            models -= drafter.method == "draft"
        self._cut()
        self._train()
        self._compare()
        self._say("done", 1.0)
        return self._machine.curve_beside() or curve

    # -- what is compared --------------------------------------------------------------------------

    def _ahead(self, seconds: float) -> float:
        """Return about how long everything takes that comes after the next so many seconds."""
        trained = f"trained for {self._options.hours:g} hours" if self._options.hours else ""
        hours = 0.0 if trained in self._record.done else self._options.hours or 0.0
        return seconds + 3600.0 * hours + self._options.seconds

    def _plan(self, found: FoundDrafter, share: float, models: int) -> None:
        step = f"{_LOOK}: {found.path or found.method}"
        if step in self._record.done:
            return
        self._say(f"planning drafts of {found.name}", share, self._ahead(_CUT_S + _PLAN_S * models))
        try:
            plans = self._machine.plans(found)
        except SpecrunError as error:
            self._record.leave_out(found.name, str(error))
        else:
            self._record.add(Contender(plan, found.where) for plan in plans)
            if plans and found.method == "draft":
                self._record.add([Contender(auto_expression(plans[0]), found.where)])
        self._finish(step)

    def _cut(self) -> None:
        if _CUT in self._record.done:
            return
        what = "searching for layers to skip"
        self._say(what, 0.35, self._ahead(_CUT_S))
        try:
            cut = self._machine.cut()
        except SpecrunError as error:
            self._record.leave_out("a cut of the target's layers", str(error))
            if isinstance(error, MissingPackageError):
                self._keep(self._record)
                return  # not done: what is missing may be installed
        else:
            if cut.speed_up >= _GAIN_OF_CUT:
                self._record.add([Contender(cut.drafter, f"a cut that skips {cut.layers}")])
            else:
                what = f"the best cut, which skips {cut.layers}"
                why = f"it should give {cut.speed_up:.2f} times the speed of plain decoding"
                self._record.leave_out(what, why)
        self._finish(_CUT)

    def _train(self) -> None:
        hours = self._options.hours
        if hours is None or (step := f"trained for {hours:g} hours") in self._record.done:
            return
        self._say(f"training a head for {hours:g} hours", 0.5, self._ahead(0.0))
        try:
            drafters = self._machine.train(hours)
        except SpecrunError as error:
            self._record.leave_out("a trained head", str(error))
            self._keep(self._record)
            return  # not done: what is missing may be installed, or room made
        self._record.add(Contender(drafter, step) for drafter in drafters)
        self._finish(step)

    # -- the comparison ----------------------------------------------------------------------------

    def _compare(self) -> None:
        options = self._options
        started, first = self._machine.now(), self._sweeps_left(0)
        done, n_first = 0, max(1, len(first))
        for repetition in range(options.repetitions):
            left = self._sweeps_left(repetition)
            spent = self._machine.now() - started
            per_sweep = spent / done if done else 0.0
            late = spent + per_sweep * len(left) > options.seconds
            if repetition >= _LEAST_SWEEPS and late:
                return
            for number, (temperature, workload) in enumerate(left):
                # Two sweeps of each are made in any case: as long as that is known, it is told.
                sure = (_LEAST_SWEEPS - repetition) * n_first - number
                ahead = per_sweep * max(sure, len(left) - number)
                seconds = ahead if done else options.seconds
                share = 0.55 + 0.45 * done / max(done + len(left) - number, _LEAST_SWEEPS * n_first)
                self._sweep(temperature, workload, repetition, (share, seconds))
                done += 1
                per_sweep = (self._machine.now() - started) / done

    def _sweeps_left(self, repetition: int) -> list[tuple[float, str]]:
        """Return the settings whose sweep of a repetition is missing or lacks a contender."""
        options = self._options
        return [
            (temperature, workload)
            for temperature in options.temperatures
            for workload in options.workloads
            if self._missing(temperature, workload, repetition)
        ]

    def _missing(self, temperature: float, workload: str, repetition: int) -> bool:
        sweeps = {sweep.repetition: sweep for sweep in self._record.of(temperature, workload)}
        wanted = hopeful(self._record, temperature, self._options.workloads)
        return repetition not in sweeps or not set(wanted) <= set(sweeps[repetition].works)

    def _sweep(
        self, temperature: float, workload: str, repetition: int, progress: tuple[float, float]
    ) -> None:
        """Sweep, and keep what was measured; `progress` is the share done and the seconds left."""
        record, options = self._record, self._options
        drafters = hopeful(record, temperature, options.workloads)
        what = f"comparing {len(drafters)} drafters on {workload}, temperature {temperature:g}"
        self._say(what, *progress)
        found = self._machine.sweep(temperature, workload, [PLAIN, *drafters], repetition)
        for name, work in found.items():
            if isinstance(work, str):
                record.leave_out(name, work)
        works = {name: work for name, work in found.items() if isinstance(work, Work)}
        # Measured again, because there are more drafters now, it takes the old one's place.
        before = temperature, workload, repetition
        record.sweeps = [
            sweep
            for sweep in record.sweeps
            if (sweep.temperature, sweep.workload, sweep.repetition) != before
        ]
        record.sweeps.append(Sweep(*before, works))
        self._keep(record)

    # -- progress ----------------------------------------------------------------------------------

    def _finish(self, step: str) -> None:
        self._record.done.append(step)
        self._keep(self._record)

    def _say(self, what: str, share: float, seconds: float | None = None) -> None:
        self._share = max(self._share, share)
        self._tell(Status(what, self._share, seconds, self._best()))

    def _best(self) -> str:
        """Return the fastest drafter so far, over all settings, in words."""
        rows: list[Measured] = []
        for temperature in self._options.temperatures:
            for workload in self._options.workloads:
                rows += measured(self._record, temperature, workload)
        if not rows:
            return ""
        paying = (row for row in rows if row.pays)
        best = max(paying, key=lambda row: row.gain, default=None)
        if best is None:
            return "plain decoding, as nothing was faster yet"
        where = f"{best.workload}, temperature {best.temperature:g}"
        drafter = short_label(parse_expression(best.drafter))
        return f"{drafter} {best.gain:.2f} times plain ({where})"
