"""The record of a search for the fastest drafter, and the choice that it leads to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from specrun.bench.diagnosis.diagnosis import PAYS, Work
from specrun.bench.timing import Ratio, ratio_of
from specrun.bindings.files import DAMAGE, Warn
from specrun.runtime.language import parse_expression
from specrun.runtime.planning import ANY, Choice, Count, Number, decoded

# == The record: a second call goes on from it =====================================================


PLAIN = "none"


@dataclass(frozen=True, slots=True)
class Contender:
    """A drafter that is compared with plain decoding, and its source."""

    drafter: str
    source: str


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A drafter that was not tried, and why."""

    what: str
    why: str


@dataclass(frozen=True, slots=True)
class Sweep:
    """One repetition of a comparison: each drafter's time for the prompts of a workload.

    Raises ValueError or OptionError for works that cannot be compared.
    """

    temperature: Number
    workload: str
    repetition: Count
    works: Mapping[str, Work]

    def __post_init__(self) -> None:
        for name, work in self.works.items():
            parse_expression(name)
            if not (work.tokens and work.rounds and work.seconds):
                raise ValueError("work without tokens cannot be compared")
        if PLAIN not in self.works:
            raise ValueError("a sweep without plain decoding compares nothing")


@dataclass(slots=True)
class Record:
    """Everything that was found, in order; `done` names the steps that need not be done again.

    `basis` names its conditions (prompts, samplers, lengths): with another one nothing of it
    counts.
    """

    basis: str
    contenders: list[Contender] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    sweeps: list[Sweep] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    discount: Number = 1.0
    """How many times as long as the cheapest width an evaluation of a single token takes."""

    def add(self, contenders: Iterable[Contender]) -> None:
        """Add missing ones."""
        known = {contender.drafter for contender in self.contenders}
        self.contenders += [found for found in contenders if found.drafter not in known]

    def leave_out(self, what: str, why: str) -> None:
        """Note a drafter that was not tried, or could not be, and do not try it again."""
        self.take_in(what)
        self.left_out.append(LeftOut(what, why))
        self.contenders = [known for known in self.contenders if known.drafter != what]

    def take_in(self, what: str) -> None:
        """Forget why something was left out, for it is tried now."""
        self.left_out = [known for known in self.left_out if known.what != what]

    def of(self, temperature: float, workload: str) -> list[Sweep]:
        """Return the sweeps of a setting, in order."""
        setting = temperature, workload
        return [sweep for sweep in self.sweeps if (sweep.temperature, sweep.workload) == setting]

    def to_dict(self) -> dict[str, Any]:
        """Return the record as a mapping, ready for JSON."""
        return asdict(self)

    @staticmethod
    def read(content: Mapping[str, Any], basis: str, warn: Warn = lambda _: None) -> Record:
        """Return a stored record, or an empty one if it is damaged or has another basis.

        `warn` receives a sentence on damage.
        """
        if content.get("basis") == basis:
            try:
                for name in ("contenders", "left_out", "sweeps", "done"):
                    content[name]  # raises if it is missing: steps that are done need all of them
                return decoded(content, Record)
            except DAMAGE:
                warn("the record of an earlier search is damaged: everything is measured anew")
        return Record(basis)


# == The choice among drafters that were measured ==================================================
#
# A drafter is chosen for a temperature and a workload if it is measurably faster than plain
# decoding. Of drafters that are equally fast the one that needs less is taken: they are listed in
# that order. For texts of unknown kind it is the drafter with the best geometric mean over the
# workloads that loses nowhere.


LOSES = 0.95
"""The speed-up below which a drafter loses: 3 % may be lost, and 2 % are the machine's noise."""

HOPELESS, _AT_ONCE = 0.9, 0.5
"""The share of the best drafter's speed below which another is not measured again.

A repetition may have been disturbed by other programs: the best one counts, and after one alone
much less is needed.
"""

_EQUAL = 0.97
"""The share of the best gain from which drafters are alike: the first of them is simpler."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A drafter at a temperature and a workload, over all repetitions in which it was measured.

    `most` is the greatest speed-up that its tokens a round allow.
    """

    drafter: str
    temperature: float
    workload: str
    repetitions: int
    speed_up: Ratio
    work: Work
    plain: Work
    most: float

    @property
    def pays(self) -> bool:
        """Whether it is faster, in every repetition, and by its drafts: the rest is luck."""
        is_faster = self.speed_up.low > 1.0 and self.speed_up.value >= PAYS
        return is_faster and self.work.tokens_per_round >= PAYS

    @property
    def gain(self) -> float:
        """The speed-up that counts: at most as its tokens allow, and 1 for noise."""
        value = min(self.speed_up.value, self.most)
        return value if self.pays else min(1.0, value)


