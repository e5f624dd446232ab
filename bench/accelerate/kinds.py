"""The kind of head that is worth its training: EAGLE-3 or a block drafter, by one account.

EAGLE-3 guesses more and evaluates a layer for every token of a draft. A block drafter evaluates its
layers once. How often both are right was measured after trainings of the same time; the cost of
drafts and of their verification follows from the sizes of target and heads, and from the measured
curve.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, Literal

from specrun.runtime.planning import CostCurve

if TYPE_CHECKING:
    from specrun.train.target.shape import ModelShape

Kind = Literal["eagle3", "dflash"]

_RIGHT: dict[Kind, tuple[float, ...]] = {
    "eagle3": (0.39, 0.57, 0.62, 0.64, 0.43),
    "dflash": (0.33, 0.54, 0.43, 0.56, 0.20),
}
"""How often a token is right if those before were (docs/measurements.md, A block drafter)."""

_FIRST = 1  # the token of a block that is the text's last one


@dataclass(frozen=True, slots=True)
class HeadAccount:
    """Speed-ups that heads of a target should give, by its `shape` and cost `curve`.

    A token takes `multiplications` in the target. Heads predict `drafted` tokens; a block drafter
    has `n_layers` layers.
    """

    shape: ModelShape
    multiplications: float
    curve: CostCurve
    drafted: int
    n_layers: int

    def speed_up(self, kind: Kind) -> float:
        """Return the speed-up by chains of the best length."""
        kept: list[float] = [*accumulate(_RIGHT[kind], mul)]
        return max(
            (1.0 + sum(kept[:n])) / (self._rounds(1 + n) + self._drafting(kind, n))
            for n in range(1, 1 + len(kept))
        )

    @property
    def faster(self) -> Kind:
        """The kind that should be faster; of equals EAGLE-3."""
        return max(_RIGHT, key=self.speed_up)

    def _rounds(self, n: int) -> float:
        """Return the time of n tokens in one evaluation of the target, in plain rounds."""
        return self.curve.seconds(n) / self.curve.seconds(1)

    def _drafting(self, kind: Kind, n: int) -> float:
        """Return the time of a draft of n tokens, in plain rounds of the target."""
        hidden = self.shape.hidden
        output = self.drafted * hidden
        if kind == "eagle3":  # it reads an embedding beside each state
            return n * (self._layer(2 * hidden) + output) / self.multiplications
        block = self.n_layers * self._layer(hidden) + output
        return self._rounds(_FIRST + n) * block / self.multiplications

    def _layer(self, width: int) -> float:
        """Return the multiplications of a token in a layer whose attention reads such a width."""
        shape = self.shape
        keys_values = 2 * shape.n_kv_heads * shape.head_size
        return (
            width * (shape.hidden + keys_values)
            + shape.hidden**2
            + 3 * shape.hidden * shape.feed_forward
        )
