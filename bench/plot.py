"""A picture of a comparison: speed-ups with their spread, and acceptance by position."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specrun.bench.drafters import DrafterResult
from specrun.bench.picture import COLORS, GREY, save_picture
from specrun.bindings.errors import MissingPackageError, OptionError

__all__ = ["check_plot_file", "plot_drafters"]

_FORMATS = (".png", ".svg", ".pdf")


def check_plot_file(path: Path) -> None:
    """Raise before anything is measured if the picture could not be written."""
    if path.suffix.lower() not in _FORMATS:
        raise OptionError(f"{path.name} is not a picture specrun can write: name it .png, .svg or .pdf")
    if not path.parent.is_dir():
        raise OptionError(f"there is no folder {path.parent} to write {path.name} into; create it first")
    try:
        import matplotlib as _  # noqa: F401
    except ImportError as error:
        raise MissingPackageError("a picture", "matplotlib", "bench") from error


def plot_drafters(results: Sequence[DrafterResult], path: Path) -> None:
    """Write the picture of a comparison to `path`, over an earlier one; the suffix names the format."""
    check_plot_file(path)
    from matplotlib.figure import Figure

    drafted = [one for one in results if one.speed_up is not None]
    if not drafted:
        raise OptionError("there is no drafter among the results to draw")
    figure = Figure(figsize=(11, max(3.2, 1.4 + 0.42 * len(drafted))), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    colors = _colors(drafted)
    _speed_ups(left, drafted, colors)
    _acceptance(right, drafted, colors)
    save_picture(figure, _title(results[0]), path)


def _colors(drafted: Sequence[DrafterResult]) -> dict[str, str]:
    names = dict.fromkeys(one.label for one in drafted)
    return {name: COLORS[index % len(COLORS)] for index, name in enumerate(names)}


def _title(first: DrafterResult) -> str:
    target = first.target
    padded = ", padded" if target.padded_parameters else ""
    return f"{target.model}: {target.n_params / 1e6:,.1f} M parameters{padded}, {target.backend}"


def _speed_ups(axes: Any, drafted: Sequence[DrafterResult], colors: dict[str, str]) -> None:  # noqa: ANN401
    for row, one in enumerate(drafted):
        ratio = one.speed_up
        if ratio is None:
            continue
        spread = [[max(0.0, ratio.value - ratio.low)], [max(0.0, ratio.high - ratio.value)]]
        axes.barh(row, ratio.value, height=0.62, color=colors[one.label])
        axes.errorbar(ratio.value, row, xerr=spread, color="black", capsize=3, linewidth=1)
        axes.annotate(
            f"{ratio.value:.2f}x",
            (max(ratio.value, ratio.high), row),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )
    axes.axvline(1.0, color=GREY, linestyle="--", linewidth=1)
    axes.set_yticks(range(len(drafted)), [f"{one.label}\ntemp {one.temperature:g}" for one in drafted])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.18 * max(1.0, *(max(one.speed_up.value, one.speed_up.high) for one in drafted if one.speed_up)))
    axes.set_xlabel("times the speed of plain decoding (median; least and most of a repetition)")
    _tidy(axes, "x")


def _acceptance(axes: Any, drafted: Sequence[DrafterResult], colors: dict[str, str]) -> None:  # noqa: ANN401
    temperatures = sorted({one.temperature for one in drafted})
    styles = dict(zip(temperatures, ("-", "--", ":", "-.") * len(temperatures), strict=False))
    for one in drafted:
        shares = one.acceptance_by_position
        if shares:
            axes.plot(
                range(1, len(shares) + 1),
                [100 * share for share in shares],
                styles[one.temperature],
                color=colors[one.label],
                marker="o",
                markersize=4,
                clip_on=False,
                label=f"{one.label}, temp {one.temperature:g}",
            )
    deepest = max((len(one.acceptance_by_position) for one in drafted), default=1)
    axes.set_xticks(range(1, max(1, deepest) + 1))
    axes.set_ylim(0, 100)
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("rounds that kept a token there (%)")
    if axes.has_data():
        axes.legend(frameon=False, fontsize=8)
    _tidy(axes, "y")


def _tidy(axes: Any, grid: str) -> None:  # noqa: ANN401 - matplotlib has no type for it without importing it
    axes.grid(axis=grid, color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
