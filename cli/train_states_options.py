"""Options of heads: where the target's hidden states come from, and whose answers they belong to."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from specrun.cli.option_group import option, option_group
from specrun.cli.option_types import ExistingFile
from specrun.cli.train_options import Cache

__all__ = ["TrainFeatures", "train_features_options"]

_SECTION, _ANSWERS = "Target's states", "Self-distillation"


@dataclasses.dataclass(frozen=True, slots=True)
class TrainFeatures:
    """Where the target's hidden states come from, where they are kept, and whose answers they belong to."""

    teacher: Path | None
    cache: Cache
    features: Path | None
    answers: str
    answer_temp: float
    answer_length: int


train_features_options = option_group(
    "states",
    TrainFeatures,
    option(
        "--teacher",
        section=_SECTION,
        type=ExistingFile(),
        help="The target as GGUF: llama.cpp computes its states, so that a large one may be quantized.",
    ),
    option(
        "--cache",
        section=_SECTION,
        type=click.Choice(["auto", "yes", "no"]),
        default="auto",
        show_default=True,
        help="Keep states on disk; auto: where they are read more than once and there is room.",
    ),
    option(
        "--features",
        section=_SECTION,
        type=click.Path(file_okay=False, path_type=Path),
        metavar="DIR",
        help="Keep them in this folder, for other heads too; otherwise they go when the run ends.",
    ),
    option(
        "--answers",
        section=_ANSWERS,
        type=click.Choice(["given", "target"]),
        default="given",
        show_default=True,
        help="Whose answers are learnt: the data's, or those the target gives to the same prompts.",
    ),
    option(
        "--answer-temp",
        section=_ANSWERS,
        type=click.FloatRange(0),
        default=0.0,
        show_default=True,
        metavar="T",
        help="The temperature at which the target answers.",
    ),
    option(
        "--answer-length",
        section=_ANSWERS,
        type=click.IntRange(1),
        default=512,
        show_default=True,
        metavar="N",
        help="The most tokens of its answers.",
    ),
)
