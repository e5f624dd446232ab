"""Sampling options of commands that measure at several temperatures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from specrun.cli.bench_lists import NumberListType
from specrun.cli.option_group import Decorator, option

if TYPE_CHECKING:
    from specrun.runtime.sampling import SamplingParams

__all__ = ["TRUNCATION_OPTIONS", "sampling_grid", "temperatures_option"]

_SECTION = "Sampling"

TRUNCATION_OPTIONS = (
    option(
        "--top-k",
        section=_SECTION,
        type=click.IntRange(0, 2**31 - 1),
        default=40,
        show_default=True,
        help="Keep the K most likely tokens; 0: all.",
    ),
    option(
        "--top-p",
        section=_SECTION,
        type=click.FloatRange(0, 1),
        default=0.95,
        show_default=True,
        help="Keep the most likely tokens with this much probability together; 1: all.",
    ),
    option(
        "--min-p",
        section=_SECTION,
        type=click.FloatRange(0, 1),
        default=0.05,
        show_default=True,
        help="Keep tokens with this share of the most likely one's probability; 0: all.",
    ),
)
"""--top-k, --top-p and --min-p, with llama.cpp's defaults."""


def temperatures_option(default: str, purpose: str) -> Decorator:
    """Return --temp, which takes several temperatures: as a,b or repeated."""
    return option(
        *("--temp", "--temperature"),
        section=_SECTION,
        type=NumberListType(),
        multiple=True,
        default=(default,),
        show_default=True,
        help=f"Temperatures{purpose}: a,b or repeated.",
    )


def sampling_grid(
    temperatures: Sequence[Sequence[float]], *, top_k: int, top_p: float, min_p: float, seed: int | None = None
) -> tuple[SamplingParams, ...]:
    """Return the settings of each temperature, in order, none twice."""
    from specrun.runtime.sampling import SamplingParams

    flat = dict.fromkeys(one for several in temperatures for one in several)
    return tuple(SamplingParams(temperature=one, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed) for one in flat)
