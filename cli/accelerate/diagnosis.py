"""A diagnosis on the terminal: expected against measured, where the time goes, what would help."""

from __future__ import annotations

import shutil
import textwrap
from typing import TYPE_CHECKING

from specrun.cli.terminal.screen import print_facts
from specrun.cli.terminal.terminal import Terminal
from specrun.runtime.language import parse_expression, short_label

if TYPE_CHECKING:
    from specrun.bench.diagnosis.diagnosis import Achievable, Diagnosis


def print_diagnosis(diagnosis: Diagnosis, terminal: Terminal) -> None:
    """Print the figures, and below them the reasons in words, what costs most first."""
    name = short_label(parse_expression(diagnosis.drafter))
    texts = f" on {diagnosis.workload}" if diagnosis.workload else ""
    title = f"Why: {name}{texts} at temperature {diagnosis.temperature:g}"
    print_facts(terminal, title, diagnosis_facts(diagnosis))
    for line in verdict_lines(diagnosis):
        for piece in _wrapped(line, terminal):
            terminal.answer(f"{piece}\n")


def _wrapped(line: str, terminal: Terminal) -> list[str]:
    """Return a line in pieces that fit the screen; whole where it goes elsewhere."""
    if not terminal.answers_on_screen:
        return [line]
    indent = " " * (len(line) - len(line.lstrip(" -")))
    width = shutil.get_terminal_size().columns
    return textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False)


def diagnosis_facts(diagnosis: Diagnosis) -> dict[str, str]:
    """Return the figures by name."""
    plain, drafted = diagnosis.plain_tokens_per_second, diagnosis.tokens_per_second
    curve = ", ".join(f"{times:.2f}" for _, times in diagnosis.curve)
    sizes = ", ".join(str(n) for n, _ in diagnosis.curve)
    facts = {
        "speed": (
            f"{diagnosis.speed_up:.2f} times plain decoding, {diagnosis.expected:.2f} expected "
            f"({plain:.1f} to {drafted:.1f} tokens/s)"
        ),
        "a round": (
            f"{diagnosis.tokens_per_round:.2f} tokens in {diagnosis.round_ms:.1f} ms; a plain "
            f"token {diagnosis.plain_ms:.1f} ms, {diagnosis.expected_plain_ms:.1f} expected"
        ),
        "of which": (
            f"target {diagnosis.target_ms:.1f} ms ({diagnosis.expected_target_ms:.1f} expected"
            f"{_rebuilt(diagnosis)}), drafter {diagnosis.drafter_ms:.1f}, "
            f"Python {diagnosis.python_ms:.1f}"
        ),
        "drafts": _drafts(diagnosis),
    }
    if curve:
        facts["cost curve"] = f"{sizes} tokens take {curve} times as long as one"
    return {**facts, "at best": _at_best(diagnosis.best)}


def _rebuilt(diagnosis: Diagnosis) -> str:
    share = round(100 * diagnosis.rebuilt_share)
    return f", with {share} % of its graphs built anew" if share else ""


def verdict_lines(diagnosis: Diagnosis) -> list[str]:
    """Return the verdict, the reasons, and what would help: a line each."""
    if diagnosis.pays:
        verdict = f"Drafting pays: {diagnosis.speed_up:.2f} times plain decoding."
    elif diagnosis.speed_up > 1.0 and not diagnosis.has_kept_drafts:
        noise = "no drafts were kept, so that more than 1 is the machine's noise"
        verdict = f"Drafting does not pay here ({noise})" + (":" if diagnosis.reasons else ".")
    elif diagnosis.reasons:
        verdict = "Drafting does not pay here:"
    else:
        verdict = "Drafting does not pay here, and no single thing stands in its way."
    lines = [verdict]
    if not diagnosis.curve_fits:
        took = f"a plain token took {diagnosis.plain_ms:.1f} ms"
        curve = f"and by the curve {diagnosis.expected_plain_ms:.1f}"
        busy = "the machine is busy, or was when that was measured (specrun tune -m measures again)"
        lines.insert(0, f"The cost curve does not fit: {took}, {curve}: {busy}.")
    if diagnosis.pays and diagnosis.reasons:
        lines.append("What keeps it from more:")
    for reason in diagnosis.reasons:
        lines.append(f"  - {reason.text} (without that {reason.without:.2f} times).")
        lines.append(f"    What would help: {reason.help}.")
    return lines


def _drafts(diagnosis: Diagnosis) -> str:
    if diagnosis.acceptance is None:
        return "none: it had nothing to say, or nothing that seemed to pay"
    rounds = f"in {100 * diagnosis.coverage:.0f} % of the rounds"
    nodes = f"{diagnosis.nodes_per_drafting_round:.1f} tokens each"
    return f"{rounds}, {nodes}, {100 * diagnosis.acceptance:.0f} % of the depths accepted"


def _at_best(best: Achievable) -> str:
    same = "plain decoding" if best.same_length == 0 else f"{best.same:.2f} times"
    length = f" (n={best.same_length})" if best.same_length else ""
    perfect = f"always right {best.perfect:.2f} (n={best.perfect_length})"
    needed = "no acceptance pays at this cost"
    if best.needed is not None:
        needed = f"from {100 * best.needed:.0f} % accepted on it pays"
    return f"as often right, for nothing: {same}{length}; {perfect}; {needed}"
