"""A picture of a training run: the loss of every step, and what held-out texts showed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specrun.bench.picture import COLORS, save_picture
from specrun.bench.plot import check_plot_file
from specrun.bindings.errors import OptionError
from specrun.train.training_progress import Curves

__all__ = ["plot_training"]

_GREY = "#bbbbbb"


def plot_training(curves: Curves, path: Path, title: str) -> None:
    """Write the picture to `path`, over an earlier one; the suffix names the format."""
    check_plot_file(path)
    if not curves.losses:
        raise OptionError("the run made no step: there is nothing to draw")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    _losses(left, curves)
    _measures(right, curves)
    save_picture(figure, title, path)


def _losses(axes: Any, curves: Curves) -> None:  # noqa: ANN401 - matplotlib has no type for it without importing it
    steps = range(1, len(curves.losses) + 1)
    axes.plot(steps, curves.losses, color=_GREY, linewidth=0.8, label="loss")
    axes.plot(steps, _averaged(curves.losses), color="black", linewidth=1.4, label="averaged")
    if len(curves.parts) > 1:
        for color, (name, values) in zip(COLORS, curves.parts.items(), strict=False):
            axes.plot(range(1, len(values) + 1), _averaged(values), color=color, linewidth=1, label=name)
    if min(curves.losses) > 0:
        axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    _finish(axes)


def _measures(axes: Any, curves: Curves) -> None:  # noqa: ANN401 - see above
    names = [name for name in (curves.measures[-1][1] if curves.measures else {}) if name.endswith("top-1")]
    for index, name in enumerate(names):
        color = COLORS[index % len(COLORS)]
        for kind, style in ((name, "-"), (name[:-1] + "5", ":")):
            found = [(step, values[kind]) for step, values in curves.measures if kind in values]
            label = name.removesuffix(" top-1") if kind == name else None
            axes.plot(*zip(*found, strict=True), style, color=color, marker="o", markersize=3, label=label)
    if not names:
        for color, name in zip(COLORS, curves.measures[-1][1] if curves.measures else (), strict=False):
            found = [(step, values[name]) for step, values in curves.measures if name in values]
            axes.plot(*zip(*found, strict=True), color=color, marker="o", markersize=3, label=name)
    else:
        axes.set_ylim(0, 1)
    axes.set_xlabel("step")
    axes.set_ylabel("agrees with the target (dotted: among five)" if names else "measure")
    _finish(axes)


def _averaged(values: list[float]) -> list[float]:
    """Return the means over a fortieth of the steps around each."""
    reach = len(values) // 80
    windows = (values[max(0, place - reach) : place + reach + 1] for place in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def _finish(axes: Any) -> None:  # noqa: ANN401 - see above
    axes.grid(color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if axes.has_data():
        axes.legend(frameon=False, fontsize=8)
