"""Options of `specrun calibrate`: which heads are asked along which text, and where the result goes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from specrun.cli.option_group import option, option_group
from specrun.cli.option_types import ExistingFile
from specrun.cli.prompt_options import no_template_option

__all__ = ["CalibrationOutput", "CalibrationSource", "calibration_output_options", "calibration_source_options"]

_TEXTS, _OUTPUT = "Texts", "Output"
_MAX_COUNT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class CalibrationSource:
    """The heads, and the text that they are asked along."""

    model_draft: Path | None
    prompt: tuple[str, ...]
    file: Path | None
    no_chat_template: bool
    predict: int
    temp: float
    ranks: int
    seconds: float


@dataclass(frozen=True, slots=True)
class CalibrationOutput:
    """What becomes of the result."""

    output: Path | None
    force: bool
    save: bool
    as_json: bool


calibration_source_options = option_group(
    "source",
    CalibrationSource,
    option(
        *("-md", "--model-draft", "--draft-model"),
        section="Model",
        type=ExistingFile(),
        help="The heads: a GGUF file of Medusa, Hydra or any EAGLE.",
    ),
    option(
        "-f",
        "--file",
        section=_TEXTS,
        type=ExistingFile(),
        help="A text to ask the heads along, as it stands; otherwise the target writes one.",
    ),
    option("-p", "--prompt", section=_TEXTS, multiple=True, metavar="TEXT", help="A prompt to answer; repeatable."),
    no_template_option(_TEXTS),
    option(
        *("-n", "--predict", "--max-tokens"),
        section=_TEXTS,
        type=click.IntRange(16, _MAX_COUNT),
        default=1024,
        show_default=True,
        metavar="N",
        help="Tokens that are guessed, over all texts together.",
    ),
    option(
        *("--temp", "--temperature"),
        section=_TEXTS,
        type=click.FloatRange(0),
        default=0.0,
        show_default=True,
        help="The temperature that the target writes at: the one that the heads will be used at.",
    ),
    option(
        "--ranks",
        section=_TEXTS,
        type=click.IntRange(1, 32),
        default=10,
        show_default=True,
        metavar="N",
        help="Guesses of each head that are counted.",
    ),
    option(
        "--seconds",
        section=_TEXTS,
        type=click.FloatRange(0),
        default=12.0,
        show_default=True,
        help="Time for measuring what the target's evaluations cost; 0: plan with what is known.",
    ),
)

calibration_output_options = option_group(
    "output",
    CalibrationOutput,
    option(
        *("-o", "--output"),
        section=_OUTPUT,
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help="Write a CSV, and leave the heads' file as it is.",
    ),
    option("--force", section=_OUTPUT, is_flag=True, help="Overwrite FILE."),
    option(
        "--save/--no-save", section=_OUTPUT, default=True, show_default=True, help="Keep what was measured, or show it."
    ),
    option("--json", "as_json", section=_OUTPUT, is_flag=True, help="Print everything that was measured as JSON."),
)
