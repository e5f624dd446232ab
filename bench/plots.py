"""A picture of a comparison: speed-ups with their spread, and acceptance by position.

What all pictures here have in common: their colours, their title, and how they are written.

A picture of a training run: the loss of every step, and what held-out texts showed.

A picture of a tuning: what evaluations cost, and how fast the plans are.

A picture of a search for layers to skip: how the prediction rose, and which layers each set keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specrun.bench.drafters.comparison import DrafterResult
from specrun.bench.layers.layer_search import LayerSearchResult
from specrun.bindings.atomic import atomic_path
from specrun.bindings.errors import MissingPackageError, OptionError
from specrun.runtime.costs import TuneResult
from specrun.train.trainer.listener import Curves

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442")
"""Okabe and Ito's colours, which differ for the colour-blind too."""
GREY = "#666666"
"""Of lines that mark where things stand, such as at the speed of plain decoding."""


def save_picture(figure: Figure, title: str, path: Path) -> None:
    """Write a figure under a title to `path`, over an earlier one; the suffix names the format."""
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    with atomic_path(path, force=True) as aside:
        figure.savefig(aside, format=path.suffix.lower()[1:], dpi=160)


_FORMATS = (".png", ".svg", ".pdf")


def check_plot_file(path: Path) -> None:
    """Raise before anything is measured if the picture could not be written."""
    if path.suffix.lower() not in _FORMATS:
        raise OptionError(
            f"{path.name} is not a picture specrun can write: name it .png, .svg or .pdf"
        )
    if not path.parent.is_dir():
        raise OptionError(
            f"there is no folder {path.parent} to write {path.name} into; create it first"
        )
    try:
        import matplotlib as _  # noqa: F401
    except ImportError as error:
        raise MissingPackageError("a picture", "matplotlib", "bench") from error


def plot_drafters(results: Sequence[DrafterResult], path: Path) -> None:
    """Write the picture of a comparison to `path`, over an earlier one; the suffix names the
    format."""
    check_plot_file(path)
    from matplotlib.figure import Figure

    drafted = [result for result in results if result.speed_up is not None]
    if not drafted:
        raise OptionError("there is no drafter among the results to draw")
    figure = Figure(figsize=(11, max(3.2, 1.4 + 0.42 * len(drafted))), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    colors = _colors(drafted)
    _speed_ups(left, drafted, colors)
    _acceptance(right, drafted, colors)
    save_picture(figure, _title(results[0]), path)


def _colors(drafted: Sequence[DrafterResult]) -> dict[str, str]:
    names = dict.fromkeys(result.label for result in drafted)
    return {name: COLORS[index % len(COLORS)] for index, name in enumerate(names)}


def _title(first: DrafterResult) -> str:
    target = first.target
    padded = ", padded" if target.padded_parameters else ""
    return f"{target.model}: {target.n_params / 1e6:,.1f} M parameters{padded}, {target.backend}"


def _speed_ups(axes: Any, drafted: Sequence[DrafterResult], colors: dict[str, str]) -> None:  # noqa: ANN401
    for row, result in enumerate(drafted):
        ratio = result.speed_up
        if ratio is None:
            continue
        spread = [[max(0.0, ratio.value - ratio.low)], [max(0.0, ratio.high - ratio.value)]]
        axes.barh(row, ratio.value, height=0.62, color=colors[result.label])
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
    axes.set_yticks(
        range(len(drafted)), [f"{result.label}\ntemp {result.temperature:g}" for result in drafted]
    )
    axes.invert_yaxis()
    axes.set_xlim(
        0,
        1.18
        * max(
            1.0,
            *(
                max(result.speed_up.value, result.speed_up.high)
                for result in drafted
                if result.speed_up
            ),
        ),
    )
    axes.set_xlabel("times the speed of plain decoding (median; least and most of a repetition)")
    _tidy(axes, "x")


def _acceptance(axes: Any, drafted: Sequence[DrafterResult], colors: dict[str, str]) -> None:  # noqa: ANN401
    temperatures = sorted({result.temperature for result in drafted})
    styles = dict(zip(temperatures, ("-", "--", ":", "-.") * len(temperatures), strict=False))
    for result in drafted:
        shares = result.acceptance_by_position
        if shares:
            axes.plot(
                range(1, len(shares) + 1),
                [100 * share for share in shares],
                styles[result.temperature],
                color=colors[result.label],
                marker="o",
                markersize=4,
                clip_on=False,
                label=f"{result.label}, temp {result.temperature:g}",
            )
    deepest = max((len(result.acceptance_by_position) for result in drafted), default=1)
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
            axes.plot(
                range(1, len(values) + 1), _averaged(values), color=color, linewidth=1, label=name
            )
    if min(curves.losses) > 0:
        axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    _finish(axes)


def _measures(axes: Any, curves: Curves) -> None:  # noqa: ANN401 - see above
    names = [
        name
        for name in (curves.measures[-1][1] if curves.measures else {})
        if name.endswith("top-1")
    ]
    for index, name in enumerate(names):
        color = COLORS[index % len(COLORS)]
        for kind, style in ((name, "-"), (name[:-1] + "5", ":")):
            found = [(step, values[kind]) for step, values in curves.measures if kind in values]
            label = name.removesuffix(" top-1") if kind == name else None
            axes.plot(
                *zip(*found, strict=True), style, color=color, marker="o", markersize=3, label=label
            )
    if not names:
        for color, name in zip(
            COLORS, curves.measures[-1][1] if curves.measures else (), strict=False
        ):
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


_TARGET, _DRAFT = COLORS[:2]


def plot_tuning(result: TuneResult, path: Path, title: str) -> None:
    """Write the picture to `path`, over an earlier one; the suffix names the format."""
    check_plot_file(path)
    from matplotlib.figure import Figure

    plans = sum(len(setting.candidates) for setting in result.settings)
    figure = Figure(figsize=(11, max(3.6, 1.4 + 0.42 * plans)), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2, 3))
    _curves(left, result)
    _plans(right, result)
    save_picture(figure, title, path)


