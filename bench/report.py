"""Results of measurements as tables for readers: columns, units, notes; Markdown, CSV, JSON."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specrun.bench.drafters.comparison import DrafterResult, TextComparison
from specrun.bench.timing import Spread, speed_verdict
from specrun.runtime.language import Expression, parse_expression

# == Tables with their notes, and Markdown, CSV and JSON made of them ==============================


@dataclass(frozen=True, slots=True)
class Table:
    """Named columns, rows of texts, and notes for their readers.

    `constants` are columns that had one value throughout (see `folded`); `heading` has lines that
    are read first.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    constants: tuple[tuple[str, str], ...] = ()
    heading: tuple[str, ...] = ()

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, str]], *notes: str) -> Table:
        """Return the table of rows that all have the same columns, by name."""
        records = list(rows)
        columns = tuple(records[0]) if records else ()
        return cls(columns, tuple(tuple(record.values()) for record in records), notes)

    def folded(self, names: Iterable[str]) -> Table:
        """Return the table without those of the named columns that are the same in every row."""
        wanted = set(names)
        gone: dict[int, str] = {}
        for index, name in enumerate(self.columns):
            values = {row[index] for row in self.rows}
            if name in wanted and len(values) == 1:
                gone[index] = values.pop()

        def kept(cells: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(cell for index, cell in enumerate(cells) if index not in gone)

        constants = tuple((self.columns[index], value) for index, value in gone.items())
        rows = tuple(map(kept, self.rows))
        return Table(kept(self.columns), rows, self.notes, constants, self.heading)


def to_markdown(table: Table) -> str:
    """Return a Markdown table, its columns aligned, followed by the notes."""
    cells = [[_escaped(cell) for cell in row] for row in (table.columns, *table.rows)]
    widths = [max(len(row[index]) for row in cells) for index in range(len(table.columns))]
    right = [_is_numeric(table, index) for index in range(len(table.columns))]
    lines = [_line(row, widths, right) for row in cells]
    marks = ["-" * (width - flag) + ":" * flag for width, flag in zip(widths, right, strict=True)]
    lines.insert(1, _line(marks, widths, right))
    if table.constants:
        lines.insert(0, ", ".join(f"{name} {value}" for name, value in table.constants) + "\n")
    heading = [*table.heading, ""] if table.heading else []
    return "\n".join([*heading, *lines, *(f"\n{note}" for note in table.notes)]) + "\n"


def to_csv(results: Sequence[Any]) -> str:
    """Return dataclasses as CSV; nested fields are columns such as `tokens_per_second_median`."""
    records = [_flat(dataclasses.asdict(result)) for result in results]
    names = _column_names(records)
    output = io.StringIO()
    writer = csv.DictWriter(output, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return output.getvalue()


def to_json(kind: str, machine: Mapping[str, Any], results: Sequence[Any]) -> str:
    """Return one JSON object: the measurement, the machine, and the results (dataclasses)."""
    records = [dataclasses.asdict(result) for result in results]
    content = {"bench": kind, "machine": dict(machine), "results": records}
    return json.dumps(content, indent=2) + "\n"


def _column_names(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return all names but those that are None in some results and nested fields in others."""
    names = list(dict.fromkeys(name for record in records for name in record))

    def is_nested(name: str) -> bool:
        empty = all(record.get(name) is None for record in records)
        return empty and any(column.startswith(f"{name}_") for column in names)

    return [name for name in names if not is_nested(name)]


def _flat(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{name}_"))
        elif isinstance(value, list | tuple):
            flat[f"{prefix}{name}"] = " ".join(f"{item:.6g}" for item in value)
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ")


def _is_numeric(table: Table, index: int) -> bool:
    filled = [row[index] for row in table.rows if row[index] != "-"]
    return bool(filled) and all(cell[:1].isdigit() for cell in filled)


def _line(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    padded = [
        cell.rjust(width) if flag else cell.ljust(width)
        for cell, width, flag in zip(cells, widths, right, strict=True)
    ]
    return f"| {' | '.join(padded)} |"


# == Tables of the measurements ====================================================================
#
# Next to the measured tokens a round is the figure that the literature reports for the method.


# Spec-Bench's leaderboard, RTX 3090, Vicuna-7B, F16, greedy: mean tokens a target evaluation over
# all six tasks.
_SPEC_BENCH = {
    "prompt-lookup": ("prompt lookup", 1.73),
    "rest": ("REST", 1.63),
    "draft": ("a 68M draft model", 2.28),
    "lookahead": ("lookahead", 1.64),
    "medusa": ("Medusa", 2.32),
    "hydra": ("Hydra", 3.26),
}

_MOST_ALPHAS = 8

_METRIC_NOTES = {
    "exact match": "exact match: the share of answers whose final number is the right one.",
    "F1": "F1: of the words of an answer and of its reference, in the mean over answers.",
    "pass@1": "pass@1: the share of answers whose code passes its tests, each answer alone.",
}

CONSTANT_COLUMNS = ("model", "size", "params", "backend", "ngl", "temp", "vocab", "ctx")
"""Columns that are often the same in every row, and then go above the table on a screen."""


def machine_facts() -> dict[str, Any]:
    """Return the facts that figures depend on: the processor, cores, versions, devices."""
    from importlib.metadata import version

    from specrun.bindings.machine.devices import devices
    from specrun.bindings.threads import available_cores

    return {
        "specrun": version("specrun"),
        "llama_cpp_python": version("llama-cpp-python"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": available_cores(),
        "devices": [f"{device.name}: {device.description}" for device in devices()],
    }


# -- drafters --------------------------------------------------------------------------------------


def drafters_table(results: Sequence[DrafterResult]) -> Table:
    """Return the table of `specrun bench drafters`."""
    rows = list(map(_drafter_row, results))
    if any(result.category for result in results):
        rows = [
            {"category": f"{result.category or 'all'} ({result.n_prompts})", **row}
            for row, result in zip(rows, results, strict=True)
        ]
    if any(result.score is not None for result in results):
        for row, result in zip(rows, results, strict=True):
            score = result.score
            row["score"] = "-" if score is None else f"{result.metric} {100 * score:.1f} %"
    if any(result.alpha is not None for result in results):
        for row, result in zip(rows, results, strict=True):
            row["alpha"] = "-" if result.alpha is None else f"{result.alpha:.3f}"
    table = Table.of(rows, *(_drafter_notes(results) if results else ()))
    return dataclasses.replace(table, heading=_drafter_verdicts(results))


def _drafter_verdicts(results: Sequence[DrafterResult]) -> tuple[str, ...]:
    """Return the speed of the fastest drafter at each temperature, and the changes of the text."""
    lines = []
    whole = [result for result in results if not result.category]
    temperatures = dict.fromkeys(result.temperature for result in whole)
    for temperature in temperatures:
        rows = [row for row in whole if row.temperature == temperature and row.speed_up]
        if not rows:
            continue
        best = max(rows, key=lambda row: row.speed_up.value if row.speed_up else 0.0)
        texts = f"answers at temperature {temperature:g}" if len(temperatures) > 1 else "answers"
        if best.speed_up is not None:
            lines.append(speed_verdict(best.label, texts, best.speed_up))
    compared = [result.text for result in whole if result.text is not None and result.exact]
    if compared:
        same = sum(text.n_same for text in compared)
        total = sum(text.n_prompts for text in compared)
        if same == total:
            lines.append(f"Drafting did not change this model's text: {same} of {total} answers.")
        else:
            why = "evaluations of other widths round differently (see below)"
            lines.append(f"{same} of {total} answers are the same text as without drafts: {why}.")
    return tuple(lines)


def _drafter_row(result: DrafterResult) -> dict[str, str]:
    target, speed_up, accepted = result.target, result.speed_up, result.acceptance_rate
    return {
        "model": target.model,
        "size": _size(target.n_bytes),
        "params": f"{target.n_params / 1e6:,.2f} M",
        "backend": target.backend,
        "ngl": "all" if target.n_gpu_layers < 0 else str(target.n_gpu_layers),
        "drafter": "none (plain)" if speed_up is None else result.label,
        "temp": f"{result.temperature:g}",
        "tok/s": extremes(result.tokens_per_second, 1),
        "speed-up": "-" if speed_up is None else f"{speed_up.value:.2f}x {speed_up.extent}",
        "accept %": "-" if accepted is None else f"{100 * accepted:.1f}",
        "tok/round": f"{result.mean_accepted_length:.2f}",
        "TTFT ms": f"{1e3 * result.time_to_first_token_s.median:,.1f}",
        "overhead us/round": f"{result.overhead_us_per_round.median:,.0f}",
        "text": _text(result.text),
    }


def _text(text: TextComparison | None) -> str:
    if text is None:
        return "-"
    if text.n_same == text.n_prompts:
        return "same"
    differing = text.n_prompts - text.n_same
    return f"{differing} of {text.n_prompts} differ, first after {text.first_difference} tokens"


def _drafter_notes(results: Sequence[DrafterResult]) -> list[str]:
    metrics = {result.metric for result in results} - {""}
    results = [result for result in results if not result.category]
    first = results[0]
    notes = [
        f"Prompts: {first.n_prompts} of {first.prompt_tokens:,.0f} tokens on average"
        f"{f' ({first.workload})' if first.workload else ''}, answered with up to "
        f"{first.max_tokens} tokens; interleaved repetitions: {first.repetitions}. "
        "tok/s: median (least to most); with sampling and verification, without the prompt. "
        "speed-up: ratio of the medians (least to most within one repetition)."
    ]
    if any(result.alpha is not None for result in results):
        notes.append(
            "alpha: the mean over positions of sum min(p, q), the chance that a draw from the "
            "drafter's distribution is accepted (Leviathan et al. 2023, corollary 3.6). "
            "It is counted, not timed."
        )
    notes += [text for metric, text in _METRIC_NOTES.items() if metric in metrics]
    # EAGLE's n-alpha: how acceptance falls the more of the draft's own tokens it builds on.
    chains = [result for result in results if result.is_chain and result.acceptance_given_prefix]
    if chains:
        notes.append(
            "n-alpha of chains (acceptance if the n drafts before were accepted), n = 0, 1, ...:"
            + "".join(map(_alphas, chains))
        )
    lossy = [result for result in results if not result.exact]
    if lossy:
        rules = ", ".join(dict.fromkeys(result.rule for result in lossy))
        notes.append(
            f"not exact: {rules}. Its text does not have the target's distribution, so "
            "its speed is that of other text." + "".join(map(_departure, lossy))
        )
    published = literature_note(result.drafter for result in results)
    if published:
        notes.append(published)
    padded = first.target.padded_parameters / 1e6
    if padded:
        notes.append(
            f"The target was padded: {padded:,.0f} M of its {first.target.n_params / 1e6:,.0f} M "
            "parameters have no effect. Padding scales the target's cost to that of a larger model "
            "without changing its outputs."
        )
    texts = [result.text for result in results if result.text is not None]
    if any(text.n_same < text.n_prompts for text in texts):
        notes.append(
            "Texts that differ at temperature 0: batches of different sizes round differently, so "
            "if two tokens are almost equally likely, the other one may win."
        )
    return [*notes, *(f"Advice: {result.advice}." for result in results if result.advice)]


def _departure(result: DrafterResult) -> str:
    """Return how far a lossy rule led from the target's distribution, as a line of a note."""
    if result.total_variation is None or result.changed_share is None:
        return ""
    where = f"\n- {result.label} at temperature {result.temperature:g}"
    changed = f"{result.changed_share:.1%} of tokens changed"
    return f"{where}: TV {result.total_variation:.3f} from the target's distribution, {changed}"


def _alphas(chain: DrafterResult) -> str:
    shares = [f"{share:.2f}" for share in chain.acceptance_given_prefix[:_MOST_ALPHAS]]
    return f"\n- {chain.label} at temperature {chain.temperature:g}: {' '.join(shares)}"


def literature_note(drafters: Iterable[str]) -> str | None:
    """Return the published mean accepted lengths of the drafters' methods; None if unknown."""
    names = dict.fromkeys(
        name for drafter in drafters for name in _names(parse_expression(drafter))
    )
    known = [_SPEC_BENCH[name] for name in names if name in _SPEC_BENCH]
    if not known:
        return None
    return (
        "tok/round in the literature (Spec-Bench, Vicuna-7B, temperature 0, other texts than "
        f"these): {', '.join(f'{method} {length:.2f}' for method, length in known)}."
    )


def _names(expression: Expression) -> list[str]:
    inner = (name for argument in expression.arguments for name in _names(argument))
    return [expression.atom, *inner]


def extremes(spread: Spread, digits: int, *, unit: float = 1.0) -> str:
    """Return the median, with the least and the most of several measurements."""
    median, low, high = (
        f"{value / unit:,.{digits}f}" for value in (spread.median, spread.low, spread.high)
    )
    return median if spread.n == 1 else f"{median} ({low}-{high})"


def _size(n_bytes: int) -> str:
    gib = n_bytes / 2**30
    return f"{gib:.2f} GiB" if gib >= 1 else f"{n_bytes / 2**20:.2f} MiB"
