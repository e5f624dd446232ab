"""Layers that a cut keeps, as users write them: numbers and ranges."""

from __future__ import annotations

import re
from collections.abc import Sequence

from specrun.bindings.errors import OptionError

_PART = re.compile(r"(\d{1,9})(?:(-)(\d{1,9})?)?")


def parse_layers(text: str, n_layers: int) -> tuple[int, ...]:
    """Return the layers that "0-11", "0-3,8,10-" or "5" names, ascending; the first layer is 0.

    "10-" ends with the last of the model's `n_layers`. Raises OptionError for a text of another
    form, a layer twice, a range that runs backwards, and numbers that the model has not.
    """
    chosen: list[int] = []
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise OptionError(
                f"{part.strip()!r} is no layer: write numbers and ranges, such as 0-11 or 0-3,8,10-"
            )
        first = int(match[1])
        last = int(match[3]) if match[3] else (n_layers - 1 if match[2] else first)
        if max(first, last) >= n_layers:
            missing = first if first >= n_layers else last
            raise OptionError(
                f"there is no layer {missing}: the model has {n_layers} layers, 0 to {n_layers - 1}"
            )
        if last < first:
            raise OptionError(f"the range {part.strip()} runs backwards: write {last}-{first}")
        chosen += range(first, last + 1)
    twice = next((layer for layer in chosen if chosen.count(layer) > 1), None)
    if twice is not None:
        raise OptionError(
            f"layer {twice} is named twice in {text!r}: a cut keeps each layer once, in its order"
        )
    return tuple(sorted(chosen))


def selected_layers(
    n_layers: int, *, layers: str | None = None, skip: str | None = None
) -> tuple[int, ...]:
    """Return the layers that remain: `layers`, or all but `skip`; exactly one is given."""
    if (layers is None) == (skip is None):
        raise OptionError("name the layers to keep or the layers to skip, one of the two")
    if layers is not None:
        return parse_layers(layers, n_layers)
    skipped = parse_layers(skip or "", n_layers)
    kept = tuple(layer for layer in range(n_layers) if layer not in skipped)
    if not kept:
        raise OptionError(f"skipping all {n_layers} layers leaves no model: keep at least one")
    return kept


def range_text(layers: Sequence[int]) -> str:
    """Return ascending layers as `parse_layers` reads them: "0-3,8,10-11"."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
