"""Cost curves of targets: measured on this machine (`specrun tune`), or else typical ones.

A curve belongs to a machine, a model file and the settings that change what evaluations cost; where
one of them differs it is not used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import FileMissingError
from specrun.bindings.kept_file import count_in, json_object, list_in, number_in, read_kept
from specrun.bindings.machine.devices import describe_machine
from specrun.runtime.costs.curves import CostCurve
from specrun.runtime.costs.tuned import (
    cache_file,
    describe_file,
    describe_settings,
    write_json,
)

_FORMAT = 2  # 1: medians, which pauses of the machine could fool
_SHORTEST, _LONGEST = 1e-9, 1e6  # seconds of an evaluation that can be true

# Relative to one token. CPU: a 400M F16 Llama on two AVX-512 cores; quantized models are steeper
# still. GPU: what a memory-bound 7B shows on current cards, which pay little for rows until the
# matrix kernels change.
_SIZES = (1, 2, 4, 6, 8, 16, 32, 64)
_CPU_TIMES = (1.0, 1.37, 1.64, 1.85, 2.65, 3.3, 5.8, 10.8)
_GPU_TIMES = (1.0, 1.06, 1.1, 1.14, 1.18, 1.3, 1.45, 1.8)
TYPICAL_CPU = CostCurve(_SIZES, _CPU_TIMES, _CPU_TIMES)
TYPICAL_GPU = CostCurve(_SIZES, _GPU_TIMES, _GPU_TIMES)


def typical_curve(n_gpu_layers: int) -> CostCurve:
    """Return a curve, relative to one token, for `n_gpu_layers` (-1: all) of a target on a GPU."""
    return TYPICAL_GPU if n_gpu_layers != 0 else TYPICAL_CPU


def known_curve(target: Path, context: ContextOptions, n_gpu_layers: int) -> CostCurve:
    """Return the curve measured for this target, machine and settings, or else a typical one."""
    return measured_or_typical(target, context, n_gpu_layers)[0]


def measured_or_typical(
    target: Path, context: ContextOptions, n_gpu_layers: int
) -> tuple[CostCurve, bool]:
    """Return a curve for a file and these settings, and whether it was measured, not typical."""
    measured = load_curve(target, context, n_gpu_layers)
    return measured or typical_curve(n_gpu_layers), measured is not None


def save_curve(curve: CostCurve, target: Path, context: ContextOptions, n_gpu_layers: int) -> Path:
    """Store a measured curve over an earlier one of this target; return the file."""
    content = _circumstances(target, context, n_gpu_layers)
    content |= {"sizes": curve.sizes, "reused": curve.reused, "rebuilt": curve.rebuilt}
    content |= {"spread": curve.spread}
    return write_json(cache_file("curves", target), content)


def load_curve(target: Path, context: ContextOptions, n_gpu_layers: int) -> CostCurve | None:
    """Return the curve measured for this target, machine and settings; None without one.

    A file that is damaged is left out, with a warning in the log.
    """
    try:
        wanted = _circumstances(target, context, n_gpu_layers)
    except (OSError, FileMissingError):  # left to whoever opens it
        return None
    # Through JSON and back, so that equal circumstances compare equal (tuples become lists).
    as_stored = json.loads(json.dumps(wanted))
    return read_kept(
        cache_file("curves", target),
        lambda data: _curve(json_object(data), as_stored),
        what=f"the cost curve of {target.name}",
        advice="specrun tune measures a new one",
    )


def _curve(content: Mapping[str, Any], wanted: Mapping[str, Any]) -> CostCurve | None:
    """Return a stored curve, None for one of other circumstances."""
    if any(content[name] != value for name, value in wanted.items()):
        return None
    sizes = tuple(count_in(size, 1) for size in list_in(content["sizes"]))
    reused, rebuilt = (_times(content[name]) for name in ("reused", "rebuilt"))
    return CostCurve(sizes, reused, rebuilt, tuple(map(number_in, list_in(content["spread"]))))


def _times(values: object) -> tuple[float, ...]:
    return tuple(number_in(seconds, _SHORTEST, _LONGEST) for seconds in list_in(values))


def _circumstances(target: Path, context: ContextOptions, n_gpu_layers: int) -> dict[str, Any]:
    settings = describe_settings(context, n_gpu_layers, 0)
    # A target's curve holds whatever drafts for it.
    del settings["GPU layers of the draft model"]
    return {
        "format": _FORMAT,
        "machine": describe_machine(),
        "target": describe_file(target),
        "settings": settings,
    }
