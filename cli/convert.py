"""`specrun convert`: the checkpoint folder of a model or of drafting heads, to one GGUF file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specrun.bindings.errors import OptionError
from specrun.cli.options.group import Section, SectionedCommand, by_option, option_group
from specrun.cli.options.output import json_option, terminal_options
from specrun.cli.options.types import FILE, PATH
from specrun.cli.terminal.screen import (
    byte_progress,
    bytes_text,
    count_text,
    print_facts,
    print_table,
)
from specrun.cli.terminal.terminal import Terminal
from specrun.runtime.language import head_kinds

if TYPE_CHECKING:
    from specrun.convert.conversion import ConversionPlan, ConversionReport, LogitCheck


# == Options =======================================================================================


_SOURCE, _HEAD, _RESULT = map(Section, ("Checkpoint", "Heads", "Result"))

MODEL = "model"
"""The kind of checkpoints that are no heads."""

KINDS = (MODEL, *head_kinds())
"""The values of --kind."""


@dataclass(frozen=True, slots=True)
class ConversionSettings:
    """How a checkpoint is read, the target of its heads, and the file to write.

    None: `kind`, `outtype` and whether to `verify` follow from the checkpoint.
    """

    allow_pickle: bool = _SOURCE.setting(
        "--allow-pickle",
        "Open .bin and .pt weights if there are no safetensors. Only tensors are read; code in "
        "them does not run.",
        is_flag=True,
    )
    pre: str | None = _SOURCE.setting(
        "--pre NAME",
        "llama.cpp's name of the pre-tokenizer.",
        show_default="recognised from tokenizer.json",
    )
    kind: str | None = _HEAD.setting(
        "--kind",
        "The kind of checkpoint in DIR; eagle is EAGLE-1, EAGLE-2 and HASS.",
        click.Choice(KINDS),
        default=None,
        show_default="recognised",
    )
    target: Path | None = by_option(
        _HEAD.model("--target", "The GGUF file of the model that the heads draft for.")
    )
    target_model_dir: Path | None = _HEAD.setting(
        "--target-model-dir DIR",
        "The checkpoint of that model, instead of --target. config.json and tokenizer are enough.",
        PATH,
    )
    drafters: tuple[Path, ...] = _HEAD.setting(
        "--with DIR",
        "Also convert these heads, or this draft model, into the same folder (-o); repeatable.",
        PATH,
        multiple=True,
        dest="drafters",
    )
    output: Path | None = _RESULT.setting(
        "-o, --output, --outfile FILE|FOLDER",
        "The file to write, or the folder for it.",
        PATH,
        show_default="a name by the GGUF convention, here",
    )
    outtype: str | None = _RESULT.setting(
        "--outtype TYPE",
        "f32, f16, bf16, auto (the checkpoint's), or a type of specrun quantize: q8_0, q4_k_m, ...",
        default=None,
        show_default="f16, heads q8_0",
    )
    imatrix: Path | None = _RESULT.setting(
        "--imatrix FILE",
        "An importance matrix (specrun imatrix, llama-imatrix) for the quantized type.",
        FILE,
    )
    force: bool = _RESULT.setting("--force", "Overwrite the file if it is there.", is_flag=True)
    dry_run: bool = _RESULT.setting(
        "--dry-run", "Print the mapping of tensors and write nothing.", is_flag=True
    )
    verify: bool | None = _RESULT.setting(
        "--verify/--no-verify",
        "Compare logits with transformers, if it is installed. The file is written only if "
        "they agree.",
        default=None,
        show_default="up to 300M parameters",
    )
    threads: int = by_option(
        _RESULT.threads("The number of threads of the quantizer and the comparison.")
    )


# == Printing, and the command =====================================================================


def print_report(
    report: ConversionReport, terminal: Terminal, *, target: Mapping[str, Any] | None = None
) -> None:
    """Print the facts of the written file, and for a head those of its `target`."""
    if terminal.as_json:
        content = dataclasses.asdict(report) | ({} if target is None else {"target": dict(target)})
        terminal.answer_json(content, default=str, indent=2)
        return
    shrunk = 100 * report.n_bytes / report.source_bytes
    facts = {
        "file": str(report.output),
        "architecture": report.architecture,
        "file type": report.type_name,
        "tensors": f"{report.n_tensors:,} ({_counts(report.tensor_types)})",
        "parameters": f"{report.n_parameters:,} ({count_text(report.n_parameters)})",
        "vocabulary": f"{report.n_words:,}",
        "size before": f"{bytes_text(report.source_bytes)} ({_counts(report.source_types)})",
        "size after": f"{bytes_text(report.n_bytes)} ({shrunk:.1f} %)",
        "bits per weight": f"{report.bits_per_weight:.2f}",
        "source sha256": report.source_sha256,
        "names, shapes, types": "as planned, read again from the file",
    }
    if report.logits is not None:
        quantized = report.type_name.lower() not in ("f32", "f16", "bf16")
        facts["logits"] = _logits(report.logits, quantized=quantized)
    if target is not None:
        sizes = f"hidden states of {target['hidden_size']:,}, {target['n_words']:,} tokens"
        facts["target"] = f"{target['name']} ({target['architecture']}, {sizes})"
    print_facts(terminal, "converted", facts)


def _logits(found: LogitCheck, *, quantized: bool) -> str:
    if found.relative_error is None or found.same_top is None:
        return f"not compared: {found.reason}"
    before = "; before quantizing" if quantized else ""
    return (
        f"transformers' own, off by {found.relative_error:.1e} of the largest "
        f"({found.largest_allowed:g} allowed), "
        f"the same first token at {100 * found.same_top:.0f} % of {found.n_tokens} tokens{before}"
    )


def _counts(types: Any) -> str:  # noqa: ANN401 - a mapping of names to counts
    return ", ".join(f"{count:,} {name}" for name, count in types.items())


def print_plan(plan: ConversionPlan, output: Path, terminal: Terminal) -> None:
    """Print which tensor becomes which, and the file that would be written."""
    if terminal.as_json:
        terminal.answer_json(_plan_content(plan, output), indent=2)
        return
    rows = [
        (
            planned.name,
            " x ".join(map(str, planned.shape)),
            planned.type_name,
            bytes_text(planned.n_bytes),
            " + ".join(f"{source.name} ({source.type_name})" for source in planned.sources)
            or "computed",
        )
        for planned in plan.tensors
    ]
    print_table(terminal, "tensor map", ("tensor", "shape", "type", "size", "from"), rows)
    then = f", then quantized to {plan.file_type}" if plan.is_quantized else ""
    terminal.answer(
        f"{len(rows):,} tensors, {bytes_text(plan.n_bytes)}{then}; would write {output}\n"
    )


def _plan_content(plan: ConversionPlan, output: Path) -> dict[str, Any]:
    return {
        "output": str(output),
        "architecture": plan.architecture,
        "file_type": plan.file_type,
        "parameters": plan.n_parameters,
        "source_bytes": plan.source_bytes,
        "tensors": [
            {
                "name": planned.name,
                "shape": planned.shape,
                "type": planned.type_name,
                "bytes": planned.n_bytes,
                "sources": [
                    {
                        "name": source.name,
                        "type": source.type_name,
                        "shape": source.shape,
                        "file": source.path.name,
                    }
                    for source in planned.sources
                ],
            }
            for planned in plan.tensors
        ],
    }


_EPILOG = """\b
Examples:
  specrun convert Llama-3.2-1B                        writes Llama-3.2-1.2B-F16.gguf here
  specrun convert Llama-3.2-1B -o models --outtype q4_k_m
  specrun convert Llama-3.2-1B --dry-run              which tensor becomes which
  specrun convert old-checkpoint --allow-pickle       .bin and .pt weights
  specrun convert medusa-vicuna-7b --target vicuna-7b-Q4_K_M.gguf --allow-pickle
  specrun convert EAGLE-LLaMA3-8B --target-model-dir Llama-3-8B-Instruct -o heads
  specrun convert Qwen3-8B --outtype q4_k_m --with Qwen3-8B-DFlash -o qwen3   then: specrun chat -m qwen3

