"""The search for the fastest drafter: the order and the time of trials, and their results.

First the cost curve, then found drafters (heads, NextN blocks, smaller models), then cuts of the
target's own layers and, with hours, a trained head. All with an expected gain are then compared
with plain decoding on prompts that nothing was fitted to: in sweeps, which answer every prompt of a
workload with every drafter once. Drafters that fall behind are dropped from later sweeps.

All steps share one time, of which comparing takes the rest. No sweep begins that
would end too late. `ThisMachine` measures, so that the search itself depends on no clock of its
own: the same measurements give the same choice.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specrun.bench.accelerate.candidates import FoundDrafter
from specrun.bench.accelerate.record import (
    PLAIN,
    Contender,
    Record,
    Sweep,
    hopeful,
    measured,
)
from specrun.bench.accelerate.target import AccelerateOptions
from specrun.bench.accelerate.this_machine import ThisMachine
from specrun.bench.diagnosis.diagnosis import Work
from specrun.bench.timing import Budget
from specrun.bindings.errors import MissingPackageError, SpecrunError
from specrun.runtime.drafters.combinators import auto_expression
from specrun.runtime.language import parse_expression, short_label
from specrun.runtime.planning import CostCurve

WITHOUT_FILE = ("prompt-lookup", "lookahead", "auto")
LEAST_SWEEPS = 2
_NEEDS_NOTHING = "needs no file"
_GAIN_OF_CUT = 1.05  # predicted, from which a cut is worth comparing
_LOOK, _CUT = "drafters found", "cut"
# Shares of the time: of a curve, of a model's plan, of all plans, of cuts.
_CURVE, _PLAN, _PLANS, _CUTS = 0.1, 0.12, 0.3, 0.15


@dataclass(frozen=True, slots=True)
class Status:
    """The current step, the share of the time that is over, the seconds left, the best drafter."""

    what: str
    share: float
    seconds_left: float
    best: str = ""


Tell = Callable[[Status], None]
Keep = Callable[[], object]


class Search:
    """A search over a record, which is kept after every step."""

    def __init__(
        self,
        machine: ThisMachine,
        options: AccelerateOptions,
        workloads: Sequence[str],
        record: Record,
        tell: Tell,
        keep: Keep,
    ) -> None:
        self._machine, self._options, self._workloads = machine, options, workloads
        self._record, self._tell, self._keep = record, tell, keep
        self._settings = list(itertools.product(options.temperatures, workloads))
        hours = options.hours or 0.0
        ahead = 0.0 if _trained(hours) in record.done else 3600.0 * hours
        self._budget = Budget(options.seconds, machine.now, ahead)
        self._took: dict[tuple[float, str], float] = {}  # seconds of a sweep, by each drafter

    def run(self) -> CostCurve:
        """Do every step that the record lacks; return the cost curve, as it was meanwhile."""
        self._say("measuring the cost of evaluations")
        curve = self._machine.curve(_CURVE * self._options.seconds)
        self._record.discount = max(1.0, curve.seconds(1) / min(curve.reused))
        self._record.add(Contender(name, _NEEDS_NOTHING) for name in WITHOUT_FILE)
        self._keep()
        self._say("looking for drafters")
        found = self._machine.look()
        began = self._budget.left
        for drafter in found:
            self._plan(drafter, began - self._budget.left)
        self._cut()
        self._train()
        self._compare()
        self._tell(Status("done", 1.0, 0.0, self._best()))
        return self._machine.curve_beside() or curve

    # -- comparisons -------------------------------------------------------------------------------

    def _plan(self, found: FoundDrafter, spent: float) -> None:
        """Plan drafts of a file, if not too much of the time was `spent` on others."""
        step, seconds = f"{_LOOK}: {found.path or found.method}", self._options.seconds
        if step in self._record.done:
            return
        if spent > _PLANS * seconds:
            why = f"{seconds:g} seconds leave no time for it: give --seconds more"
            self._record.leave_out(found.name, why)
            return  # not done: another call goes on with it
        self._say(f"planning drafts of {found.name}")
        try:
            plans = self._machine.plans(found, _PLAN * seconds)
        except SpecrunError as error:
            self._record.leave_out(found.name, str(error))
        else:
            self._record.take_in(found.name)
            self._record.add(Contender(plan, found.where) for plan in plans)
            if plans and found.method == "draft":
                self._record.add([Contender(auto_expression(plans[0]), found.where)])
        self._finish(step)

    def _cut(self) -> None:
        if _CUT in self._record.done:
            return
        self._say("searching for layers to skip")
        try:
            cut = self._machine.cut(_CUTS * self._options.seconds)
        except SpecrunError as error:
            self._record.leave_out("a cut of the target's layers", str(error))
            if isinstance(error, MissingPackageError):
                self._keep()
                return  # not done: missing packages may be installed
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
        if hours is None or (step := _trained(hours)) in self._record.done:
            return
        self._say(f"training a head for {hours:g} hours")
        began = self._machine.now()
        try:
            drafters = self._machine.train(hours)
        except SpecrunError as error:
            self._record.leave_out("a trained head", str(error))
            self._keep()
            return  # not done: missing packages may be installed, or room made
        finally:
            self._budget.take_ahead(self._machine.now() - began)
        self._record.add(Contender(drafter, step) for drafter in drafters)
        self._finish(step)

    # -- the comparison ----------------------------------------------------------------------------

    def _compare(self) -> None:
        """Sweep every setting as often as there is time for; once a single one in any case."""
        for repetition in range(self._options.repetitions):
            missing = [each for each in self._settings if self._missing(*each, repetition)]
            for temperature, workload in missing:
                expected = self._expected(temperature, workload)
                if expected is not None and not self._budget.has(expected):
                    return
                began, drafters = self._machine.now(), self._hopeful(temperature)
                self._sweep(temperature, workload, repetition, drafters)
                each = (self._machine.now() - began) / (1 + len(drafters))
                self._took[temperature, workload] = each

    def _expected(self, temperature: float, workload: str) -> float | None:
        """Return about how long a sweep takes, None if none was made yet."""
        if not self._took:
            return None
        like = [took for (_, known), took in self._took.items() if known == workload]
        mean = sum(like or self._took.values()) / len(like or self._took)
        return self._took.get((temperature, workload), mean) * (1 + len(self._hopeful(temperature)))

    def _work_left(self) -> float | None:
        """Return about how long all sweeps take that are left, None if no sweep was made yet."""
        total = 0.0
        for setting in self._settings:
            expected = self._expected(*setting)
            if expected is None:
                return None
            made = len(self._record.of(*setting))
            total += expected * max(0, self._options.repetitions - made)
        return total

    def _hopeful(self, temperature: float) -> list[str]:
        return hopeful(self._record, temperature, self._workloads)

    def _missing(self, temperature: float, workload: str, repetition: int) -> bool:
        """Return whether the sweep of a repetition is missing or lacks a contender."""
        sweeps = {sweep.repetition: sweep for sweep in self._record.of(temperature, workload)}
        wanted = self._hopeful(temperature)
        return repetition not in sweeps or not set(wanted) <= set(sweeps[repetition].works)

    def _sweep(
        self, temperature: float, workload: str, repetition: int, drafters: Sequence[str]
    ) -> None:
        """Sweep, and keep the measurements."""
        record = self._record
        what = f"comparing {len(drafters)} drafters on {workload}, temperature {temperature:g}"
        self._say(what, self._work_left())
        found = self._machine.sweep(
            temperature, workload, [PLAIN, *drafters], repetition, self._budget.left
        )
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
        self._keep()

    # -- progress ----------------------------------------------------------------------------------

    def _finish(self, step: str) -> None:
        self._record.done.append(step)
        self._keep()

    def _say(self, what: str, work_left: float | None = None) -> None:
        self._tell(Status(what, *self._budget.progress(work_left), self._best()))

    def _best(self) -> str:
        """Return the fastest drafter so far, over all settings, in words."""
        rows = [row for setting in self._settings for row in measured(self._record, *setting)]
        if not rows:
            return ""
        paying = (row for row in rows if row.pays)
        best = max(paying, key=lambda row: row.gain, default=None)
        if best is None:
            return "plain decoding, as nothing was faster yet"
        where = f"{best.workload}, temperature {best.temperature:g}"
        drafter = short_label(parse_expression(best.drafter))
        return f"{drafter} {best.gain:.2f} times plain ({where})"


def _trained(hours: float) -> str:
    """Return the step that training a head is in a record."""
    return f"trained for {hours:g} hours"
