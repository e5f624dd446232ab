"""Weight types of one model on one machine: which gains most from drafting, and which is fastest.

What drafts gain hangs on the steps of T(n), the time of n tokens, and these on the kernels of the
weight type: where eight tokens take little more than one, most is gained. Compared are the curves
that were measured here, of files that lie side by side and differ in the type that their names say.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.quantizer.types import FILE_TYPES
from specrun.runtime.costs.curves import CostCurve
from specrun.runtime.costs.stored_curves import load_curve
from specrun.runtime.costs.theory import expected_tokens

ACCEPTED = 0.8
"""The share of drafted tokens that a comparison takes to be accepted."""

_LONGEST = 10
_NAMES = "|".join(sorted(FILE_TYPES, key=len, reverse=True))
_TYPE = re.compile(rf"[-._](?:{_NAMES})(?![0-9A-Za-z_])", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class WeightType:
    """A file and its curve; None where it was not measured with these settings."""

    file: Path
    curve: CostCurve | None

    @property
    def plain(self) -> float:
        """Tokens a second without drafting, 0 where nothing is known."""
        return 1.0 / self.curve.seconds(1) if self.curve else 0.0

    @property
    def gain(self) -> float:
        """The speed-up of the best chain whose drafts cost nothing and are `ACCEPTED`."""
        if self.curve is None:
            return 0.0
        curve = self.curve.as_padded()
        chains = (expected_tokens(ACCEPTED, n) / curve.seconds(1 + n) for n in range(_LONGEST + 1))
        return curve.seconds(1) * max(chains)


def same_model(target: Path) -> list[Path]:
    """Return the files beside a target whose names differ from its own in the weight type alone."""
    bare = _TYPE.sub("", target.name)
    if bare == target.name:
        return []
    beside = sorted(target.parent.glob("*.gguf"))
    return [path for path in beside if path != target and _TYPE.sub("", path.name) == bare]


def weight_types(
    target: Path, curve: CostCurve, context: ContextOptions, n_gpu_layers: int
) -> list[WeightType]:
    """Return the target and its other weight types, the one that gains most first."""
    own = WeightType(target, curve)
    others = (
        WeightType(path, load_curve(path, context, n_gpu_layers)) for path in same_model(target)
    )
    return sorted([own, *others], key=lambda known: -known.gain)
