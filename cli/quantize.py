"""`specrun quantize`: writes a GGUF file, a model or heads, with quantized weights."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specrun.bindings.errors import OptionError
from specrun.bindings.gguf import read_header
from specrun.bindings.quantizer import COPY, FILE_TYPE_ALIASES, FILE_TYPES
from specrun.cli.options.group import MODEL, Section, SectionedCommand, offline_option
from specrun.cli.options.output import json_option, terminal_options
from specrun.cli.options.types import FILE, MODEL_FILE, TENSOR_TYPE, ModelName, located
from specrun.cli.terminal.screen import bytes_text, count_text, print_table, progress_line
from specrun.cli.terminal.terminal import Terminal

if TYPE_CHECKING:
    from specrun.convert.quantize import QuantizationReport


def type_table() -> str:
    """Return the file types with the bits a weight takes, in columns, for the help."""
    cells = [
        f"{name + ('*' if kind.needs_importance else ''):<10}{kind.bits_per_weight:>6.2f}"
        for name, kind in FILE_TYPES.items()
    ]
    rows = -(-len(cells) // 5)
    lines = ["   ".join(cells[row::rows]) for row in range(rows)]
    return "\n".join(f"  {line}" for line in lines)


_TYPES, _SPECIAL = Section("Types"), Section("Special cases")
_EPILOG = f"""\b
Types, with the bits a weight takes in a Llama of 8 billion parameters (*: needs --imatrix):
{type_table()}
  COPY copies tensors as they are. TYPE may be written in any case.

\b
Examples:
  specrun quantize model-F16.gguf Q4_K_M                 writes model-Q4_K_M.gguf
  specrun quantize model-F16.gguf small.gguf IQ2_M --imatrix model.imatrix.gguf
  specrun quantize model-F16.gguf Q4_K_M --tensor-type attn_v=Q8_0 --output-tensor-type Q6_K
  specrun quantize heads-F16.gguf                        heads (medusa, hydra, eagle): Q8_0
  specrun quantize hf:OWNER/REPO:F16 Q4_K_M              a model of the hub, written here
