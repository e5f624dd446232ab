"""The pictures of the page: drawn from records, for light and dark pages."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from measure.benchmarks.page import picture_file
from measure.benchmarks.plan import CATEGORIES
from measure.benchmarks.records import FOLDER, Record, Result, read_records
from measure.benchmarks.summaries import arm_of, best_of, cost_at, grouped, over
from specrun.bench.cascade.comparison import CascadePoint
from specrun.bench.cascade.report import plot_cascades
from specrun.bench.plots import COLORS, GREY, Theme, new_figure, save_figure, themed, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Records = Mapping[str, Record]
_THEMES: tuple[Theme, ...] = ("light", "dark")
_BLUE, _ORANGE, _GREEN, _PINK = COLORS[:4]


def draw_pictures(folder: Path = FOLDER) -> list[Path]:
    """Draw every picture that there are results for; return the files."""
    records, drawn = read_records(folder), []
    for name, draw in _PICTURES.items():
        for theme in _THEMES:
            path = picture_file(folder, name, theme)
            with themed(theme):
                if draw(records, path):
                    drawn.append(path)
    return drawn


def _panels(path: Path, n: int, most: int, width: float) -> tuple[Figure, list[Axes]]:
    """Return a figure of `n` panels, at most so many side by side, each so wide."""
    columns = min(most, n)
    rows = -(-n // columns)
    figure = new_figure(path, width * columns, 3.2 * rows)
    places = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in places[n:]:
        axes.set_visible(False)
    return figure, places[:n]


# == Speed-up by category ==========================================================================


_ARMS: Mapping[str, tuple[str, Callable[[Sequence[Result]], Result | None]]] = {
    "llama-server, its best": (GREY, lambda arms: best_of(arms, "llama-server")),
    "llama-cpp-python, its best": (_PINK, lambda arms: best_of(arms, "llama-cpp-python")),
    "specrun, as it chooses": (_BLUE, lambda arms: arm_of(arms, "specrun", "as it chooses")),
    "specrun, its best": (_GREEN, lambda arms: best_of(arms, "specrun")),
}


def _draw_peers(records: Records, path: Path) -> bool:
    """Draw a panel for each model and temperature: the first type of weights, most threads."""
    found = {name: each for name, each in records.items() if each.kind == "peers"}
    panels = [
        (record.title.partition(", which")[0], key, arms)
        for record in found.values()
        for key, arms in _first_type(record.results).items()
    ]
    if not panels:
        return False
    figure, places = _panels(path, len(panels), 2, 5.5)
    for axes, (title, (weights, threads, temperature), arms) in zip(places, panels, strict=True):
        _bars(axes, arms)
        axes.set_title(f"{title}, {weights}{_threads(threads)}, temp {temperature:g}", fontsize=9)
    lines, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    save_figure(figure, "Tokens a second over llama-server's plain decoding, by texts", path)
    return True


def _first_type(results: Sequence[Result]) -> dict[tuple[str, int, float], list[Result]]:
    """Return the results of the first type and number of threads, by temperature."""
    groups = grouped(results, "weights", "threads", "temperature")
    first = next(iter(groups), None)
    kept = {key: arms for key, arms in groups.items() if first is not None and key[:2] == first[:2]}
    return {(key[0], key[1], key[2]): arms for key, arms in kept.items()}


def _bars(axes: Axes, arms: Sequence[Result]) -> None:
    groups = {name: group for (name,), group in grouped(arms, "category").items()}
    shown = [category for category in CATEGORIES if category in groups]
    width = 0.8 / len(_ARMS)
    for number, (label, (color, choose)) in enumerate(_ARMS.items()):
        for place, category in enumerate(shown):
            found = groups[category]
            value = over(choose(found), arm_of(found, "llama-server", "plain"))
            if value is None:
                continue
            x = place + (number - 1.5) * width
            named = label if place == 0 else "_"
            axes.bar(x, value, 0.92 * width, color=color, label=named)
            axes.annotate(f"{value:.2f}", (x, value), ha="center", va="bottom", fontsize=6)
    axes.axhline(1.0, color=GREY, linestyle="--", linewidth=1)
    axes.set_xticks(range(len(shown)), shown, fontsize=8)
    axes.grid(axis="y", color=GREY, alpha=0.3, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


# == T(n), tokens a round against nodes, cascades ==================================================


def _draw_curves(records: Records, path: Path) -> bool:
    """Draw T(n)/T(1) of all files: a panel for each model, a colour for each type."""
    found = [record for record in records.values() if record.kind == "curves"]
    panels: dict[str, list[Result]] = {}
    for result in (each for record in found for each in record.results):
        panels.setdefault(result["file"].rpartition(", ")[0], []).append(result)
    if not panels:
        return False
    figure, places = _panels(path, len(panels), 3, 4.2)
    for axes, (name, own) in zip(places, panels.items(), strict=True):
        types = dict(zip(_types(own), COLORS, strict=False))
        for result in own:
            single = cost_at(result, 1)
            weights, threads = result["file"].rpartition(", ")[2], result["threads"]
            axes.plot(
                result["sizes"],
                [seconds / single for seconds in result["reused"]],
                "--" if threads == 1 else "-",
                color=types[weights],
                marker="o",
                markersize=3,
                label=f"{weights}{_threads(threads)}",
            )
        axes.axhline(1.0, color=GREY, linestyle=":", linewidth=1)
        _doubling(axes)
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("tokens in one evaluation")
        tidy(axes, "y")
    places[0].set_ylabel("times the cost of one")
    save_figure(figure, "What an evaluation costs", path)
    return True


def _threads(count: int) -> str:
    """Return the number of threads behind a comma; nothing for a GPU."""
    return f", {count} thread{'s' if count > 1 else ''}" if count else ""


def _types(results: Sequence[Result]) -> list[str]:
    return list(dict.fromkeys(result["file"].rpartition(", ")[2] for result in results))


def _draw_nodes(records: Records, path: Path) -> bool:
    """Draw tokens a round against the nodes of trees, and the length of chains."""
    if "nodes" not in records:
        return False
    results = [each for each in records["nodes"].results if not each["category"]]
    results = [each for each in results if each["drafter"] != "none"]
    figure = new_figure(path, 7, 4)
    axes = figure.subplots()
    for option, label, style in (("nodes=", "tree", "-"), ("n=", "chain", "--")):
        for (temperature,), color in zip(grouped(results, "temperature"), COLORS, strict=False):
            sized = ((_size(result, option), result) for result in results)
            points = sorted(
                (size, result["mean_accepted_length"])
                for size, result in sized
                if size is not None and result["temperature"] == temperature
            )
            if points:
                xs, ys = zip(*points, strict=True)
                name = f"{label}, temperature {temperature:g}"
                axes.plot(xs, ys, style, color=color, marker="o", markersize=4, label=name)
    _doubling(axes)
    axes.set_ylim(bottom=1)
    axes.set_xlabel("drafted nodes of a round")
    axes.set_ylabel("tokens a round")
    tidy(axes, "both")
    save_figure(figure, "Tokens a round against drafted nodes", path)
    return True


def _doubling(axes: Axes) -> None:
    """Let the axis of counts double from mark to mark."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")


def _size(result: Result, option: str) -> int | None:
    """Return the number that an option such as "nodes=" has in a drafter; None without it."""
    found = re.search(rf"[(,] ?{option}(\d+)", result["drafter"])
    return None if found is None else int(found[1])


def _draw_cascades(records: Records, path: Path) -> bool:
    if "cascades-real" not in records:
        return False
    points = msgspec.convert(records["cascades-real"].results, list[CascadePoint])
    plot_cascades(points, path)
    return True


_PICTURES: Mapping[str, Callable[[Records, Path], bool]] = {
    "peers": _draw_peers,
    "curves": _draw_curves,
    "nodes": _draw_nodes,
    "cascades-real": _draw_cascades,
}
