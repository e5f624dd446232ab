"""Counts that llama.cpp is asked for: compute buffers, and cells that no header tells.

`AskedCounts` opens models without their weights on the CPU (`CountedModel`): the graphs there take
what they take on a card, but for what passes from one to the other. `DeviceCounts` asks the devices
that are here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Protocol

from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.mtp_context import MtpContext
from specrun.bindings.machine.placement import Placement, placing
from specrun.bindings.memory_breakdown import (
    HOST,
    Breakdown,
    CountedModel,
    memory_breakdown,
)
from specrun.runtime.memory.cells import STEP, Cells, count_cells, spread_cells
from specrun.runtime.memory.parts import ModelPart

_CPU_ONLY = Placement(devices=("none",))


class Counts(Protocol):
    """Where a plan has its numbers from."""

    def compute(self, part: ModelPart, n_ctx: int, *, nextn: bool = False) -> int:
        """Return the bytes of the compute buffers of a context, all on one device."""

    def cells(self, part: ModelPart, *, nextn: bool = False) -> Cells:
        """Return the cells of a part's context, layer by layer."""


class AskedCounts:
    """Counts for `Counts`, asked of llama.cpp once each. A context manager: it keeps models open.

    Raises as `Model` does for files that cannot be loaded, and `UnsupportedModelError` where
    llama.cpp does not tell what it allocates.
    """

    def __init__(self) -> None:
        self._opened = ExitStack()
        self._models: dict[tuple[object, bool], CountedModel] = {}
        self._found: dict[tuple[object, ...], Breakdown] = {}
        self._cells: dict[tuple[object, ...], Cells] = {}

    def __enter__(self) -> AskedCounts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the models; what was asked stays known."""
        self._opened.close()
        self._models.clear()

    def compute(self, part: ModelPart, n_ctx: int, *, nextn: bool = False) -> int:
        """See `Counts`."""
        return self._ask(part, n_ctx, nextn=nextn).compute

    def cells(self, part: ModelPart, *, nextn: bool = False) -> Cells:
        """See `Counts`; spread evenly where llama.cpp counts otherwise than the header does."""
        key = part.model.path, part.context, part.n_rollback, nextn
        known = self._cells.get(key)
        if known is None:
            first, second = (self._ask(part, n * STEP, nextn=nextn).cells for n in (1, 2))
            flash = part.context.flash_attention != "off"
            counted = count_cells(
                part.model, part.context, n_rollback=part.n_rollback, nextn=nextn, flash=flash
            )
            if (counted.total(STEP), counted.total(2 * STEP)) == (first, second):
                known = counted
            else:
                known = spread_cells(part.model.n_layers, second - first, 2 * first - second)
            self._cells[key] = known
        return known

    def _ask(self, part: ModelPart, n_ctx: int, *, nextn: bool) -> Breakdown:
        options = dataclasses.replace(part.context, n_ctx=n_ctx, n_rollback=part.n_rollback)
        key = part.model.path, options, nextn
        if key not in self._found:
            with placing(_CPU_ONLY):
                model = self._model(part)
                self._found[key] = sum_of(asked_breakdown(model, options, nextn=nextn))
        return self._found[key]

    def _model(self, part: ModelPart) -> CountedModel:
        key = part.model.path, part.nextn
        model = self._models.get(key)
        if model is None:
            model = CountedModel(part.model.path, load_nextn=part.nextn)
            self._models[key] = self._opened.enter_context(model)
        return model


def sum_of(found: Mapping[str, Breakdown]) -> Breakdown:
    """Return the sum over all devices."""
    return sum(found.values(), Breakdown())


def asked_breakdown(
    model: CountedModel, options: object, *, nextn: bool = False
) -> dict[str, Breakdown]:
    """Return what a context of a model would take, by the names of devices (`HOST`: the CPU's)."""
    with (MtpContext if nextn else Context)(model, options) as context:  # type: ignore[arg-type]
        return memory_breakdown(context)


def asked_on_devices(part: ModelPart, n_ctx: int, n_gpu_layers: int) -> dict[str, Breakdown]:
    """Return what a part takes on the devices in force (`placing`), asked of llama.cpp."""
    options = dataclasses.replace(part.context, n_ctx=n_ctx, n_rollback=part.n_rollback)
    found: dict[str, Breakdown] = {HOST: Breakdown()}
    with CountedModel(
        part.model.path, n_gpu_layers=n_gpu_layers, load_nextn=part.nextn, drafts=part.drafts
    ) as model:
        alone = part.model.n_nextn == part.model.n_layers or model.nextn.alone
        for nextn in [*([] if alone else [False]), *([True] if part.nextn else [])]:
            for name, counts in asked_breakdown(model, options, nextn=nextn).items():
                known = found.get(name, Breakdown())
                # A second context shares the weights.
                weights = counts.weights if not known.weights else 0
                found[name] = known + dataclasses.replace(counts, weights=weights)
    return found
