"""The record of a search for the fastest drafter: a second call goes on from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from specrun.bench.diagnosis.work import Work
from specrun.bindings.files import DAMAGE, Warn, count_in, number_in, text_in
from specrun.runtime.language import parse_expression

PLAIN = "none"


@dataclass(frozen=True, slots=True)
class Contender:
    """A drafter that is compared with plain decoding, and where it comes from."""

    drafter: str
    source: str


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What was not tried, and why."""

    what: str
    why: str


@dataclass(frozen=True, slots=True)
class Sweep:
    """One repetition of a comparison: what each drafter took for the prompts of a workload."""

    temperature: float
    workload: str
    repetition: int
    works: Mapping[str, Work]


@dataclass(slots=True)
class Record:
    """Everything that was found, in order; `done` names the steps that need not be done again.

    `basis` is what all of it hangs on (prompts, samplers, lengths): with another one nothing of it
    counts.
    """

    basis: str
    contenders: list[Contender] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    sweeps: list[Sweep] = field(default_factory=list)
    done: list[str] = field(default_factory=list)

    def add(self, contenders: Iterable[Contender]) -> None:
        """Add what is not there yet."""
        known = {contender.drafter for contender in self.contenders}
        self.contenders += [found for found in contenders if found.drafter not in known]

    def leave_out(self, what: str, why: str) -> None:
        """Note what was not tried, or could not be, and do not try it again."""
        self.left_out = [known for known in self.left_out if known.what != what]
        self.left_out.append(LeftOut(what, why))
        self.contenders = [known for known in self.contenders if known.drafter != what]

    def of(self, temperature: float, workload: str) -> list[Sweep]:
        """Return the sweeps of a setting, in order."""
        setting = temperature, workload
        return [sweep for sweep in self.sweeps if (sweep.temperature, sweep.workload) == setting]

    def to_dict(self) -> dict[str, Any]:
        """Return the record as a mapping, ready for JSON."""
        return asdict(self)

    @staticmethod
    def read(content: Mapping[str, Any], basis: str, warn: Warn = lambda _: None) -> Record:
        """Return a stored record, or an empty one where it is damaged or has another basis.

        `warn` is told of damage.
        """
        try:
            if content.get("basis") == basis:
                return Record(
                    basis,
                    [
                        Contender(*_texts(value, "drafter", "source"))
                        for value in content["contenders"]
                    ],
                    [LeftOut(*_texts(value, "what", "why")) for value in content["left_out"]],
                    [_sweep(value) for value in content["sweeps"]],
                    list(map(text_in, content["done"])),
                )
        except DAMAGE:
            warn("the record of an earlier search is damaged: everything is measured anew")
        return Record(basis)


def _texts(value: Mapping[str, Any], *names: str) -> list[str]:
    return [text_in(value[name]) for name in names]


def _sweep(value: Mapping[str, Any]) -> Sweep:
    works = {name: _work(work) for name, work in value["works"].items()}
    for name in works:
        parse_expression(name)
    if PLAIN not in works:
        raise ValueError("a sweep without plain decoding compares nothing")
    temperature, repetition = number_in(value["temperature"]), count_in(value["repetition"])
    return Sweep(temperature, text_in(value["workload"]), repetition, works)


def _work(value: Mapping[str, Any]) -> Work:
    work = Work(**value)
    for number in asdict(work).values():
        number_in(number)
    if not (work.tokens and work.rounds and work.seconds):
        raise ValueError("work without tokens cannot be compared")
    return work
