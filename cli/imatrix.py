"""`specrun imatrix`: an importance matrix for quantizing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specrun.bindings.errors import OptionError
from specrun.cli.options.group import SectionedCommand, option
from specrun.cli.options.output import terminal_options
from specrun.cli.options.types import ExistingFile, LayerCountType
from specrun.cli.terminal.paths import read_text
from specrun.cli.terminal.progress import ProgressLine
from specrun.cli.terminal.table import print_facts
from specrun.cli.terminal.terminal import Terminal

if TYPE_CHECKING:
    from specrun.convert.quantize import ImportanceOptions, ImportanceReport

_TEXT, _FILE, _EVALUATION = "Text", "Matrix", "Context and devices"
_COUNT = click.IntRange(0, 2**31 - 1)
_POSITIVE = click.IntRange(1, 2**31 - 1)
_EPILOG = """\b
Examples:
  specrun imatrix -m model-F16.gguf -f text.txt -o model.imatrix.gguf
  specrun imatrix -m model-F16.gguf -f text.txt -o model.imatrix.gguf --resume
  specrun imatrix --in-file a.gguf --in-file b.dat -o both.gguf       add matrices up
  specrun quantize model-F16.gguf IQ3_XXS --imatrix model.imatrix.gguf

\b
Options are llama-imatrix's, and so is the file: either program reads what the other wrote. Ctrl-C keeps
the chunks that are done; --resume goes on behind them and ends with the same numbers.
"""  # noqa: E501 - as it is shown


@click.command(cls=SectionedCommand, epilog=_EPILOG)
@option("-m", "--model", section="Model", type=ExistingFile(), help="The model: best F16 or F32.")
@option(
    "-f",
    "--file",
    section=_TEXT,
    type=ExistingFile(),
    help="The text to read; one that is like its use.",
)
@option(
    "-c",
    "--ctx-size",
    section=_TEXT,
    type=click.IntRange(16, 2**31 - 1),
    default=512,
    show_default=True,
    metavar="N",
    help="Tokens of a chunk.",
)
@option(
    "--chunk",
    "--from-chunk",
    section=_TEXT,
    type=_COUNT,
    default=0,
    metavar="N",
    help="The first chunk to read.",
)
@option(
    "--chunks",
    section=_TEXT,
    type=click.IntRange(-1),
    default=-1,
    metavar="N",
    help="The most chunks; -1: all.",
)
@option(
    "--parse-special", section=_TEXT, is_flag=True, help="Read the names of special tokens as such."
)
@option(
    "-o",
    "--output",
    section=_FILE,
    type=click.Path(path_type=Path),
    required=True,
    metavar="FILE",
    help="The matrix.",
)
@option(
    "--in-file",
    section=_FILE,
    type=ExistingFile(),
    multiple=True,
    help="A matrix to add to (GGUF or .dat); repeatable.",
)
@option("--resume", section=_FILE, is_flag=True, help="Go on where the file of -o ends.")
@option("--force", section=_FILE, is_flag=True, help="Replace the file of -o.")
@option("--process-output", section=_FILE, is_flag=True, help="Include the output matrix.")
@option(
    "-ofreq",
    "--output-frequency",
    section=_FILE,
    type=_POSITIVE,
    default=10,
    show_default=True,
    metavar="N",
    help="Save every N chunks.",
)
@option(
    "--save-frequency",
    section=_FILE,
    type=_COUNT,
    default=0,
    show_default="none",
    metavar="N",
    help="Keep a copy every N chunks, as FILE.at_CHUNKS.",
)
@option(
    "-b",
    "--batch-size",
    section=_EVALUATION,
    type=click.IntRange(16, 2**31 - 1),
    default=512,
    show_default=True,
    metavar="N",
    help="The most tokens of one evaluation.",
)
@option(
    "-t",
    "--threads",
    section=_EVALUATION,
    type=click.IntRange(-1, 512),
    default=-1,
    show_default="one a core",
    metavar="N",
    help="Threads.",
)
@option(
    "-ngl",
    "--gpu-layers",
    "--n-gpu-layers",
    section=_EVALUATION,
    type=LayerCountType(),
    default=0,
    show_default=True,
    help="Layers on the GPU.",
)
@terminal_options
@option("--json", "as_json", section="Output", is_flag=True, help="Print one JSON object.")
def imatrix(
    model: Path | None,
    file: Path | None,
    output: Path,
    in_file: tuple[Path, ...],
    resume: bool,
    force: bool,
    terminal: Terminal,
    as_json: bool,
    **settings: Any,  # noqa: ANN401 - as click passes them
) -> None:
    """Measure which inputs of each weight matrix are large on a text.

    Quantizing with the matrix (--imatrix) spares those; the smallest types need one.
    """
    from specrun.convert.quantize import measure_importance, merge_importance

    if resume and in_file:
        raise OptionError(
            "--resume and --in-file exclude each other: the file of -o already has those matrices"
        )
    if file is None:
        report = merge_importance(in_file, output, chunk_size=settings["ctx_size"], force=force)
    elif model is None:
        raise click.UsageError("the model is missing: -m MODEL")
    else:
        options = _options(settings)
        progress = ProgressLine(terminal, f"{output.name}: chunks of {options.n_ctx} tokens")
        try:
            report = measure_importance(
                model,
                read_text(file),
                output,
                options,
                dataset=file.name,
                in_files=in_file,
                resume=resume,
                force=force,
                progress=progress,
            )
        finally:
            progress.close()
    _show(report, terminal, as_json=as_json)


def _options(settings: dict[str, Any]) -> ImportanceOptions:
    from specrun.convert.quantize import ImportanceOptions

    layers = settings["gpu_layers"]
    return ImportanceOptions(
        n_ctx=settings["ctx_size"],
        n_batch=settings["batch_size"],
        n_threads=max(0, settings["threads"]),
        n_gpu_layers=layers if isinstance(layers, int) else -1,
        first_chunk=settings["chunk"],
        chunks=settings["chunks"],
        process_output=settings["process_output"],
        parse_special=settings["parse_special"],
        output_frequency=settings["output_frequency"],
        save_frequency=settings["save_frequency"],
    )


def _show(report: ImportanceReport, terminal: Terminal, *, as_json: bool) -> None:
    facts = {
        "output": str(report.output),
        "entries": report.n_entries,
        "chunks": report.chunk_count,
        "chunks_now": report.chunks,
        "tokens_now": report.tokens,
    }
    if as_json:
        terminal.answer(json.dumps(facts) + "\n")
    else:
        print_facts(
            terminal,
            "importance matrix",
            {name.replace("_", " "): str(value) for name, value in facts.items()},
        )
    if report.n_partial:
        terminal.warn(
            f"{report.n_partial} matrices have experts that no token was sent to: read a longer "
            "text"
        )