\b
DIR holds config.json, tokenizer.json and the weights as safetensors, in one file or in several with an
index. The file appears whole or not at all. A number too large for f16 ends the conversion with the
tensor's name, where others would write infinity: convert such a model to bf16. Heads are recognised, need
neither tokenizer nor the target's weights, and fit one target only: say which.
"""  # noqa: E501 - as it is shown


@click.command(cls=SectionedCommand, epilog=_EPILOG)
@click.argument(
    "folder",
    metavar="DIR",
    type=PATH,
    help="The folder of the checkpoint; with --with, also a GGUF file.",
)
@option_group("settings", ConversionSettings)
@terminal_options
@json_option()
def convert(folder: Path, settings: ConversionSettings, terminal: Terminal) -> None:
    """Convert a Hugging Face checkpoint to a GGUF file that computes the same numbers."""
    folder = folder.expanduser()
    output = None if settings.output is None else settings.output.expanduser()
    if settings.drafters:
        _convert_set(folder, output, settings, terminal)
        return
    plan, write, facts = _job(folder, settings)
    if settings.dry_run:
        planned = plan(folder)
        print_plan(planned, planned.output_in(output), terminal)
        return
    with byte_progress(terminal, "converting") as progress:
        report = write(
            folder, output, force=settings.force, n_threads=settings.threads, progress=progress
        )
    print_report(report, terminal, target=facts)


def _convert_set(
    folder: Path, output: Path | None, settings: ConversionSettings, terminal: Terminal
) -> None:
    """Convert a target and its drafters into one folder, with a file for running them."""
    from specrun.convert import plan_set

    if output is None:
        raise OptionError("--with makes several files: name the folder for them with -o FOLDER")
    given = settings.target, settings.target_model_dir, settings.kind
    if given != (None, None, None):
        raise OptionError(
            "--with drafts for the model in DIR, and kinds are recognised: leave out --target, "
            "--target-model-dir and --kind"
        )
    planned = plan_set(
        folder,
        [drafter.expanduser() for drafter in settings.drafters],
        output,
        outtype=settings.outtype or "f16",
        allow_pickle=settings.allow_pickle,
        pre=settings.pre,
        imatrix=settings.imatrix,
        verify=settings.verify,
    )
    if settings.dry_run and terminal.as_json:
        plans = [_plan_content(member.plan, member.place) for member in planned.members]
        terminal.answer_json({"files": plans}, indent=2)
        return
    if settings.dry_run:
        for member in planned.members:
            print_plan(member.plan, member.place, terminal)
        return
    reports, made = planned.convert(
        force=settings.force,
        n_threads=settings.threads,
        progress=partial(byte_progress, terminal, "converting"),
    )
    if terminal.as_json:
        content = {
            "set": str(made.folder),
            "drafter": made.drafter,
            "run": made.command,
            "files": [dataclasses.asdict(report) for report in reports],
        }
        terminal.answer_json(content, default=str, indent=2)
        return
    for report in reports:
        print_report(report, terminal)
    terminal.answer(f"run it: {made.command}\n")


def _job(
    folder: Path, settings: ConversionSettings
) -> tuple[Callable[..., ConversionPlan], Callable[..., ConversionReport], dict[str, Any] | None]:
    """Return the functions that plan and write the file, and for a head its target's facts."""
    from specrun.convert import (
        convert_checkpoint,
        convert_head,
        plan_conversion,
        plan_head,
        target_facts,
    )
    from specrun.convert.heads.head_conversion import detect_kind
    from specrun.convert.quantize import HEAD_TYPE

    kind, drafts_for = settings.kind, settings.target
    if settings.target_model_dir is not None:
        if drafts_for is not None:
            raise OptionError(
                "--target and --target-model-dir both name the target: give one of them"
            )
        drafts_for = settings.target_model_dir.expanduser()
    if kind is None and drafts_for is None:
        found = detect_kind(folder, allow_pickle=settings.allow_pickle)
        kind = MODEL if found is None else found.name
    options: dict[str, Any] = {"allow_pickle": settings.allow_pickle}
    if kind == MODEL:
        if drafts_for is not None:
            raise OptionError(
                f"a target is only for heads: leave it out to convert the model in {folder}"
            )
        options |= {"outtype": settings.outtype or "f16", "pre": settings.pre}
        options["imatrix"] = settings.imatrix
        write = partial(convert_checkpoint, verify=settings.verify, **options)
        return partial(plan_conversion, **options), write, None
    if drafts_for is None:
        raise OptionError(
            f"{folder} holds {kind} heads, which fit one model only: name it with --target "
            "FILE.gguf or --target-model-dir DIR (a model that lies beside its heads is converted "
            f"with --kind {MODEL})"
        )
    if settings.imatrix is not None:
        raise OptionError("there are no importance matrices for heads: leave out --imatrix")
    if settings.verify:
        raise OptionError("--verify compares the logits of whole models: leave it out for heads")
    facts = target_facts(drafts_for, pre=settings.pre)
    options |= {"outtype": settings.outtype or HEAD_TYPE.lower(), "target": facts, "kind": kind}
    return partial(plan_head, **options), partial(convert_head, **options), facts.summary()
