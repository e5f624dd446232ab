"""Pictures of loads: throughput by conversations, and the wait for a first token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from measure.load.throughput import LoadResult
from specrun.bench.plots import COLORS, GREY, new_figure, save_figure, tidy
from specrun.bindings.errors import OptionError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARKS = "osD^vP"
_SHIFT = 0.012  # of loads, a drafter beside the next: error bars would cover each other


def plot_load(results: Sequence[LoadResult], path: Path) -> None:
    """Draw tokens a second against conversations, and times to the first token if measured."""
    if not results:
        raise OptionError("there is nothing among the results to draw")
    names = list(dict.fromkeys(result.drafter for result in results))
    waits = [each for each in results if each.first_token is not None and each.conversations == 1]
    figure = new_figure(path, 12 if waits else 8, 4.6)
    if waits:
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        _draw_waits(right, waits, names)
    else:
        left = figure.subplots()
    for place, name in enumerate(names):
        _draw_speeds(left, [each for each in results if each.drafter == name], place, len(names))
    loads = sorted({result.conversations for result in results})
    left.set_xscale("log", base=2)
    left.set_xticks(loads, [str(load) for load in loads])
    left.minorticks_off()
    left.set_ylim(bottom=0)
    left.set_xlabel("conversations at a time")
    left.set_ylabel("tokens a second, all together")
    tidy(left, "y")
    target = results[0].target
    padded = ", padded" if target.padded_parameters else ""
    parameters = f"{target.n_params / 1e6:,.1f} M parameters{padded}"
    save_figure(figure, f"{target.model}: {parameters}, {target.backend}", path)


def _draw_speeds(axes: Axes, results: Sequence[LoadResult], place: int, n_names: int) -> None:
    """Draw a drafter's throughput with its range, dashed what the target's costs allow."""
    shift = 1.0 + _SHIFT * (place - (n_names - 1) / 2)
    loads = [shift * result.conversations for result in results]
    speeds = [result.tokens_per_second for result in results]
    below = [max(0.0, speed.median - speed.low) for speed in speeds]
    above = [max(0.0, speed.high - speed.median) for speed in speeds]
    color, alone = COLORS[place % len(COLORS)], speeds[0].median
    name = "plain" if results[0].drafter == "none" else results[0].drafter
    axes.errorbar(
        loads,
        [speed.median for speed in speeds],
        yerr=[below, above],
        color=color,
        marker=_MARKS[place % len(_MARKS)],
        markersize=5,
        capsize=3,
        label=name,
    )
    axes.plot(
        loads,
        [alone * result.allowed for result in results],
        color=color,
        linestyle="--",
        linewidth=1,
        alpha=0.6,
        label="what T(n) allows" if place == 0 else None,
    )


def _draw_waits(axes: Axes, results: Sequence[LoadResult], names: Sequence[str]) -> None:
    longest = 0
    for row, result in enumerate(results):
        found = result.first_token
        if found is None:
            continue
        longest = found.long_prompt
        color = COLORS[names.index(result.drafter) % len(COLORS)]
        pairs = ((found.alone_s, -0.2, 0.45, "alone"), (found.beside_s, 0.2, 1.0, "beside"))
        for spread, shift, alpha, label in pairs:
            place, length = row + shift, 1000 * spread.median
            ends = [[length - 1000 * spread.low], [1000 * spread.high - length]]
            axes.barh(place, length, height=0.36, color=color, alpha=alpha)
            axes.errorbar(length, place, xerr=ends, color="black", capsize=3, linewidth=1)
            axes.annotate(
                f"  {label}" + (f", {found.ratio.value:.1f}x" if label == "beside" else ""),
                (1000 * spread.high, place),
                va="center",
                fontsize=8,
                color=GREY,
            )
    names_shown = ["plain" if each.drafter == "none" else each.drafter for each in results]
    axes.set_yticks(range(len(results)), names_shown)
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.set_xlabel(f"ms to a first token, while {longest:,} tokens are read")
    tidy(axes, "x")
