"""Pictures of comparisons, trainings, tunings and searches for layers, drawn with matplotlib.

matplotlib is an extra and slow to import, so only functions that draw import it. Every picture has
a title, takes its colours from `COLORS`, and is written over an earlier one; the file's suffix
names the format.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from specrun.bench.drafters.comparison import DrafterResult
from specrun.bench.layer_search import LayerSearchResult
from specrun.bindings.errors import MissingPackageError, OptionError
from specrun.bindings.files import atomic_path
from specrun.runtime.tuning import TuneResult
from specrun.train.trainer import Curves

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442")
"""Okabe and Ito's colours, which differ for the colour-blind too."""
GREY = "#808080"
"""Of lines that mark a level, such as the speed of plain decoding; seen on white and on black."""
Theme = Literal["light", "dark"]
_INK, _PAPER = {"light": "black", "dark": "#e6edf3"}, {"light": "white", "dark": "#0d1117"}
_BLUE, _ORANGE = COLORS[:2]
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


@contextmanager
def themed(theme: Theme) -> Iterator[None]:
    """Draw the plots of the block for light or dark pages; the same figures, the same file."""
    from matplotlib import rc_context

    ink, paper = _INK[theme], _PAPER[theme]
    names = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    colors: dict[Any, Any] = dict.fromkeys(names, ink)
    colors |= dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), paper)
    settings: dict[Any, Any] = {**colors, "svg.hashsalt": "specrun"}
    with rc_context(settings):
        yield


def ink() -> str:
    """Return the colour of texts and of the plainest lines."""
    from matplotlib import rcParams

    return str(rcParams["text.color"])


def paper() -> str:
    """Return the colour of empty parts."""
    from matplotlib import rcParams

    return str(rcParams["axes.facecolor"])


def new_figure(path: Path, width: float, height: float) -> Figure:
    """Return an empty figure of so many inches; raises as `check_plot_file` does."""
    check_plot_file(path)
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, title: str, path: Path) -> None:
    """Write a figure with its title."""
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    with atomic_path(path, force=True) as aside:
        kind = path.suffix.lower()[1:]
        metadata = {"Date": None} if kind == "svg" else None
        figure.savefig(aside, format=kind, dpi=160, metadata=metadata)


def tidy(axes: Axes, grid: Literal["x", "y", "both"] | None = None) -> None:
    """Show the lines of a `grid`, a legend if there is something to name, and no frame."""
    if grid:
        axes.grid(axis=grid, color=GREY, alpha=0.3, linewidth=0.8)
        axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0] and axes.get_legend() is None:
        axes.legend(frameon=False, fontsize=8)


# -- comparisons of drafters -----------------------------------------------------------------------


def plot_drafters(results: Sequence[DrafterResult], path: Path) -> None:
    """Draw speed-ups with their spread, and acceptance by position."""
    results = [result for result in results if not result.category]
    drafted = [result for result in results if result.speed_up is not None]
    figure = new_figure(path, 11, max(3.2, 1.4 + 0.42 * len(drafted)))
    if not drafted:
        raise OptionError("there is no drafter among the results to draw")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    names = dict.fromkeys(result.label for result in drafted)
    colors = {name: COLORS[index % len(COLORS)] for index, name in enumerate(names)}
    _speed_ups(left, drafted, colors)
    _acceptance(right, drafted, colors)
    target = results[0].target
    padded = ", padded" if target.padded_parameters else ""
    parameters = f"{target.n_params / 1e6:,.1f} M parameters{padded}"
    save_figure(figure, f"{target.model}: {parameters}, {target.backend}", path)


def _speed_ups(axes: Axes, drafted: Sequence[DrafterResult], colors: Mapping[str, str]) -> None:
    furthest = 1.0
    for row, result in enumerate(drafted):
        ratio = result.speed_up
        if ratio is None:
            continue
        # The ratio of medians may lie outside the range of the repetitions' own ratios.
        spread = [[max(0.0, ratio.value - ratio.low)], [max(0.0, ratio.high - ratio.value)]]
        end = max(ratio.value, ratio.high)
        furthest = max(furthest, end)
        axes.barh(row, ratio.value, height=0.62, color=colors[result.label])
        axes.errorbar(ratio.value, row, xerr=spread, color=ink(), capsize=3, linewidth=1)
        axes.annotate(
            f"{ratio.value:.2f}x",
            (end, row),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            bbox={"facecolor": paper(), "edgecolor": "none", "pad": 1},
        )
    axes.axvline(1.0, color=GREY, linestyle="--", linewidth=1)
    labels = [f"{result.label}\ntemp {result.temperature:g}" for result in drafted]
    axes.set_yticks(range(len(drafted)), labels)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.18 * furthest)  # with room for the number after the longest bar
    axes.set_xlabel("times the speed of plain decoding (median; least and most of a repetition)")
    tidy(axes, "x")


def _acceptance(axes: Axes, drafted: Sequence[DrafterResult], colors: Mapping[str, str]) -> None:
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
    deepest = max(len(result.acceptance_by_position) for result in drafted)
    axes.set_xticks(range(1, max(1, deepest) + 1))
    axes.set_ylim(0, 100)
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("rounds that kept a token there (%)")
    tidy(axes, "y")


# -- training --------------------------------------------------------------------------------------


def plot_training(curves: Curves, path: Path, title: str) -> None:
    """Draw the loss of every step, and the measures on held-out texts."""
    figure = new_figure(path, 11, 4)
    if not curves.losses:
        raise OptionError("the run made no step: there is nothing to draw")
    left, right = figure.subplots(1, 2)
    _losses(left, curves)
    _measures(right, curves)
    save_figure(figure, title, path)