def measured(record: Record, temperature: float, workload: str) -> list[Measured]:
    """Return the measurements of each contender, in the contenders' order."""
    sweeps = record.of(temperature, workload)
    found = []
    for name in (contender.drafter for contender in record.contenders):
        own = [sweep for sweep in sweeps if name in sweep.works]
        if not own:
            continue
        works, plain = ([sweep.works[key] for sweep in own] for key in (name, PLAIN))
        speeds, plain_speeds = (
            [work.tokens_per_second for work in some] for some in (works, plain)
        )
        ratio = ratio_of(speeds, plain_speeds)
        work = Work.together(works)
        most = work.tokens_per_round * record.discount
        both = work, Work.together(plain)
        found.append(Measured(name, temperature, workload, len(own), ratio, *both, most))
    return found


def fastest(rows: Sequence[Measured]) -> Measured | None:
    """Return the first of the fastest, None if plain decoding is: drafting must pay."""
    paying = [row for row in rows if row.pays]
    best = max((row.gain for row in paying), default=0.0)
    return next((row for row in paying if row.gain >= _EQUAL * best), None)


def hopeful(record: Record, temperature: float, workloads: Sequence[str]) -> list[str]:
    """Return the contenders that are worth another repetition at a temperature, in order."""
    kept = set()
    for workload in workloads:
        rows = measured(record, temperature, workload)
        best = max((row.speed_up.value for row in rows), default=1.0)
        behind = {
            row.drafter
            for row in rows
            if row.speed_up.high < (HOPELESS if row.repetitions > 1 else _AT_ONCE) * best
        }
        kept |= {found.drafter for found in record.contenders if found.drafter not in behind}
    return [found.drafter for found in record.contenders if found.drafter in kept]


def choices(
    record: Record,
    temperatures: Sequence[float],
    workloads: Sequence[str],
    reasons: Mapping[tuple[float, str], str],
) -> list[Choice]:
    """Return a choice for each temperature, for each workload and for any; none if unknown.

    `reasons` are the causes, by temperature and workload, if nothing pays.
    """
    found = []
    for temperature in temperatures:
        rows = {workload: measured(record, temperature, workload) for workload in workloads}
        if not all(rows.values()):
            continue
        for workload, own in rows.items():
            best = fastest(own)
            if best is None:
                reason = reasons.get((temperature, workload), "")
                found.append(Choice(temperature, workload, PLAIN, 1.0, reason))
            else:
                found.append(_choice(temperature, workload, [best], best.gain))
        told = filter(None, (reasons.get((temperature, workload)) for workload in workloads))
        found.append(_for_any(record, temperature, list(rows.values()), next(told, "")))
    return found


def _for_any(
    record: Record, temperature: float, rows: Sequence[Sequence[Measured]], reason: str
) -> Choice:
    speeds = [{row.drafter: row.gain for row in own} for own in rows]
    paying = {row.drafter for own in rows for row in own if row.pays}
    means = {}
    for name in (contender.drafter for contender in record.contenders):
        own = [known.get(name, 0.0) for known in speeds]
        if name in paying and min(own) >= LOSES:
            means[name] = math.prod(own) ** (1.0 / len(own))
    found = []
    for name, mean in means.items():
        own_rows = [row for own in rows for row in own if row.drafter == name]
        choice = _choice(temperature, ANY, own_rows, mean)
        if mean >= PAYS and choice.low > 1.0:  # a range that spans 1 is no gain
            found.append(choice)
    best = max((choice.speed_up for choice in found), default=0.0)
    equal = (choice for choice in found if choice.speed_up >= _EQUAL * best)
    return next(equal, Choice(temperature, ANY, PLAIN, 1.0, reason))


def _choice(temperature: float, workload: str, rows: Sequence[Measured], speed_up: float) -> Choice:
    """Return the choice of a drafter; its range is the geometric mean of those of its rows."""
    low, high = (
        math.prod(values) ** (1.0 / len(rows))
        for values in (
            [min(row.speed_up.low, row.most) for row in rows],
            [min(row.speed_up.high, row.most) for row in rows],
        )
    )
    low, high = min(low, speed_up), max(high, speed_up)
    return Choice(temperature, workload, rows[0].drafter, speed_up, low=low, high=high)
