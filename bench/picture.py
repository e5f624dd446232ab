"""What all pictures here have in common: their colours, their title, and how they are written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from specrun.runtime.atomic import atomic_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["COLORS", "GREY", "save_picture"]

COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442")
"""Okabe and Ito's colours, which differ for the colour-blind too."""
GREY = "#666666"
"""Of lines that mark where things stand, such as at the speed of plain decoding."""


def save_picture(figure: Figure, title: str, path: Path) -> None:
    """Write a figure under a title to `path`, over an earlier one; the suffix names the format."""
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    with atomic_path(path, force=True) as aside:
        figure.savefig(aside, format=path.suffix.lower()[1:], dpi=160)
