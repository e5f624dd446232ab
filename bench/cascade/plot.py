"""Pictures of cascades: quality against latency, rejection and deferral (figures 2 to 4).

Narasimhan et al. 2024; drawn as `bench.plots` draws the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specrun.bench.cascade.best import metric_of, points_at, settings_of
from specrun.bench.cascade.comparison import (
    LOWER_IS_BETTER,
    PLAIN_SMALL,
    PLAIN_TARGET,
    CascadePoint,
    Metric,
)
from specrun.bench.plots import COLORS, GREY, new_figure, save_figure, tidy
from specrun.bindings.errors import OptionError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

_LINE_COLORS = (*COLORS[:6], "#000000")  # yellow lines are hardly seen on white
_MARKS, _DASHES = "osD^vPX<>*", ("-", "--", "-.", ":")
_NAMES: Mapping[Metric, str] = {
    "rouge_2": "ROUGE-2 (higher is better)",
    "bleu": "BLEU (higher is better)",
    "exact_match": "exact matches (higher is better)",
    "cross_entropy": "cross-entropy of real text, nats a token (downwards)",
    "expected_accuracy": "mean probability of the real token",
}


_COLUMNS: Mapping[str, Callable[[CascadePoint], float | None]] = {
    "seconds a token, relative to the plain target": lambda point: (
        None if point.latency is None else point.latency.value
    ),
    "rejected of the tested drafts": lambda point: point.rejection_rate,
    "left to the target, of the places where both laws differ": lambda point: point.deferral_rate,
}


def plot_cascades(points: Sequence[CascadePoint], path: Path, metric: Metric | None = None) -> None:
    """Draw quality against latency, rejection and deferral, a row for each setting.

    Quality is by a metric, or by what `metric_of` finds.
    """
    settings = settings_of(points)
    if not settings:
        raise OptionError("there is no rule among the results to draw")
    figure = new_figure(path, 16, 4.2 * len(settings))
    rows = figure.subplots(len(settings), len(_COLUMNS), squeeze=False)
    methods = dict.fromkeys(point.method for point in points if not _is_plain(point))
    styles = looks_of(tuple(methods))
    named: dict[str, Line2D] = {}
    for axes, setting in zip(rows, settings, strict=True):
        here = points_at(points, setting)
        for place, (label, value) in zip(axes, _COLUMNS.items(), strict=True):
            named.update(_trade(place, here, metric or metric_of(here), value, styles))
            place.set_xlabel(label)
        temperature, top_p, length = setting
        axes[0].set_title(f"temperature {temperature:g}, top-p {top_p:g}, n={length}", fontsize=9)
    order = [name for name in (*styles, PLAIN_TARGET, PLAIN_SMALL) if name in named]
    lines = [named[name] for name in order]
    figure.legend(lines, order, loc="outside right upper", frameon=False, handlelength=4)
    save_figure(figure, "Cascades of two models: better is up and left", path)


def looks_of(names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return how each name's line is drawn: no two alike, and the first seven differ in colour.

    Behind these, colours come again with other marks, hollow ones, and other dashes.
    """
    looks: dict[str, dict[str, str]] = {}
    for index, name in enumerate(names):
        turn, color = divmod(index, len(_LINE_COLORS))
        looks[name] = {
            "color": _LINE_COLORS[color],
            "marker": _MARKS[index % len(_MARKS)],
            "linestyle": _DASHES[turn % len(_DASHES)],
            "markerfacecolor": "white" if turn % 2 else _LINE_COLORS[color],
        }
    return looks


def _trade(
    axes: Axes,
    points: Sequence[CascadePoint],
    metric: Metric,
    value: Callable[[CascadePoint], float | None],
    styles: Mapping[str, Mapping[str, str]],
) -> dict[str, Line2D]:
    """Draw the quality of each method's points, and of either model alone; return the lines."""
    lines: dict[str, Line2D] = {}
    for method, look in styles.items():
        found = _curve(points, method, value, metric)
        if found:
            xs, ys = zip(*found, strict=True)
            (lines[method],) = axes.plot(xs, ys, **look, markersize=5)  # type: ignore[arg-type]
    for point in filter(_is_plain, points):
        quality = point.quality(metric)
        if quality is not None:
            style = "--" if point.method == PLAIN_TARGET else ":"
            line = axes.axhline(quality, color=GREY, linestyle=style, linewidth=1)
            lines[point.method] = line
    if metric in LOWER_IS_BETTER:
        axes.invert_yaxis()
    axes.set_ylabel(_NAMES[metric])
    tidy(axes, "both")
    return lines


def _curve(
    points: Sequence[CascadePoint],
    method: str,
    value: Callable[[CascadePoint], float | None],
    metric: Metric,
) -> list[tuple[float, float]]:
    """Return a method's points, from left to right."""
    own = [(value(point), point.quality(metric)) for point in points if point.method == method]
    return sorted((x, y) for x, y in own if x is not None and y is not None)


def _is_plain(point: CascadePoint) -> bool:
    return point.method in (PLAIN_TARGET, PLAIN_SMALL)
