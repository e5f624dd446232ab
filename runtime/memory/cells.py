"""Cells of a context: keys and values of every position, and recurrent states, layer by layer.

The cache is unified and holds sliding windows whole (`Context`), so it grows by the same bytes with
every position, in steps of 256; states do not grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.gguf.types import BLOCK_SIZES, stored_bytes
from specrun.runtime.memory.model_shape import ModelShape
from specrun.runtime.memory.tensor_places import HOST, PROCESSOR

STEP = 256
"""llama.cpp rounds contexts up to multiples of it."""


@dataclass(frozen=True, slots=True)
class Cells:
    """Bytes that each layer keeps for `STEP` positions, and whatever the length is (`fixed`)."""

    per_step: tuple[int, ...]
    fixed: tuple[int, ...]

    def of_layers(self, n_ctx: int) -> tuple[int, ...]:
        """Return the bytes of each layer at a context of so many tokens."""
        steps = -(-n_ctx // STEP)
        pairs = zip(self.per_step, self.fixed, strict=True)
        return tuple(steps * growing + kept for growing, kept in pairs)

    def total(self, n_ctx: int) -> int:
        """Return the bytes of all layers."""
        return sum(self.of_layers(n_ctx))


def count_cells(
    model: ModelShape,
    options: ContextOptions,
    *,
    n_rollback: int = 0,
    nextn: bool = False,
    flash: bool = True,
) -> Cells:
    """Return the cells of a context of a model, of its NextN blocks alone if `nextn`.

    `n_rollback` more states are kept for every sequence. Without `flash` attention values are
    stored transposed, all layers' as wide as the widest.
    """
    trunk = model.n_layers - model.n_nextn
    layers = range(trunk, model.n_layers) if nextn else range(trunk)
    widest = max((layer.values for layer in model.layers), default=0)
    growing, kept = [0] * model.n_layers, [0] * model.n_layers
    for number in layers:
        layer = model.layers[number]
        if layer.keys:
            values = layer.values if flash or not layer.values else widest
            growing[number] = _stored(layer.keys, options.cache_type_k) + _stored(
                values, options.cache_type_v
            )
        rows = options.n_sequences * (1 + n_rollback)
        kept[number] = sum(PROCESSOR.padded(4 * size * rows) for size in layer.state)
    return Cells(tuple(growing), tuple(kept))


def widened_cells(model: ModelShape, options: ContextOptions, n_ctx: int) -> int:
    """Return the bytes of F16 copies of one layer's keys and values that are of another type.

    The largest layer's: a copy lives no longer than its layer is computed.
    """
    if options.flash_attention == "off":
        return 0
    wide = (options.cache_type_k != "f16", options.cache_type_v != "f16")
    numbers = max(
        (wide[0] * layer.keys + wide[1] * layer.values for layer in model.layers), default=0
    )
    return 2 * numbers * -(-n_ctx // STEP) * STEP


def spread_cells(n_layers: int, per_step: int, fixed: int) -> Cells:
    """Return cells of which only the sum is known, spread evenly over the layers."""

    def parts(n_bytes: int) -> tuple[int, ...]:
        share, rest = divmod(n_bytes, max(1, n_layers))
        return tuple(share + (number < rest) for number in range(n_layers))

    return Cells(parts(per_step), parts(fixed))


def _stored(numbers: int, cache_type: str) -> int:
    """Return the bytes of `STEP` rows of so many numbers; blocks cut short count as whole."""
    kind = cache_type.upper()
    block = BLOCK_SIZES[kind]
    return STEP * stored_bytes((-(-numbers // block) * block,), kind) if numbers else 0


def cells_by_place(cells: Sequence[int], places: Sequence[int], *, offload: bool) -> dict[int, int]:
    """Return bytes by place: cells lie with their layers, or all here without `offload`."""
    found: dict[int, int] = {}
    for n_bytes, place in zip(cells, places, strict=False):
        where = place if offload else HOST
        found[where] = found.get(where, 0) + n_bytes
    return found
