"""Cost curves of targets: those that `specrun tune` measured on this machine, and typical ones
where it has not.

A curve belongs to a machine, a model file and the settings that change what evaluations cost; where
one of them differs it is not used.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from specrun.bindings.atomic import atomic_path
from specrun.bindings.context_options import ContextOptions
from specrun.bindings.errors import FileMissingError, OptionError
from specrun.runtime.costs.curves import CostCurve
from specrun.runtime.costs.tuned import (
    cache_folder,
    describe_file,
    describe_machine,
    describe_settings,
)

_FORMAT = 1
_MAX_FILE = 1 << 20

# Relative to one token. CPU: a 400M F16 Llama on two AVX-512 cores; quantized models are steeper
# still. GPU: what a memory-bound 7B shows on current cards, which pay little for rows until the
# matrix kernels change.
_SIZES = (1, 2, 4, 6, 8, 16, 32, 64)
_CPU_TIMES = (1.0, 1.37, 1.64, 1.85, 2.65, 3.3, 5.8, 10.8)
_GPU_TIMES = (1.0, 1.06, 1.1, 1.14, 1.18, 1.3, 1.45, 1.8)
TYPICAL_CPU = CostCurve(_SIZES, _CPU_TIMES, _CPU_TIMES)
TYPICAL_GPU = CostCurve(_SIZES, _GPU_TIMES, _GPU_TIMES)


def typical_curve(n_gpu_layers: int) -> CostCurve:
    """Return a curve, relative to one token, for a target of which so many layers lie on a GPU."""
    return TYPICAL_GPU if n_gpu_layers > 0 else TYPICAL_CPU


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
    path = _curve_file(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = _circumstances(target, context, n_gpu_layers)
    content |= {"sizes": curve.sizes, "reused": curve.reused, "rebuilt": curve.rebuilt}
    with atomic_path(path, force=True) as aside:
        aside.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return path


def load_curve(target: Path, context: ContextOptions, n_gpu_layers: int) -> CostCurve | None:
    """Return the curve measured for this target, machine and settings; None without one."""
    try:
        with _curve_file(target).open("rb") as file:
            data = file.read(_MAX_FILE + 1)
        content = json.loads(data.decode("utf-8")) if len(data) <= _MAX_FILE else None
        if not isinstance(content, dict):
            return None
        wanted = json.loads(json.dumps(_circumstances(target, context, n_gpu_layers)))
        if any(content.get(name) != value for name, value in wanted.items()):
            return None
        sizes, reused, rebuilt = (content[name] for name in ("sizes", "reused", "rebuilt"))
        return CostCurve(
            tuple(map(int, sizes)), tuple(map(float, reused)), tuple(map(float, rebuilt))
        )
    except (
        OSError,
        FileMissingError,
        OptionError,
        KeyError,
        TypeError,
        ValueError,
        RecursionError,
    ):
        return None


def _circumstances(target: Path, context: ContextOptions, n_gpu_layers: int) -> dict[str, Any]:
    settings = describe_settings(context, n_gpu_layers, 0)
    del settings["GPU layers of the draft model"]
    return {
        "format": _FORMAT,
        "machine": describe_machine(),
        "target": describe_file(target),
        "settings": settings,
    }


def _curve_file(target: Path) -> Path:
    key = hashlib.sha256(
        str(target.expanduser().resolve()).encode("utf-8", "surrogateescape")
    ).hexdigest()[:16]
    return cache_folder() / "curves" / f"{target.stem[:40]}-{key}.json"
