"""`specrun convert`: a Hugging Face checkpoint folder, of a model or of drafting heads, to one GGUF file."""

from __future__ import annotations

from pathlib import Path

import click

from specrun.bindings.errors import OptionError
from specrun.cli.byte_progress import byte_progress
from specrun.cli.conversion_output import print_plan, print_report
from specrun.cli.convert_options import (
    MODEL,
    HeadSettings,
    SourceSettings,
    TargetSettings,
    head_options,
    source_options,
    target_options,
)
from specrun.cli.option_group import SectionedCommand, option
from specrun.cli.output_options import terminal_options
from specrun.cli.terminal import Terminal

__all__ = ["convert"]

_EPILOG = """\b
Examples:
  specrun convert Llama-3.2-1B                        writes Llama-3.2-1.2B-F16.gguf here
  specrun convert Llama-3.2-1B -o models --outtype q4_k_m
  specrun convert Llama-3.2-1B --dry-run              which tensor becomes which
  specrun convert old-checkpoint --allow-pickle       .bin and .pt weights
  specrun convert medusa-vicuna-7b --target vicuna-7b-Q4_K_M.gguf --allow-pickle
  specrun convert EAGLE-LLaMA3-8B --target-model-dir Llama-3-8B-Instruct -o heads

\b
DIR holds config.json, tokenizer.json and the weights as safetensors, in one file or in several with an
index. The file appears whole or not at all. A number too large for f16 ends the conversion with the
tensor's name, where others would write infinity: convert such a model to bf16. Heads are recognised, need
neither tokenizer nor the target's weights, and fit one target only: say which.
"""


@click.command(cls=SectionedCommand, epilog=_EPILOG)
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@source_options
@head_options
@target_options
@terminal_options
@option("--json", "as_json", section="Output", is_flag=True, help="Print one JSON object.")
def convert(
    folder: Path,
    source: SourceSettings,
    head: HeadSettings,
    target: TargetSettings,
    terminal: Terminal,
    as_json: bool,
) -> None:
    """Convert a Hugging Face checkpoint to a GGUF file that computes the same numbers."""
    from specrun.convert.heads.detect import detect_kind

    folder = folder.expanduser()
    kind = head.kind
    if kind is None and head.drafts_for is None:
        found = detect_kind(folder, allow_pickle=source.allow_pickle)
        kind = MODEL if found is None else found.name
    if kind == MODEL:
        _convert_model(folder, source, head, target, terminal, as_json=as_json)
    else:
        _convert_head(folder, kind, source, head, target, terminal, as_json=as_json)


def _convert_model(
    folder: Path,
    source: SourceSettings,
    head: HeadSettings,
    target: TargetSettings,
    terminal: Terminal,
    *,
    as_json: bool,
) -> None:
    from specrun.convert import convert_checkpoint, plan_conversion

    if head.drafts_for is not None:
        raise OptionError(f"a target is what heads draft for: leave it out to convert the model in {folder}")
    outtype = target.outtype or "f16"
    output = None if target.output is None else target.output.expanduser()
    if target.dry_run:
        plan = plan_conversion(folder, outtype=outtype, allow_pickle=source.allow_pickle, pre=source.pre)
        print_plan(plan, plan.output_in(output), terminal, as_json=as_json)
        return
    with byte_progress(terminal, "converting") as progress:
        report = convert_checkpoint(
            folder,
            output,
            outtype=outtype,
            force=target.force,
            allow_pickle=source.allow_pickle,
            pre=source.pre,
            verify=target.verify,
            n_threads=target.threads,
            progress=progress,
        )
    print_report(report, terminal, as_json=as_json)


def _convert_head(
    folder: Path,
    kind: str | None,
    source: SourceSettings,
    head: HeadSettings,
    target: TargetSettings,
    terminal: Terminal,
    *,
    as_json: bool,
) -> None:
    from specrun.convert import convert_head, plan_head, target_facts
    from specrun.convert.quantize_head import HEAD_TYPE

    drafts_for = head.drafts_for
    if drafts_for is None:
        raise OptionError(
            f"{folder} holds {kind} heads, which fit one model only: name it with --target FILE.gguf or "
            f"--target-model-dir DIR (a model that lies beside its heads is converted with --kind {MODEL})"
        )
    if target.verify:
        raise OptionError("--verify compares the logits of whole models: leave it out for heads")
    facts = target_facts(drafts_for, pre=source.pre)
    outtype = target.outtype or HEAD_TYPE.lower()
    output = None if target.output is None else target.output.expanduser()
    if target.dry_run:
        plan = plan_head(folder, target=facts, kind=kind, outtype=outtype, allow_pickle=source.allow_pickle)
        print_plan(plan, plan.output_in(output), terminal, as_json=as_json)
        return
    with byte_progress(terminal, "converting") as progress:
        report = convert_head(
            folder,
            output,
            target=facts,
            kind=kind,
            outtype=outtype,
            force=target.force,
            allow_pickle=source.allow_pickle,
            n_threads=target.threads,
            progress=progress,
        )
    print_report(report, terminal, as_json=as_json, target=facts.summary())
