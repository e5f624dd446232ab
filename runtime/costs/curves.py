"""Cost curves: seconds of an evaluation by its number of tokens, and of a round with a tree."""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from specrun.bindings.errors import OptionError
from specrun.runtime.trees import Topology

_WORTH_PADDING = 0.05  # of the time of a batch: what padding must save at the least


class _Times(dict[int, float]):
    """Times by number of tokens: drafters that plan ask for the same few in every round."""

    def __init__(self, sizes: tuple[int, ...], times: tuple[float, ...]) -> None:
        self._measured = sizes, times

    def __missing__(self, n: int) -> float:
        self[n] = seconds = _seconds(*self._measured, n)
        return seconds


@dataclass(frozen=True)
class CostCurve:
    """Seconds of one evaluation of n tokens, measured at ascending `sizes`.

    `reused` is the time when the evaluation before had the same shape, so that llama.cpp reuses its
    graph; `rebuilt` the time after one of another shape. `spread` is by which share the median of
    the repetitions of a size lay above the least, which is what counts; empty where nothing was
    repeated.
    """

    sizes: tuple[int, ...]
    reused: tuple[float, ...]
    rebuilt: tuple[float, ...]
    spread: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.sizes) == len(self.reused) == len(self.rebuilt) > 0:
            raise OptionError("a cost curve needs at least one size, and two times for each")
        if self.spread and len(self.spread) != len(self.sizes):
            raise OptionError("the spread of a cost curve is given for each size, or for none")
        if self.sizes[0] != 1 or any(a >= b for a, b in itertools.pairwise(self.sizes)):
            raise OptionError("the sizes of a cost curve start at 1 and ascend")
        if not all(0.0 < seconds < float("inf") for seconds in (*self.reused, *self.rebuilt)):
            raise OptionError("the times of a cost curve are positive")
        if not all(0.0 <= share < float("inf") for share in self.spread):
            raise OptionError("the spread of a cost curve is a share, 0 or more")

    @staticmethod
    def flat(seconds: Sequence[float]) -> CostCurve:
        """Return the curve of these times for 1, 2, 3, ... tokens, rebuilding for nothing."""
        return CostCurve(tuple(range(1, len(seconds) + 1)), tuple(seconds), tuple(seconds))

    def seconds(self, n: int, *, rebuilt: bool = False) -> float:
        """Return the time of n tokens, on straight lines between what was measured and beyond."""
        return (self._rebuilt_at if rebuilt else self._reused_at)[n]

    @functools.cached_property
    def _reused_at(self) -> _Times:
        return _Times(self.sizes, self.reused)

    @functools.cached_property
    def _rebuilt_at(self) -> _Times:
        return _Times(self.sizes, self.rebuilt)

    def spread_at(self, n: int) -> float:
        """Return the spread of the nearest sizes, the larger of two; 0 where it is not known."""
        if not self.spread:
            return 0.0
        above = min(bisect_left(self.sizes, n), len(self.sizes) - 1)
        below = above if self.sizes[above] <= n else above - 1
        return max(self.spread[below], self.spread[above])

    def wider(self, n: int, most: int) -> int:
        """Return how many tokens to evaluate in place of n, at most so many: n, or what is cheaper.

        Kernels of quantized weights may take less for 8 tokens than for 5: then 3 are added that
        nobody reads. What is cheaper by no more than the spread may only be noise. A single token
        stays alone: that is plain decoding, which all else is compared with.
        """
        if n < 2 or not self.spread:
            return n
        sizes = [size for size in self.sizes if n < size <= most]
        best = min(sizes, key=self.seconds, default=n)
        margin = 1.0 + max(_WORTH_PADDING, self.spread_at(n), self.spread_at(best))
        return best if self.seconds(best) * margin < self.seconds(n) else n

    def as_padded(self) -> CostCurve:
        """Return what counts where batches are padded: from two tokens on, min over m >= n of T(m).

        Within the spread nothing is padded, but then T(n) is no more than T(m) either: a batch is
        a part of the larger one, and noise only adds.
        """

        def least(times: tuple[float, ...]) -> tuple[float, ...]:
            from_above = [*itertools.accumulate(reversed(times[1:]), min)]
            return (times[0], *reversed(from_above))

        return CostCurve(self.sizes, least(self.reused), least(self.rebuilt), self.spread)


def _seconds(sizes: tuple[int, ...], times: tuple[float, ...], n: int) -> float:
    """Return the time of n tokens; see `CostCurve.seconds`."""
    if n in sizes:
        return times[sizes.index(n)]
    # One point gives no slope: proportional is the cautious guess, and makes no tree look cheap.
    if len(sizes) == 1:
        return times[0] * n
    # Beyond the largest size the last measured segment goes on.
    above = next((i for i, size in enumerate(sizes) if size > n), len(sizes) - 1)
    (a, b), (low, high) = sizes[above - 1 : above + 1], times[above - 1 : above + 1]
    # Noise can make a segment fall: without the floor, times beyond it would go to 0 and below.
    return max(low + (high - low) * (n - a) / (b - a), min(times))


@dataclass(frozen=True, slots=True)
class RoundCosts:
    """All that decides how long a round takes.

    The target evaluates the same shape round after round, so its graph is reused; the draft model's
    is where one depth is as wide as the one before. The others are seconds of Python around the
    evaluations: `per_round` in any round, `per_tree` in one that drafts, `per_law` for each
    evaluated draft node, `per_node` for each drafted one.
    """

    target: CostCurve
    draft: CostCurve
    per_round: float = 0.0
    per_tree: float = 0.0
    per_law: float = 0.0
    per_node: float = 0.0

    @property
    def plain_seconds(self) -> float:
        """Seconds of one token without drafting."""
        return self.target.seconds(1) + self.per_round

    def depth_seconds(self, width: int, before: int | None) -> float:
        """Return what the draft model takes for `width` nodes after `before` (None: the root)."""
        rebuilt = before is not None and width != before
        return self.draft.seconds(width, rebuilt=rebuilt) + width * self.per_law

    def verify_seconds(self, nodes: int) -> float:
        """Return what the target and the loop take for a tree of so many nodes."""
        python = self.per_round + self.per_tree + nodes * self.per_node
        # The root, the token that was decided last, is evaluated with the tree.
        return self.target.seconds(nodes + 1) + python

    def round_seconds(self, topology: Topology) -> float:
        """Return what a round with this tree takes."""
        widths = topology.inner_widths
        # Each depth with the width before it, which says whether the draft model's graph is
        # rebuilt.
        drafting = sum(map(self.depth_seconds, widths, (None, *widths)))
        return self.verify_seconds(len(topology)) + drafting