"""


@click.command(cls=SectionedCommand, epilog=_EPILOG, options_metavar="[OPTIONS]")
@click.argument(
    "arguments",
    nargs=-1,
    required=True,
    metavar="IN [OUT] TYPE",
    help="The model or heads, the file to write, and the type of its numbers, as listed below.",
)
@MODEL.option("--imatrix", "An importance matrix (specrun imatrix, llama-imatrix).", FILE)
@_TYPES.flag("--pure", "Use one type for all matrices instead of llama.cpp's mix.")
@_TYPES.option(
    "--tensor-type",
    "A type for tensors whose names match; may be repeated, the first match decides.",
    TENSOR_TYPE,
    multiple=True,
)
@_TYPES.option("--output-tensor-type TYPE", "The type of output.weight.")
@_TYPES.option("--token-embedding-type TYPE", "The type of the token embeddings.")
@_TYPES.flag("--leave-output-tensor", "Leave output.weight as it is.")
@_SPECIAL.flag("--allow-requantize", "Accept a quantized IN, although errors add up.")
@_SPECIAL.flag("--force", "Replace OUT if it exists.")
@_SPECIAL.threads("The number of threads.", most=1024)
@offline_option
@terminal_options
@json_option()
def quantize(arguments: tuple[str, ...], terminal: Terminal, **options: Any) -> None:  # noqa: ANN401
    """Write a GGUF file with smaller numbers.

    Works on models and on drafting heads. The new file appears whole or not at all; OUT, if it is
    left out, is IN with the type in its name, and lies here if IN is a name of `specrun models`
    or hf:OWNER/REPO.
    """
    from specrun.convert.quantize import HEAD_TYPE, is_head, quantize_model
    from specrun.convert.quantize.quantize_head import quantize_head

    if len(arguments) > 3:
        raise click.UsageError(f"{len(arguments)} names are too many: give IN [OUT] TYPE")
    named = MODEL_FILE.convert(arguments[0], None, None)
    source = located(named) if isinstance(named, ModelName) else named
    head = is_head(read_header(source))
    file_type, output = _type_and_output(arguments[1:], HEAD_TYPE if head else None)
    if output is None:  # here for a file that lies in a cache
        beside = Path(source.name) if isinstance(named, ModelName) else source
        output = default_output(beside, file_type)
    options["n_threads"] = options.pop("threads")
    options["tensor_types"] = options.pop("tensor_type")
    if head:
        if options.pop("imatrix") is not None:
            raise OptionError("there are no importance matrices for heads: leave out --imatrix")
        options.pop("pure")  # they always are
    started = time.monotonic()
    with progress_line(terminal, f"{output.name}: {file_type}") as progress:
        report = (quantize_head if head else quantize_model)(
            source, output, file_type, progress=progress, **options
        )
    _print_report(report, time.monotonic() - started, terminal)


def _type_and_output(rest: tuple[str, ...], default: str | None) -> tuple[str, Path | None]:
    """Return the file type and OUT of the arguments after IN."""
    from specrun.convert.quantize import known_file_type

    is_type = bool(rest) and rest[-1].upper() in {*FILE_TYPES, *FILE_TYPE_ALIASES, COPY}
    if is_type or len(rest) == 2:
        return known_file_type(rest[-1]), Path(rest[0]).expanduser() if len(rest) == 2 else None
    if default is not None:
        return default, Path(rest[0]).expanduser() if rest else None
    if rest and not rest[0].lower().endswith(".gguf"):
        known_file_type(rest[0])  # its error names the nearest type
    raise click.UsageError(f"TYPE is missing: one of {', '.join(FILE_TYPES)}")


def default_output(source: Path, file_type: str) -> Path:
    """Return `source` with its encoding replaced: model-F16.gguf becomes model-Q4_K_M.gguf.

    The encoding is the last part of the name, between - . or _, that is one; a name without gets it
    appended.
    """
    names = "|".join(sorted((*FILE_TYPES, *FILE_TYPE_ALIASES), key=len, reverse=True))
    stem = source.stem if source.suffix.lower() == ".gguf" else source.name
    found = list(re.finditer(rf"(?<=[-._])(?:{names})(?![A-Za-z0-9_])", stem, re.IGNORECASE))
    if not found:
        return source.with_name(f"{stem}-{file_type}.gguf")
    start, end = found[-1].span()
    written = file_type.lower() if stem[start:end].islower() else file_type
    return source.with_name(f"{stem[:start]}{written}{stem[end:]}.gguf")


def _print_report(report: QuantizationReport, seconds: float, terminal: Terminal) -> None:
    if terminal.as_json:
        types = [
            {
                "type": share.type_name,
                "tensors": share.n_tensors,
                "parameters": share.n_parameters,
                "bytes": share.n_bytes,
            }
            for share in report.shares
        ]
        names = ("file_type", "source_bytes", "n_bytes", "n_parameters", "bits_per_weight")
        facts = {"output": str(report.output), **{name: getattr(report, name) for name in names}}
        counts = {name: getattr(report, name) for name in ("n_substituted", "n_without_importance")}
        terminal.answer_json({**facts, "types": types, **counts, "seconds": seconds})
    else:
        rows = [
            (
                share.type_name,
                str(share.n_tensors),
                count_text(share.n_parameters),
                bytes_text(share.n_bytes),
                f"{8 * share.n_bytes / share.n_parameters:.2f}",
            )
            for share in report.shares
        ]
        tensors = str(sum(share.n_tensors for share in report.shares))
        weights, size = count_text(report.n_parameters), bytes_text(report.n_bytes)
        rows.append(("in all", tensors, weights, size, f"{report.bits_per_weight:.2f}"))
        head = ("type", "tensors", "weights", "size", "bits/weight")
        print_table(terminal, f"{report.output}: {report.file_type}", head, rows)
    terminal.note(
        f"{bytes_text(report.source_bytes)} became {bytes_text(report.n_bytes)} in {seconds:.1f} s",
        "green",
    )
    if report.n_substituted:
        terminal.warn(
            f"{report.n_substituted} matrices have rows that do not divide into the blocks of "
            f"{report.file_type}: they were stored in other types"
        )
    if report.n_without_importance:
        terminal.warn(
            f"{report.n_without_importance} matrices were quantized without importance: the file "
            "has none"
        )
