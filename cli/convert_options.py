"""Options of `specrun convert`: what is read, what is written, and how it is checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from specrun.cli.option_group import option, option_group

__all__ = ["SourceSettings", "TargetSettings", "source_options", "target_options"]

_SOURCE, _RESULT = "Checkpoint", "Result"


@dataclass(frozen=True, slots=True)
class SourceSettings:
    """How the checkpoint is read."""

    allow_pickle: bool
    pre: str | None


@dataclass(frozen=True, slots=True)
class TargetSettings:
    """What is written, and how it is checked; `verify` None leaves that to the model's size."""

    output: Path | None
    outtype: str
    force: bool
    dry_run: bool
    verify: bool | None
    threads: int


source_options = option_group(
    "source",
    SourceSettings,
    option(
        "--allow-pickle",
        section=_SOURCE,
        is_flag=True,
        help="Open .bin and .pt weights where there are no safetensors, as tensors only: code in them does not run.",
    ),
    option(
        "--pre",
        section=_SOURCE,
        metavar="NAME",
        show_default="recognised from tokenizer.json",
        help="llama.cpp's name of the way text is split before words are merged.",
    ),
)

target_options = option_group(
    "target",
    TargetSettings,
    option(
        "-o",
        "--output",
        "--outfile",
        section=_RESULT,
        type=click.Path(path_type=Path),
        metavar="FILE|FOLDER",
        show_default="a name by the GGUF convention, here",
        help="The file to write, or the folder for it.",
    ),
    option(
        "--outtype",
        section=_RESULT,
        default="f16",
        show_default=True,
        metavar="TYPE",
        help="f32, f16, bf16, auto (what the checkpoint has), or any quantization: q8_0, q4_k_m, ...",
    ),
    option("--force", section=_RESULT, is_flag=True, help="Overwrite the file if it is there."),
    option("--dry-run", section=_RESULT, is_flag=True, help="Only print which tensor becomes which."),
    option(
        "--verify/--no-verify",
        section=_RESULT,
        default=None,
        show_default="up to 300M parameters",
        help="Compare logits with transformers, where it is installed; the file appears only if they agree.",
    ),
    option(
        "-t",
        "--threads",
        section=_RESULT,
        type=click.IntRange(0, 512),
        metavar="N",
        default=0,
        show_default="one a core",
        help="Threads of the quantizer and of the comparison.",
    ),
)
