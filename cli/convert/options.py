"""Options of `specrun convert`: what is read, what a head drafts for, what is written, and how it
is checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from specrun.bindings.errors import OptionError
from specrun.cli.options.group import option, option_group
from specrun.cli.options.types import ExistingFile
from specrun.runtime.methods import head_kinds

_SOURCE, _HEAD, _RESULT = "Checkpoint", "Heads", "Result"

MODEL = "model"
"""The kind of what is no head."""

KINDS = (MODEL, *head_kinds())
"""The values of --kind."""


@dataclass(frozen=True, slots=True)
class SourceSettings:
    """How the checkpoint is read."""

    allow_pickle: bool
    pre: str | None


@dataclass(frozen=True, slots=True)
class HeadSettings:
    """What kind of thing the checkpoint is, None to recognise it, and the model that a head drafts
    for."""

    kind: str | None
    target: Path | None
    target_model_dir: Path | None

    @property
    def drafts_for(self) -> Path | None:
        """The file or folder of the target, None where none is named; raises OptionError where two
        are."""
        if self.target is not None and self.target_model_dir is not None:
            raise OptionError(
                "--target and --target-model-dir both name the target: give one of them"
            )
        return self.target or (
            None if self.target_model_dir is None else self.target_model_dir.expanduser()
        )


@dataclass(frozen=True, slots=True)
class TargetSettings:
    """What is written, and how it is checked; None leaves type and checks to what is converted."""

    output: Path | None
    outtype: str | None
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
        help=(
            "Open .bin and .pt weights where there are no safetensors, as tensors only: code in "
            "them does not run."
        ),
    ),
    option(
        "--pre",
        section=_SOURCE,
        metavar="NAME",
        show_default="recognised from tokenizer.json",
        help="llama.cpp's name of the way text is split before tokens are merged.",
    ),
)

head_options = option_group(
    "head",
    HeadSettings,
    option(
        "--kind",
        section=_HEAD,
        type=click.Choice(KINDS),
        default=None,
        show_default="recognised",
        help="What DIR holds; eagle is EAGLE-1, EAGLE-2 and HASS.",
    ),
    option(
        "--target",
        section=_HEAD,
        type=ExistingFile(),
        metavar="FILE",
        help="The GGUF file of the model that the heads draft for.",
    ),
    option(
        "--target-model-dir",
        section=_HEAD,
        type=click.Path(path_type=Path),
        metavar="DIR",
        help="Instead, that model's checkpoint: config.json and tokenizer are enough.",
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
        default=None,
        show_default="f16, heads q8_0",
        metavar="TYPE",
        help=(
            "f32, f16, bf16, auto (what the checkpoint has), or any quantization: q8_0, q4_k_m, ..."
        ),
    ),
    option("--force", section=_RESULT, is_flag=True, help="Overwrite the file if it is there."),
    option(
        "--dry-run", section=_RESULT, is_flag=True, help="Only print which tensor becomes which."
    ),
    option(
        "--verify/--no-verify",
        section=_RESULT,
        default=None,
        show_default="up to 300M parameters",
        help=(
            "Compare logits with transformers, where it is installed; the file appears only if "
            "they agree."
        ),
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
