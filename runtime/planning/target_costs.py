"""Measures what evaluations of one model cost: all that drafters without a model need to plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from specrun.bindings.context import Context, ContextOptions
from specrun.bindings.model import Model
from specrun.runtime.pairing import check_draftable
from specrun.runtime.planning.cost_curves import CostCurve
from specrun.runtime.planning.costs import MEASURED_SIZES, measure_cost_curve
from specrun.runtime.planning.offload import LayerCount, resolve_gpu_layers

__all__ = ["measure_target_costs"]


def measure_target_costs(
    target: Path,
    context: ContextOptions,
    *,
    n_gpu_layers: LayerCount = "auto",
    seconds: float = 12.0,
    use_mmap: bool = True,
    progress: Callable[[float], None] = lambda _: None,
) -> CostCurve:
    """Return the target's cost curve with these settings, measured in about so many seconds.

    `progress` is told the share that is done. Raises as `Model` and `Context` do, and UnsupportedModelError for a
    model that cannot verify drafts.
    """
    with Model(target, n_gpu_layers=resolve_gpu_layers(n_gpu_layers, target), use_mmap=use_mmap) as model:
        check_draftable(model)
        options = dataclasses.replace(
            context,
            n_ctx=context.size_for(model),
            n_batch=max(max(MEASURED_SIZES), context.n_batch),
            n_outputs=max(MEASURED_SIZES),
        )
        with Context(model, options) as opened:
            return measure_cost_curve(opened, seconds=seconds, progress=progress)