def _losses(axes: Axes, curves: Curves) -> None:
    steps = range(1, len(curves.losses) + 1)
    axes.plot(steps, curves.losses, color="#bbbbbb", linewidth=0.8, label="loss")
    axes.plot(steps, _averaged(curves.losses), color="black", linewidth=1.4, label="averaged")
    if len(curves.parts) > 1:
        for color, (name, values) in zip(COLORS, curves.parts.items(), strict=False):
            steps = range(1, len(values) + 1)
            axes.plot(steps, _averaged(values), color=color, linewidth=1, label=name)
    if min(curves.losses) > 0:
        axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    tidy(axes, "both")


def _measures(axes: Axes, curves: Curves) -> None:
    """Draw agreement in the first token (dotted: among five), or whatever else was measured."""
    measured = list(curves.measures[-1][1]) if curves.measures else []
    agreements = [name for name in measured if name.endswith("top-1")]

    def draw(name: str, style: str, color: str, label: str | None) -> None:
        found = [(step, values[name]) for step, values in curves.measures if name in values]
        steps, heights = zip(*found, strict=True)
        axes.plot(steps, heights, style, color=color, marker="o", markersize=3, label=label)

    for index, name in enumerate(agreements):
        color = COLORS[index % len(COLORS)]
        draw(name, "-", color, name.removesuffix(" top-1"))
        draw(name[:-1] + "5", ":", color, None)
    if agreements:
        axes.set_ylim(0, 1)
    else:
        for color, name in zip(COLORS, measured, strict=False):
            draw(name, "-", color, name)
    axes.set_xlabel("step")
    axes.set_ylabel("agrees with the target (dotted: among five)" if agreements else "measure")
    tidy(axes, "both")


def _averaged(values: Sequence[float]) -> list[float]:
    """Return the means over a fortieth of the steps around each."""
    reach = len(values) // 80
    windows = (values[max(0, place - reach) : place + reach + 1] for place in range(len(values)))
    return [sum(window) / len(window) for window in windows]


# -- tuning ----------------------------------------------------------------------------------------


def plot_tuning(result: TuneResult, path: Path, title: str) -> None:
    """Draw the costs of evaluations, and the speed of the plans."""
    plans = sum(len(setting.candidates) for setting in result.settings)
    figure = new_figure(path, 11, max(3.6, 1.4 + 0.42 * plans))
    left, right = figure.subplots(1, 2, width_ratios=(2, 3))
    _costs(left, result)
    _plans(right, result)
    save_figure(figure, title, path)


def _costs(axes: Axes, result: TuneResult) -> None:
    curves = ((result.target, "target", _BLUE), (result.draft, "draft model", _ORANGE))
    for curve, name, color in curves:
        single = curve.seconds(1)
        costs = [seconds / single for seconds in curve.reused]
        label = f"{name}: {1e3 * single:.3g} ms for one"
        axes.plot(curve.sizes, costs, marker="o", markersize=3, color=color, label=label)
    axes.axhline(1.0, color=GREY, linestyle="--", linewidth=1)
    axes.set_xlabel("tokens in one evaluation")
    axes.set_ylabel("times the cost of one token")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    tidy(axes)


def _plans(axes: Axes, result: TuneResult) -> None:
    labels: list[str] = []
    for setting in result.settings:
        for candidate in setting.candidates:
            row, drafting = len(labels), _short(candidate.options) or "no drafting"
            labels.append(f"{drafting}\ntemp {setting.params.temperature:g}")
            if candidate.measured is not None:
                axes.barh(row, candidate.measured, height=0.6, color=_BLUE)
            ends = [row - 0.38, row + 0.38]
            axes.plot([candidate.predicted] * 2, ends, color=_ORANGE, linewidth=2.5)
    axes.barh([0], [0], color=_BLUE, label="measured")  # for the legend alone
    axes.plot([], [], color=_ORANGE, linewidth=2.5, label="predicted")
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("tokens per second")
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
    tidy(axes)


def _short(options: str) -> str:
    return options if len(options) <= 60 else f"{options[:45]}...{options[-12:]}"


# -- searches for layers to skip -------------------------------------------------------------------


def plot_layer_search(result: LayerSearchResult, path: Path, title: str) -> None:
    """Draw how the predicted speed-up rose, and which layers each set keeps."""
    figure = new_figure(path, 10, max(5.0, 3.4 + 0.12 * result.n_layers))
    from matplotlib.colors import ListedColormap

    trials = result.trials
    numbers = range(1, len(trials) + 1)
    gains = [trial.speed_up for trial in trials]
    best = list(accumulate(gains, max))
    above, below = figure.subplots(2, 1, sharex=True)
    above.plot(numbers, gains, "o", color=_BLUE, markersize=4, label="a set of layers")
    above.step(numbers, best, where="post", color=_ORANGE, label="best so far")
    above.axhline(1.0, color=GREY, linewidth=1, linestyle="--", label="plain decoding")
    above.set_ylabel("predicted speed-up")
    above.legend(frameon=False, fontsize=8)
    kept = np.array([[layer in trial.kept for trial in trials] for layer in range(result.n_layers)])
    below.imshow(
        kept,
        aspect="auto",
        extent=(0.5, len(trials) + 0.5, result.n_layers - 0.5, -0.5),
        cmap=ListedColormap(["white", _BLUE]),
        vmin=0,
        vmax=1,
        interpolation="none",
    )
    below.set_xlabel("evaluation")
    below.set_ylabel("layer (blue: kept)")
    save_figure(figure, title, path)
