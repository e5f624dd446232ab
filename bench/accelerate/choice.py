"""The choice among drafters that were measured: by temperature and workload, plain in doubt.

A drafter is chosen where it is measurably faster than plain decoding. Of drafters that are equally
fast the one that needs less is taken: they are listed in that order. For texts of which nobody
knows what they are, it is the drafter with the best geometric mean over the workloads that loses
nowhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specrun.bench.accelerate.record import PLAIN, Record
from specrun.bench.diagnosis.diagnosis import PAYS
from specrun.bench.diagnosis.work import Work
from specrun.bench.timing import Ratio, ratio_of
from specrun.runtime.planning import ANY, Choice

LOSES = 0.97
"""The speed-up below which a drafter costs more than may be lost."""

HOPELESS, _AT_ONCE = 0.9, 0.5
"""The share of the best drafter's speed below which another is not measured again.

A repetition may have been disturbed by other programs: the best one counts, and after one alone
much less is needed.
"""

_EQUAL = 0.99


@dataclass(frozen=True, slots=True)
class Measured:
    """A drafter at a temperature and a workload, over all repetitions in which it was measured."""

    drafter: str
    temperature: float
    workload: str
    repetitions: int
    speed_up: Ratio
    work: Work
    plain: Work

    @property
    def pays(self) -> bool:
        """Whether it is faster, and by its drafts: what drafted nothing was only lucky."""
        return self.speed_up.value >= PAYS and self.work.tokens_per_round >= PAYS


def measured(record: Record, temperature: float, workload: str) -> list[Measured]:
    """Return what was measured of each contender, in the contenders' order."""
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
        both = Work.together(works), Work.together(plain)
        found.append(Measured(name, temperature, workload, len(own), ratio, *both))
    return found


def fastest(rows: Sequence[Measured]) -> Measured | None:
    """Return the first of the fastest, None where plain decoding is: drafting must pay."""
    paying = [row for row in rows if row.pays]
    best = max((row.speed_up.value for row in paying), default=0.0)
    return next((row for row in paying if row.speed_up.value >= _EQUAL * best), None)


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
    """Return a choice for each temperature, for each workload and for any; none where unknown.

    `reasons` say for a temperature and a workload why nothing pays, where nothing does.
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
                found.append(Choice(temperature, workload, best.drafter, best.speed_up.value))
        told = filter(None, (reasons.get((temperature, workload)) for workload in workloads))
        found.append(_for_any(record, temperature, list(rows.values()), next(told, "")))
    return found


def _for_any(
    record: Record, temperature: float, rows: Sequence[Sequence[Measured]], reason: str
) -> Choice:
    speeds = [{row.drafter: row.speed_up.value for row in own} for own in rows]
    paying = {row.drafter for own in rows for row in own if row.pays}
    means = {}
    for name in (contender.drafter for contender in record.contenders):
        own = [known.get(name, 0.0) for known in speeds]
        if name in paying and min(own) >= LOSES:
            means[name] = math.prod(own) ** (1.0 / len(own))
    best = max(means.values(), default=0.0)
    if best < PAYS:
        return Choice(temperature, ANY, PLAIN, 1.0, reason)
    name = next(name for name, mean in means.items() if mean >= _EQUAL * best)
    return Choice(temperature, ANY, name, means[name])
