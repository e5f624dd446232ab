"""What `specrun convert` prints: the facts of a conversion, or the map of tensors that a dry run shows."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrun.cli.quantities import bytes_text, count_text
from specrun.cli.table import print_facts, print_table
from specrun.cli.terminal import Terminal

if TYPE_CHECKING:
    from specrun.convert.conversion import ConversionPlan, ConversionReport
    from specrun.convert.logit_check import LogitCheck
    from specrun.convert.tensor_map import MappedTensor

__all__ = ["print_plan", "print_report"]


def print_report(
    report: ConversionReport, terminal: Terminal, *, as_json: bool, target: Mapping[str, Any] | None = None
) -> None:
    """Print what was written, and the `target` it was written for, by name, where it is a head."""
    if as_json:
        content = dataclasses.asdict(report) | ({} if target is None else {"target": dict(target)})
        terminal.answer(json.dumps(content, default=str, indent=2) + "\n")
        return
    facts = _facts(report)
    if target is not None:
        sizes = f"hidden states of {target['hidden_size']:,}, {target['n_words']:,} words"
        facts["target"] = f"{target['name']} ({target['architecture']}, {sizes})"
    print_facts(terminal, "converted", facts)


def _facts(report: ConversionReport) -> dict[str, str]:
    shrunk = report.n_bytes / report.source_bytes
    facts = {
        "file": str(report.output),
        "architecture": report.architecture,
        "file type": report.type_name,
        "tensors": f"{report.n_tensors:,} ({_counts(report.tensor_types)})",
        "parameters": f"{report.n_parameters:,} ({count_text(report.n_parameters)})",
        "words": f"{report.n_words:,}",
        "size before": f"{bytes_text(report.source_bytes)} ({_counts(report.source_types)})",
        "size after": f"{bytes_text(report.n_bytes)} ({100 * shrunk:.1f} %)",
        "bits per weight": f"{report.bits_per_weight:.2f}",
        "source sha256": report.source_sha256,
        "names, shapes, types": "as planned, read again from the file",
    }
    if report.logits is not None:
        facts["logits"] = _logits(report.logits, quantized=report.type_name.lower() not in ("f32", "f16", "bf16"))
    return facts


def _logits(found: LogitCheck, *, quantized: bool) -> str:
    if found.relative_error is None or found.same_top is None:
        return f"not compared: {found.reason}"
    before = "; before quantizing" if quantized else ""
    return (
        f"transformers' own, off by {found.relative_error:.1e} of the largest ({found.largest_allowed:g} allowed), "
        f"the same first word at {100 * found.same_top:.0f} % of {found.n_tokens} tokens{before}"
    )


def _counts(types: Any) -> str:  # noqa: ANN401 - a mapping of names to counts
    return ", ".join(f"{count:,} {name}" for name, count in types.items())


def print_plan(plan: ConversionPlan, output: Path, terminal: Terminal, *, as_json: bool) -> None:
    """Print which tensor becomes which, and the file that would be written."""
    if as_json:
        content = {
            "output": str(output),
            "architecture": plan.architecture,
            "file_type": plan.file_type,
            "parameters": plan.n_parameters,
            "source_bytes": plan.source_bytes,
            "tensors": [_record(one) for one in plan.tensors],
        }
        terminal.answer(json.dumps(content, indent=2) + "\n")
        return
    rows = [
        (
            one.name,
            " x ".join(map(str, one.shape)),
            one.type_name,
            bytes_text(one.n_bytes),
            " + ".join(f"{source.name} ({source.type_name})" for source in one.sources) or "computed",
        )
        for one in plan.tensors
    ]
    print_table(terminal, "tensor map", ("tensor", "shape", "type", "size", "from"), rows)
    then = f", then quantized to {plan.file_type}" if plan.is_quantized else ""
    terminal.answer(f"{len(rows):,} tensors, {bytes_text(plan.n_bytes)}{then}; would write {output}\n")


def _record(one: MappedTensor) -> dict[str, Any]:
    sources = [
        {"name": source.name, "type": source.type_name, "shape": source.shape, "file": source.path.name}
        for source in one.sources
    ]
    return {"name": one.name, "shape": one.shape, "type": one.type_name, "bytes": one.n_bytes, "sources": sources}
