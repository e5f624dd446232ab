"""A picture of a search for layers to skip: how the prediction rose, and which layers each set keeps."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import numpy as np

from specrun.bench.layer_search import LayerSearchResult
from specrun.bench.picture import COLORS, GREY, save_picture
from specrun.bench.plot import check_plot_file

__all__ = ["plot_layer_search"]

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
    above.step(numbers, list(accumulate(gains, max)), where="post", color=_ORANGE, label="best so far")
    above.axhline(1.0, color=GREY, linewidth=1, linestyle="--", label="plain decoding")
    above.set_ylabel("predicted speed-up")
    above.legend(frameon=False, fontsize=8)
    kept = np.array([[layer in trial.kept for trial in result.trials] for layer in range(result.n_layers)])
    extent = (0.5, len(result.trials) + 0.5, result.n_layers - 0.5, -0.5)
    colors = ListedColormap(["white", _BLUE])
    below.imshow(kept, aspect="auto", extent=extent, cmap=colors, vmin=0, vmax=1, interpolation="none")
    below.set_xlabel("evaluation")
    below.set_ylabel("layer (blue: kept)")
    save_picture(figure, title, path)
