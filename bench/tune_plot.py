"""A picture of a tuning: what evaluations cost, and how fast the plans are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specrun.bench.picture import COLORS, GREY, save_picture
from specrun.bench.plot import check_plot_file
from specrun.runtime.planning.tune_result import TuneResult

__all__ = ["plot_tuning"]

_TARGET, _DRAFT = COLORS[:2]


def plot_tuning(result: TuneResult, path: Path, title: str) -> None:
    """Write the picture to `path`, over an earlier one; the suffix names the format."""
    check_plot_file(path)
    from matplotlib.figure import Figure

    plans = sum(len(one.candidates) for one in result.settings)
    figure = Figure(figsize=(11, max(3.6, 1.4 + 0.42 * plans)), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2, 3))
    _curves(left, result)
    _plans(right, result)
    save_picture(figure, title, path)


def _curves(axes: Any, result: TuneResult) -> None:  # noqa: ANN401 - matplotlib's
    for curve, name, color in ((result.target, "target", _TARGET), (result.draft, "draft model", _DRAFT)):
        single = curve.seconds(1)
        axes.plot(
            curve.sizes,
            [seconds / single for seconds in curve.reused],
            marker="o",
            markersize=3,
            color=color,
            label=f"{name}: {1e3 * single:.3g} ms for one",
        )
    axes.axhline(1.0, color=GREY, linestyle="--", linewidth=1)
    axes.set_xlabel("tokens in one evaluation")
    axes.set_ylabel("times the cost of one token")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def _plans(axes: Any, result: TuneResult) -> None:  # noqa: ANN401 - matplotlib's
    labels: list[str] = []
    for one in result.settings:
        for candidate in one.candidates:
            row = len(labels)
            labels.append(f"{_short(candidate.options) or 'no drafting'}\ntemp {one.params.temperature:g}")
            if candidate.measured is not None:
                axes.barh(row, candidate.measured, height=0.6, color=_TARGET)
            axes.plot([candidate.predicted] * 2, [row - 0.38, row + 0.38], color=_DRAFT, linewidth=2.5)
    axes.barh([0], [0], color=_TARGET, label="measured")
    axes.plot([], [], color=_DRAFT, linewidth=2.5, label="predicted")
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("tokens per second")
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
    axes.spines[["top", "right"]].set_visible(False)


def _short(options: str) -> str:
    return options if len(options) <= 60 else f"{options[:45]}...{options[-12:]}"
