"""Options of `specrun inspect A B`: on which text two models are compared, and how it is evaluated."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from specrun.cli.option_group import option, option_group
from specrun.cli.option_types import ExistingFile, LayerCountType
from specrun.runtime.planning.offload import LayerCount

__all__ = ["ComparisonSettings", "comparison_options"]

_SECTION = "Comparison of two models"


@dataclass(frozen=True, slots=True)
class ComparisonSettings:
    """The text, and its evaluation."""

    text_file: Path | None
    ctx_size: int
    chunks: int
    threads: int
    gpu_layers: LayerCount


comparison_options = option_group(
    "comparison",
    ComparisonSettings,
    option(
        "-f",
        "--file",
        "text_file",
        section=_SECTION,
        type=ExistingFile(),
        show_default="a short fixed text",
        help="Compare on the text of a file.",
    ),
    option(
        "-c",
        "--ctx-size",
        section=_SECTION,
        type=click.IntRange(8, 2**20),
        metavar="N",
        default=512,
        show_default=True,
        help="Tokens of a chunk, of which the second half is scored.",
    ),
    option(
        "--chunks",
        section=_SECTION,
        type=click.IntRange(0),
        metavar="N",
        default=0,
        show_default="all",
        help="The most chunks to evaluate.",
    ),
    option(
        "-t",
        "--threads",
        section=_SECTION,
        type=click.IntRange(0, 512),
        metavar="N",
        default=0,
        show_default="one a core",
        help="Threads of the evaluation.",
    ),
    option(
        "-ngl",
        "--gpu-layers",
        section=_SECTION,
        type=LayerCountType(),
        default="0",
        show_default=True,
        help="Layers on the GPU.",
    ),
)
