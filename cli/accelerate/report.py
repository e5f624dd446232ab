"""The output of `specrun accelerate` and `specrun why`: comparisons, diagnoses and the choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specrun.bench.timing import speed_verdict
from specrun.cli.terminal.screen import duration_text, print_facts, print_table
from specrun.cli.terminal.terminal import Terminal, one_line
from specrun.runtime.language import parse_expression, short_label
from specrun.runtime.planning import ANY, EDITED

if TYPE_CHECKING:
    from specrun.bench.accelerate import AccelerateResult
    from specrun.bench.accelerate.record import Measured
    from specrun.bench.diagnosis.diagnosis import Achievable, Diagnosis
    from specrun.bench.diagnosis.experts import ExpertReads
    from specrun.runtime.planning import Choice


# == A diagnosis: expected against measured, where the time goes, possible remedies ================


def print_diagnosis(diagnosis: Diagnosis, terminal: Terminal) -> None:
    """Print the verdict and its reasons, the largest cost first; with -v, all figures."""
    for line in verdict_lines(diagnosis):
        terminal.answer_line(line)
    if terminal.verbosity:
        name = short_label(parse_expression(diagnosis.drafter))
        texts = f" on {diagnosis.workload}" if diagnosis.workload else ""
        title = f"Figures: {name}{texts} at temperature {diagnosis.temperature:g}"
        print_facts(terminal, title, diagnosis_facts(diagnosis))


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
    if diagnosis.experts is not None:
        facts["experts"] = _experts(diagnosis.experts)
    return {**facts, "at best": _at_best(diagnosis.best)}


def _experts(found: ExpertReads) -> str:
    counted = "counted" if found.evaluations else "by chance"
    return (
        f"a round of {found.width} tokens reads {found.read:.1f} of {found.n_experts} in a layer "
        f"({counted}; {found.by_chance:.1f} by chance), a token {found.n_used}: "
        f"{100 * found.share:.0f} % of all weights, a token {100 * found.plain_share:.0f} %"
    )


def _rebuilt(diagnosis: Diagnosis) -> str:
    share = round(100 * diagnosis.rebuilt_share)
    return f", with {share} % of its graphs built anew" if share else ""


def verdict_lines(diagnosis: Diagnosis) -> list[str]:
    """Return the verdict, the reasons and the remedies, a line each."""
    name = short_label(parse_expression(diagnosis.drafter))
    texts = "answers"
    if diagnosis.workload:
        texts = f"{texts_of(diagnosis.workload)} at temperature {diagnosis.temperature:g}"
    if diagnosis.speed_up > 1.0 and not diagnosis.has_kept_drafts:
        noise = "no drafts were kept, so that a speed-up above 1 is the machine's noise"
        verdict = f"Drafting with {name} does not make {texts} faster: {noise}."
    else:
        verdict = speed_verdict(name, texts, diagnosis.ratio)
    lines = [verdict]
    if not diagnosis.curve_fits:
        took = f"a plain token took {diagnosis.plain_ms:.1f} ms"
        curve = f"and by the curve {diagnosis.expected_plain_ms:.1f}"
        busy = "the machine is busy, or was when that was measured (specrun tune -m measures again)"
        lines.insert(0, f"The cost curve does not fit: {took}, {curve}: {busy}.")
    if diagnosis.reasons:
        lines.append("Causes that keep the gain small:" if diagnosis.pays else "Why:")
    elif not diagnosis.pays:
        lines.append("No single cause was found.")
    for reason in diagnosis.reasons:
        lines.append(f"  - {reason.text} (without that {reason.without:.2f} times).")
        lines.append(f"    What would help: {reason.help}.")
    return lines


def _drafts(diagnosis: Diagnosis) -> str:
    if diagnosis.acceptance is None:
        return "none: nothing was found to draft, or nothing that seemed to pay"
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


# == The report of a search ========================================================================


_LONGEST_REASON = 160
_MOST_TYPES = 4


def print_report(result: AccelerateResult, terminal: Terminal) -> None:
    """Print the verdict, everything that led to it, and the consequences."""
    for line in verdict_of(result):
        terminal.answer_line(line)
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
        # If all kinds of texts have the same drafter, there is one line for all.
        told = own[-1:] if len({choice.drafter for choice in own}) == 1 else own
        for choice in told:
            terminal.answer_line(_choice_line(choice))
    _say_what_follows(result, terminal)


def verdict_of(result: AccelerateResult) -> list[str]:
    """Return the outcome in a sentence for each temperature."""
    if not result.choices:
        return ["Not enough was compared to choose a drafter: earlier choices stay."]
    lines = []
    several = len({choice.temperature for choice in result.choices}) > 1
    for choice in result.choices:
        if choice.workload != ANY:
            continue
        at = f" at temperature {choice.temperature:g}" if several else ""
        own = [each for each in result.choices if each.temperature == choice.temperature]
        best = choice if choice.drafter != "none" else max(own, key=lambda each: each.speed_up)
        texts = texts_of(best.workload)
        if best.drafter == "none":
            lines.append(f"Nothing that was tried makes answers{at} faster: plain decoding stays.")
        else:
            speed = f"about {best.speed_up:.1f} times as fast{best.extent}"
            lines.append(f"Drafting with {_short(best.drafter)} makes {texts}{at} {speed}.")
    return lines


def texts_of(workload: str) -> str:
    """Return the texts of a workload as a sentence names them."""
    if workload == ANY:
        return "answers"
    return "edits of texts" if workload == EDITED else f"answers to {workload}"


def _say_other_types(result: AccelerateResult, terminal: Terminal) -> None:
    """Name the files of other weight types beside the target, if its curve is too steep."""
    from specrun.runtime.tuning import same_model

    kinds = {reason.kind for diagnosis in result.diagnoses for reason in diagnosis.reasons}
    others = same_model(result.target)
    if others and "curve" in kinds:
        names = ", ".join(path.name for path in others[:_MOST_TYPES])
        terminal.note(f"other weight types beside it: {names}; specrun accelerate tries them, too")


def _telling(diagnoses: Sequence[Diagnosis]) -> list[Diagnosis]:
    """Return the diagnoses with something new: of another drafter, or with another end."""
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
    speed = f"{choice.speed_up:.2f} times plain decoding{choice.extent}"
    return f"{where}: {_short(choice.drafter)}, {speed}"


def _say_what_follows(result: AccelerateResult, terminal: Terminal) -> None:
    spent = duration_text(result.seconds)
    if result.interrupted:
        terminal.warn(f"interrupted after {spent}: results are kept, and another call continues")
    elif not result.complete:
        terminal.warn(
            "the time was over before everything was compared twice: another call continues, or "
            "give --seconds more"
        )
    terminal.note(f"kept in {result.profile} ({spent})")
    if any(choice.drafter != "none" for choice in result.choices):
        terminal.note(
            f"chat, generate and serve use this for {result.target.name} from now on, if no "
            "drafter is named (--no-profile leaves it out)"
        )


def _short(drafter: str) -> str:
    """Return a drafter with files by their names; other texts as they are."""
    if "(" not in drafter or " " in drafter.split("(")[0]:
        return drafter
    return short_label(parse_expression(drafter))
