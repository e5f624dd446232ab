"""`specrun cut`: a self-draft of some of a model's layers, or a model padded to cost more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from specrun.cli.options.group import OUTPUT, Section, SectionedCommand
from specrun.cli.options.output import json_option, terminal_options
from specrun.cli.options.types import MODEL_FILE, PARAMETERS, PATH
from specrun.cli.terminal.screen import bytes_text, count_text, progress_bar
from specrun.cli.terminal.terminal import Terminal

_EPILOG = """\b
Examples:
  specrun cut target.gguf exit.gguf --layers 0-11          early exit: the first twelve layers
  specrun cut target.gguf skip.gguf --skip-layers 4,6,9-12
  specrun chat -m target.gguf --drafter "draft(skip.gguf, n=4)"
  specrun cut small.gguf slow.gguf --pad-to 400M           costs as much as 400M parameters

\b
The layers of a model are numbered from 0. Weights are copied as they are, whatever their type. A
self-draft takes the memory of the layers it keeps, and of their cache, a second time. specrun tune
--layer-skip searches for layers to skip. Models whose layers would mean something else under other
numbers are refused.
"""
_CUT = Section("Cut")


@click.command(cls=SectionedCommand, epilog=_EPILOG)
@click.argument("source", metavar="IN", type=MODEL_FILE, help="The model, a GGUF file.")
@click.argument("output", metavar="OUT", type=PATH, help="The file to write.")
@_CUT.option("--layers LIST", "The layers to keep, such as 0-11 or 0-3,8,10-.")
@_CUT.option("--skip-layers LIST", "The layers to leave out, such as 4,6,9-12.")
@_CUT.option(
    "--pad-to N",
    "Widen the feed-forward layers to N parameters (400M, 1B) instead, with zeros: for benchmarks.",
    PARAMETERS,
)
@OUTPUT.flag("--force", "Overwrite OUT.")
@json_option("Print the result as one JSON object.")
@terminal_options
def cut(
    source: Path,
    output: Path,
    layers: str | None,
    skip_layers: str | None,
    pad_to: int | None,
    force: bool,
    terminal: Terminal,
) -> None:
    """Write a model with some of its layers only, as a drafter for the whole one."""
    from specrun.convert import cut_layers, pad_ffn
    from specrun.convert.cut import CutReport, PadReport, range_text

    given = [choice is not None for choice in (layers, skip_layers, pad_to)]
    if sum(given) != 1:
        problem = "exclude each other" if any(given) else "are missing"
        raise click.UsageError(f"--layers, --skip-layers and --pad-to {problem}: give one of them")
    with progress_bar(terminal, f"reading {source.name}") as bar:

        def progress(done: int, total: int) -> None:
            bar(f"writing {output.name}", done / max(1, total))

        report: CutReport | PadReport
        if pad_to is None:
            report = cut_layers(
                source, output, layers=layers, skip=skip_layers, force=force, progress=progress
            )
        else:
            report = pad_ffn(source, output, pad_to, force=force, progress=progress)
    facts: dict[str, Any] = {
        "source": str(source),
        "output": str(report.output),
        "parameters": report.n_parameters,
        "bytes": report.n_bytes,
    }
    if isinstance(report, CutReport):
        facts |= {"layers": list(report.layers), "source_layers": report.source_layers}
        what = f"layers {range_text(report.layers)} of {report.source_layers}"
    else:
        facts |= {"padded_parameters": report.added_parameters, "feed_forward_width": report.width}
        what = f"feed-forward width {report.source_width} to {report.width}"
    if terminal.as_json:
        terminal.answer_json(facts)
    else:
        size = f"{count_text(report.n_parameters)} parameters, {bytes_text(report.n_bytes)}"
        terminal.note(f"wrote {report.output}: {what}, {size}")
