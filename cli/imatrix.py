"""`specrun imatrix`: measures an importance matrix, by which quantizing spares large inputs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specrun.bindings.errors import OptionError
from specrun.cli.options.group import EVALUATION, MODEL, Section, SectionedCommand
from specrun.cli.options.model import trust_option
from specrun.cli.options.output import json_option, terminal_options
from specrun.cli.options.types import FILE, LAYER_COUNT, MAX_COUNT, PATH
from specrun.cli.terminal.screen import print_facts, progress_line
from specrun.cli.terminal.terminal import Terminal, read_text

if TYPE_CHECKING:
    from specrun.convert.quantize import ImportanceReport

_TEXT, _FILE = Section("Text"), Section("Matrix")
_COUNT = click.IntRange(0, MAX_COUNT)
_EPILOG = """\b
Examples:
  specrun imatrix -m model-F16.gguf -f text.txt -o model.imatrix.gguf
  specrun imatrix -m model-F16.gguf -f text.txt -o model.imatrix.gguf --resume
  specrun imatrix --in-file a.gguf --in-file b.dat -o both.gguf       add matrices up
  specrun quantize model-F16.gguf IQ3_XXS --imatrix model.imatrix.gguf

\b
The options and the file are those of llama-imatrix: each program reads the other's files. Ctrl-C keeps
the finished chunks; --resume continues after them and ends with the same numbers.
"""  # noqa: E501 - as it is shown


@click.command(cls=SectionedCommand, epilog=_EPILOG)
@MODEL.model("-m, --model", "The model, preferably F16 or F32.")
@_TEXT.option("-f, --file", "The text to read. It should be like the texts in later use.", FILE)
@_TEXT.option(
    "-c, --ctx-size N",
    "The number of tokens in a chunk.",
    click.IntRange(16, MAX_COUNT),
    default=512,
)
@_TEXT.option(
    "--chunk, --from-chunk N", "The first chunk to read.", _COUNT, default=0, show_default=None
)
@_TEXT.option(
    "--chunks N",
    "The most chunks to read; -1: all.",
    click.IntRange(-1),
    default=-1,
    show_default=None,
)
@_TEXT.flag("--parse-special", "Read the names of special tokens as such.")
@_FILE.option("-o, --output FILE", "The file of the matrix.", PATH, required=True)
@_FILE.option("--in-file", "A matrix to add to (GGUF or .dat); repeatable.", FILE, multiple=True)
@_FILE.flag("--resume", "Continue from the end of the file of -o.")
@_FILE.flag("--force", "Replace the file of -o.")
@_FILE.flag("--process-output", "Include the output matrix.")
@_FILE.option(
    "-ofreq, --output-frequency N", "Save every N chunks.", click.IntRange(1, MAX_COUNT), default=10
)
@_FILE.option(
    "--save-frequency N",
    "Keep a copy every N chunks, as FILE.at_CHUNKS.",
    _COUNT,
    default=0,
    show_default="none",
)
@EVALUATION.option(
    "-b, --batch-size N",
    "The most tokens in one evaluation.",
    click.IntRange(16, MAX_COUNT),
    default=512,
)
@EVALUATION.option(
    "-t, --threads N",
    "The number of threads.",
    click.IntRange(-1, 512),
    default=-1,
    show_default="one a core",
)
@EVALUATION.option(
    "-ngl, --gpu-layers, --n-gpu-layers", "The number of layers on the GPU.", LAYER_COUNT, default=0
)
@trust_option
@terminal_options
@json_option()
def imatrix(
    model: Path | None,
    file: Path | None,
    output: Path,
    in_file: tuple[Path, ...],
    resume: bool,
    force: bool,
    terminal: Terminal,
    **settings: Any,  # noqa: ANN401 - as click passes them
) -> None:
    """Measure which inputs of each weight matrix are large on a text.

    Quantizing with the matrix (--imatrix) spares those; the smallest types need one.
    """
    from specrun.convert.quantize import ImportanceOptions, measure_importance, merge_importance

    if resume and in_file:
        raise OptionError(
            "--resume and --in-file exclude each other: the file of -o already has those matrices"
        )
    if file is None:
        report = merge_importance(in_file, output, chunk_size=settings["ctx_size"], force=force)
    elif model is None:
        raise click.UsageError("the model is missing: -m MODEL")
    else:
        layers = settings["gpu_layers"]
        options = ImportanceOptions(
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
        what = f"{output.name}: chunks of {options.n_ctx} tokens"
        with progress_line(terminal, what) as progress:
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
    _show(report, terminal)


def _show(report: ImportanceReport, terminal: Terminal) -> None:
    facts = {
        "output": str(report.output),
        "entries": report.n_entries,
        "chunks": report.chunk_count,
        "chunks_now": report.chunks,
        "tokens_now": report.tokens,
    }
    if terminal.as_json:
        terminal.answer_json(facts)
    else:
        texts = {name.replace("_", " "): str(value) for name, value in facts.items()}
        print_facts(terminal, "importance matrix", texts)
    if report.n_partial:
        terminal.warn(
            f"{report.n_partial} matrices have experts that no token was sent to: read a longer "
            "text"
        )
