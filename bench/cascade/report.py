"""Cascades for readers: tables of rules and settings, and pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specrun.bench.cascade.comparison import (
    LOWER_IS_BETTER,
    PLAIN_SMALL,
    PLAIN_TARGET,
    BestPoints,
    CascadePoint,
    Metric,
    metric_of,
    points_at,
    settings_of,
)
from specrun.bench.plots import COLORS, GREY, ink, new_figure, paper, save_figure, tidy
from specrun.bench.report import Table
from specrun.bench.timing import Spread
from specrun.bindings.errors import OptionError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D


# == Tables: every rule and setting, and the best of each method ===================================


def cascades_table(points: Sequence[CascadePoint]) -> Table:
    """Return the table of `specrun bench cascade`: a row for each rule and setting."""
    notes = [
        "latency: seconds a token with prompts, relative to the plain target's (least to most of a "
        "repetition). reject: of the tested drafts. defer: of the places where both distributions "
        "differ, "
        "how many are left to the target, along the references. CE: cross-entropy of the "
        "references under the rule's distribution, nats a token; accuracy: its mean probability of "
        "their tokens; - if no distribution is stated for a place, or it gives a real token no "
        "chance. "
        "TV, changed: how far the distribution of a token lay from the target's, and the share of "
        "tokens that the target alone would not have drawn.",
    ]
    if points:
        first = points[0]
        notes.append(
            f"Examples: {first.n_examples}; interleaved repetitions: {first.repetitions}. All "
            "rules but exact give another distribution than the target's: NOT exact."
        )
    return Table.of(map(_cascade_row, points), *notes)


def _cascade_row(point: CascadePoint) -> dict[str, str]:
    latency = point.latency
    return {
        "rule": point.method if point.draft_length is None and latency else point.rule,
        "temp": f"{point.temperature:g}",
        "top-p": f"{point.top_p:g}",
        "n": "-" if point.draft_length is None else str(point.draft_length),
        "latency": "-" if latency is None else f"{latency.value:.2f} {latency.extent}",
        "speed-up": "-" if point.speed_up is None else f"{point.speed_up:.2f}x",
        "match": _mean_share(point.exact_match),
        "ROUGE-2": _mean_of(point.rouge_2, 3),
        "BLEU": _mean_of(point.bleu, 1),
        "CE": _mean_of(point.cross_entropy, 3),
        "accuracy": _optional(point.expected_accuracy),
        "reject": _optional(point.rejection_rate),
        "defer": _optional(point.deferral_rate),
        "TV": _optional(point.total_variation),
        "changed": _optional(point.changed_share),
    }


def best_table(found: Sequence[BestPoints]) -> Table:
    """Return the fastest rules at the target's quality, and the best at its latency."""
    return Table.of(
        map(_best_row, found),
        "at the target's quality: the fastest of the method's points whose quality is the plain "
        "target's, within two standard errors; over exact: against exact speculation. at the "
        "target's latency: the best of those that are no slower than the plain target.",
    )


def _best_row(found: BestPoints) -> dict[str, str]:
    fastest, best = found.fastest, found.best
    quality = None if best is None else best.quality(found.metric)
    return {
        "method": found.method,
        "temp": f"{found.temperature:g}",
        "top-p": f"{found.top_p:g}",
        "n": str(found.draft_length),
        "quality": found.metric.replace("_", "-"),
        "target's": f"{found.target_quality:.3f}",
        "speed-up at it": "none" if fastest is None else f"{fastest.speed_up:.2f}x",
        "over exact": "-" if found.over_exact is None else f"{found.over_exact:.2f}x",
        "by": "-" if fastest is None else fastest.rule,
        "best at its latency": "none" if quality is None else f"{quality:.3f}",
        "with": "-" if best is None else best.rule,
    }


def _mean_of(spread: Spread | None, digits: int) -> str:
    return "-" if spread is None else f"{spread.mean:.{digits}f}"


def _mean_share(spread: Spread | None) -> str:
    return "-" if spread is None else f"{spread.mean:.1%}"


def _optional(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


# == Pictures: quality against latency, rejection and deferral =====================================
#
# Figures 2 to 4 of Narasimhan et al. 2024.


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
    "left to the target, of the places where distributions differ": lambda point: (
        point.deferral_rate
    ),
}


def plot_cascades(points: Sequence[CascadePoint], path: Path, metric: Metric | None = None) -> None:
    """Draw quality against latency, rejection and deferral, a row for each setting.

    Quality is by a metric, or by that of `metric_of`.
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
    colors = (*COLORS[:6], ink())  # yellow lines are hardly seen on white
    for index, name in enumerate(names):
        turn, color = divmod(index, len(colors))
        looks[name] = {
            "color": colors[color],
            "marker": _MARKS[index % len(_MARKS)],
            "linestyle": _DASHES[turn % len(_DASHES)],
            "markerfacecolor": paper() if turn % 2 else colors[color],
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