def _curves(axes: Any, result: TuneResult) -> None:  # noqa: ANN401 - matplotlib's
    for curve, name, color in (
        (result.target, "target", _TARGET),
        (result.draft, "draft model", _DRAFT),
    ):
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
    for setting in result.settings:
        for candidate in setting.candidates:
            row = len(labels)
            labels.append(
                f"{_short(candidate.options) or 'no drafting'}\ntemp {setting.params.temperature:g}"
            )
            if candidate.measured is not None:
                axes.barh(row, candidate.measured, height=0.6, color=_TARGET)
            axes.plot(
                [candidate.predicted] * 2, [row - 0.38, row + 0.38], color=_DRAFT, linewidth=2.5
            )
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


_BLUE, _ORANGE = COLORS[:2]


def plot_layer_search(result: LayerSearchResult, path: Path, title: str) -> None:
    """Write the picture to `path`, over an earlier one; the suffix names the format."""
    check_plot_file(path)
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    numbers = range(1, len(result.trials) + 1)
    gains = [trial.speed_up for trial in result.trials]
    figure = Figure(figsize=(10, max(5.0, 3.4 + 0.12 * result.n_layers)), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    above.plot(numbers, gains, "o", color=_BLUE, markersize=4, label="a set of layers")
    above.step(
        numbers, list(accumulate(gains, max)), where="post", color=_ORANGE, label="best so far"
    )
    above.axhline(1.0, color=GREY, linewidth=1, linestyle="--", label="plain decoding")
    above.set_ylabel("predicted speed-up")
    above.legend(frameon=False, fontsize=8)
    kept = np.array(
        [[layer in trial.kept for trial in result.trials] for layer in range(result.n_layers)]
    )
    extent = (0.5, len(result.trials) + 0.5, result.n_layers - 0.5, -0.5)
    colors = ListedColormap(["white", _BLUE])
    below.imshow(
        kept, aspect="auto", extent=extent, cmap=colors, vmin=0, vmax=1, interpolation="none"
    )
    below.set_xlabel("evaluation")
    below.set_ylabel("layer (blue: kept)")
    save_picture(figure, title, path)
