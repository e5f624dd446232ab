"""The report of `specrun accelerate`: a table for each temperature, the choices, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specrun.cli.accelerate.diagnosis import print_diagnosis
from specrun.cli.terminal.screen import duration_text, print_table
from specrun.cli.terminal.terminal import Terminal, one_line
from specrun.runtime.language import parse_expression, short_label
from specrun.runtime.planning import ANY

if TYPE_CHECKING:
    from specrun.bench.accelerate import AccelerateResult
    from specrun.bench.accelerate.record import Measured
    from specrun.bench.diagnosis.diagnosis import Diagnosis
    from specrun.runtime.planning import Choice

_LONGEST_REASON = 160
_MOST_TYPES = 4


def print_report(result: AccelerateResult, terminal: Terminal) -> None:
    """Print everything that a user may want to know, the choice last."""
    temperatures = list(dict.fromkeys(row.temperature for row in result.rows))
    for temperature in temperatures:
        _print_rows(
            [row for row in result.rows if row.temperature == temperature],
            result.sources,
            temperature,
            terminal,
        )
    for left in result.left_out:
        terminal.note(f"not compared: {_short(left.what)}: {one_line(left.why, _LONGEST_REASON)}")
    for diagnosis in _telling(result.diagnoses):
        print_diagnosis(diagnosis, terminal)
    _say_other_types(result, terminal)
    for temperature in temperatures:
        own = [choice for choice in result.choices if choice.temperature == temperature]
        # Where all kinds of texts have the same drafter, a line says so.
        told = own[-1:] if len({choice.drafter for choice in own}) == 1 else own
        for choice in told:
            terminal.answer(f"{_choice_line(choice)}\n")
    _say_what_follows(result, terminal)


def _say_other_types(result: AccelerateResult, terminal: Terminal) -> None:
    """Name the files of other weight types beside the target, where its curve is too steep."""
    from specrun.runtime.tuning import same_model

    kinds = {reason.kind for diagnosis in result.diagnoses for reason in diagnosis.reasons}
    others = same_model(result.target)
    if others and "curve" in kinds:
        names = ", ".join(path.name for path in others[:_MOST_TYPES])
        terminal.note(f"other weight types beside it: {names}; specrun accelerate tries them, too")


def _telling(diagnoses: Sequence[Diagnosis]) -> list[Diagnosis]:
    """Return the diagnoses that say something new: of another drafter, or with another end."""
    told: dict[tuple[str, bool], Diagnosis] = {}
    for diagnosis in diagnoses:
        told.setdefault((diagnosis.drafter, diagnosis.pays), diagnosis)
    return list(told.values())


def _print_rows(
    rows: list[Measured], sources: dict[str, str], temperature: float, terminal: Terminal
) -> None:
    workloads = list(dict.fromkeys(row.workload for row in rows))
    lines = []
    for drafter in dict.fromkeys(row.drafter for row in rows):
        own = {row.workload: row for row in rows if row.drafter == drafter}
        cells = [_speed(own.get(workload)) for workload in workloads]
        tokens = max(row.work.tokens_per_round for row in own.values())
        lines.append((_short(drafter), *cells, f"{tokens:.2f}", sources.get(drafter, "")))
    plain = {row.workload: row.plain.tokens_per_second for row in rows}
    speeds = [f"{plain[workload]:.1f} tok/s" for workload in workloads]
    head = ("drafter", *workloads, "tokens/round", "from")
    title = f"Times the speed of plain decoding, temperature {temperature:g}"
    print_table(terminal, title, head, [("plain decoding", *speeds, "1.00", ""), *lines])


def _speed(row: Measured | None) -> str:
    if row is None:
        return ""
    ratio = row.speed_up
    spread = f" ({ratio.low:.2f}-{ratio.high:.2f})" if row.repetitions > 1 else ""
    return f"{ratio.value:.2f}{spread}"


def _choice_line(choice: Choice) -> str:
    texts = "texts of all kinds" if choice.workload == ANY else choice.workload
    where = f"{texts}, temperature {choice.temperature:g}"
    if choice.drafter == "none":
        why = f": {choice.reason}" if choice.reason else ""
        return f"{where}: plain decoding, as nothing is faster{why}"
    return f"{where}: {_short(choice.drafter)}, {choice.speed_up:.2f} times plain decoding"


def _say_what_follows(result: AccelerateResult, terminal: Terminal) -> None:
    spent = duration_text(result.seconds)
    if result.interrupted:
        terminal.warn(f"interrupted after {spent}: what is known is kept, and another call goes on")
    terminal.note(f"kept in {result.profile} ({spent})")
    if any(choice.drafter != "none" for choice in result.choices):
        terminal.note(
            f"chat, generate and serve draft so for {result.target.name} from now on, where no "
            "drafter is named (--no-profile: without it)"
        )


def _short(drafter: str) -> str:
    """Return a drafter with files by their names; other texts as they are."""
    if "(" not in drafter or " " in drafter.split("(")[0]:
        return drafter
    return short_label(parse_expression(drafter))
