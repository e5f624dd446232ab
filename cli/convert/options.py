"""Options of `specrun convert`: the checkpoint, a head's target, the result and its check."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from specrun.bindings.errors import OptionError
from specrun.cli.options.group import Section, option_group
from specrun.cli.options.types import PATH
from specrun.runtime.language import head_kinds

_SOURCE, _HEAD, _RESULT = map(Section, ("Checkpoint", "Heads", "Result"))

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
    """The kind of the checkpoint, None to recognise it, and the model that a head drafts for."""

    kind: str | None
    target: Path | None
    target_model_dir: Path | None

    @property
    def drafts_for(self) -> Path | None:
        """The file or folder of the target, None if none is named; raises OptionError for two."""
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
    _SOURCE.flag(
        "--allow-pickle",
        "Open .bin and .pt weights where there are no safetensors, as tensors only: code in them "
        "does not run.",
    ),
    _SOURCE.option(
        "--pre NAME",
        "llama.cpp's name of the way text is split before tokens are merged.",
        show_default="recognised from tokenizer.json",
    ),
)

head_options = option_group(
    "head",
    HeadSettings,
    _HEAD.option(
        "--kind",
        "What DIR holds; eagle is EAGLE-1, EAGLE-2 and HASS.",
        click.Choice(KINDS),
        default=None,
        show_default="recognised",
    ),
    _HEAD.model("--target", "The GGUF file of the model that the heads draft for."),
    _HEAD.option(
        "--target-model-dir DIR",
        "Instead, that model's checkpoint: config.json and tokenizer are enough.",
        PATH,
    ),
)

target_options = option_group(
    "target",
    TargetSettings,
    _RESULT.option(
        "-o, --output, --outfile FILE|FOLDER",
        "The file to write, or the folder for it.",
        PATH,
        show_default="a name by the GGUF convention, here",
    ),
    _RESULT.option(
        "--outtype TYPE",
        "f32, f16, bf16, auto (what the checkpoint has), or a quantization that needs no "
        "importance matrix: q8_0, q4_k_m, ...",
        default=None,
        show_default="f16, heads q8_0",
    ),
    _RESULT.flag("--force", "Overwrite the file if it is there."),
    _RESULT.flag("--dry-run", "Only print which tensor becomes which."),
    _RESULT.option(
        "--verify/--no-verify",
        "Compare logits with transformers, where it is installed; the file appears only if they "
        "agree.",
        default=None,
        show_default="up to 300M parameters",
    ),
    _RESULT.threads("Threads of the quantizer and of the comparison."),
)
