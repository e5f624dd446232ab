"""Proof: checks that a pair's text is the target's own, on the machine and with the options in use.

Tests show it of tiny models, this of the user's: the rule by enumeration, rows after trees and
of several conversations against those of chains, texts against plain decoding's, their
distribution, and answers after faults. Every check has a control: an error that it would have seen.
Without one it proves nothing and is left out.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specrun.bench.prove.cache import check_cache, check_conversations
from specrun.bench.prove.rules import check_rule
from specrun.bench.prove.setting import Check, Setting
from specrun.bench.prove.texts import check_faults, check_law, check_texts
from specrun.bench.report import Table
from specrun.bindings.errors import UnsupportedModelError
from specrun.runtime.engine.core import EngineCore
from specrun.runtime.laws import SamplingParams


@dataclass(frozen=True, slots=True)
class ProofOptions:
    """`seconds` are shared among the checks, which all do their least however long that takes.

    `params` are the settings of sampling by which the acceptance rule is enumerated.
    """

    seconds: float = 30.0
    seed: int = 0
    params: tuple[SamplingParams, ...] = (SamplingParams(),)


@dataclass(frozen=True, slots=True)
class Proof:
    """The checks that ran. `width` is that of every evaluation, None if it is free."""

    target: str
    drafter: str
    rule: str
    exact: bool
    width: int | None
    seed: int
    seconds: float
    checks: tuple[Check, ...]
    interrupted: bool = False

    @property
    def passed(self) -> bool:
        """Whether no check failed, and one was made, unless Ctrl-C came before."""
        statuses = {check.status for check in self.checks}
        return "failed" not in statuses and (self.interrupted or "passed" in statuses)


Step = Callable[[Setting], Check]


STEPS: tuple[tuple[str, Step], ...] = (
    ("rule", check_rule),
    ("cache", check_cache),
    ("conversations", check_conversations),
    ("same text", check_texts),
    ("distribution of texts", check_law),
    ("faults", check_faults),
)
"""In this order: the figures of the cache's check bound those of the later ones."""


def prove(
    opened: EngineCore,
    options: ProofOptions | None = None,
    *,
    progress: Callable[[str], None] = lambda _: None,
    steps: Sequence[tuple[str, Step]] = STEPS,
) -> Proof:
    """Check a runtime or an engine that is idle; Ctrl-C ends that with the results so far.

    An error in a check is its failure: a sound pair raises none.
    """
    options = options or ProofOptions()
    started = time.monotonic()
    setting = Setting(opened, options.seed, options.seconds, options.params)
    checks: list[Check] = []
    drafter, interrupted = opened.session.drafter.name, False
    try:
        for name, step in steps:
            progress(name)
            try:
                checks.append(step(setting))
            except UnsupportedModelError as error:  # recurrent targets that take no drafts at all
                checks.append(Check(name, "left out", note=str(error)))
            except Exception as error:  # any error is a finding of a proof
                what = f"{type(error).__name__}: {error}"
                checks.append(Check(name, "failed", note=what))
    except KeyboardInterrupt:
        interrupted = True
        done = len(checks)
        checks += [Check(name, "left out", note="interrupted") for name, _ in steps[done:]]
    return Proof(
        target=str(opened.model.path),
        drafter=drafter,
        rule=setting.rule.name,
        exact=setting.rule.exact,
        width=setting.width,
        seed=options.seed,
        seconds=time.monotonic() - started,
        checks=tuple(checks),
        interrupted=interrupted,
    )


def verdict(proof: Proof) -> tuple[str, str]:
    """Return two lines: the results of the checks, and their pair."""
    failed = [check for check in proof.checks if check.status == "failed"]
    passed = [check.name for check in proof.checks if check.status == "passed"]
    left = [check.name for check in proof.checks if check.status == "left out"]
    out = f"; left out: {', '.join(left)}" if left else ""
    checks = f"{len(passed)} of {len(passed) + len(failed)} checks"
    width = "free" if proof.width is None else f"{proof.width} tokens"
    exact = proof.rule if proof.exact else f"not exact: {proof.rule}"
    same = "Drafting did not change this model's text"
    if not proof.exact:
        same = f"Texts are as the rule {proof.rule} states"
    first = f"{same}: {checks} passed{out}."
    if failed:
        first = f"{checks} passed. Failed: {failed[0].name}: {failed[0].note}."
    elif not passed:
        first = f"Nothing was checked{out}."
    return first, (
        f"{proof.target} with {proof.drafter}; rule {exact}; shape {width}; "
        f"seed {proof.seed}; {proof.seconds:.0f} s."
    )


def proof_table(
    proofs: Sequence[Proof],
    words: Callable[[Proof], tuple[str, str]] = verdict,
    *,
    figures: bool = True,
) -> Table:
    """Return the table of `specrun prove`: the verdict, a row a check, and each check in words.

    Without `figures` a row has the result alone, and checks that passed have no words.
    """
    rows, notes, heading = [], [], list[str]()
    for proof in proofs:
        heading += words(proof)
        for check in proof.checks:
            row = {"check": check.name, "result": check.status}
            if figures:
                row["times"] = f"{check.times:,}" if check.times else "-"
                row["figure"], row["bound"] = _number(check.figure), _number(check.bound)
            rows.append(row)
            if figures or check.status != "passed":
                notes.append(_words(check))
    return dataclasses.replace(Table.of(rows, *notes), heading=tuple(heading))


def _words(check: Check) -> str:
    note = check.note
    if not note and check.status == "left out":
        note = "its control was not detected, so it proves nothing about this model"
    parts = [f"{check.name}, {check.status}: {note}" if note else check.name]
    if check.tested:
        parts.append(f"{check.times:,} {check.tested}")
        parts.append(f"figure and bound in {check.unit}")
        parts.append(f"false alarm: {check.false_alarm}")
        parts.append(f"control: {check.control}")
    return "; ".join(parts) + "."


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
