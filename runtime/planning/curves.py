"""Cost curves: seconds of an evaluation by its number of tokens, measured or learnt."""

from __future__ import annotations

import functools
import itertools
import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from specrun.bindings.errors import OptionError

# == Cost curves ===================================================================================


_WORTH_PADDING = 0.05  # of the time of a batch: the least saving of padding

Source = Literal["typical", "measured", "learnt"]
"""Where a curve comes from: machines of a kind, this one, or the rounds that are being decoded."""


@dataclass(unsafe_hash=True)
class CostCurve:
    """Seconds of one evaluation of n tokens, measured at ascending `sizes`.

    `reused` is the time when the evaluation before had the same shape, so that llama.cpp reuses its
    graph; `rebuilt` the time after one of another shape. `spread` is by which share the median of
    the repetitions of a size lay above the least, which counts; empty if nothing was
    repeated. `source` is the origin of the curve, and `is_first` means that it was measured in a
    moment, when the file was loaded for the first time.
    """

    sizes: tuple[int, ...]
    reused: tuple[float, ...]
    rebuilt: tuple[float, ...]
    spread: tuple[float, ...] = ()
    source: Source = field(default="measured", compare=False)
    is_first: bool = field(default=False, compare=False)

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

    def to_dict(self) -> dict[str, Any]:
        """Return the times as a mapping, ready for JSON."""
        return {name: getattr(self, name) for name in ("sizes", "reused", "rebuilt", "spread")}

    def seconds(self, n: int, *, rebuilt: bool = False) -> float:
        """Return the time of n tokens, on straight lines between the measured sizes and beyond."""
        key = -n if rebuilt else n
        seconds = self._known.get(key)
        if seconds is None:
            times = self.rebuilt if rebuilt else self.reused
            seconds = self._known[key] = _seconds(self.sizes, times, n)
        return seconds

    @functools.cached_property
    def _known(self) -> dict[int, float]:
        """Times by n, or -n if the graph is rebuilt: plans need the same few in every round."""
        return {}

    def spread_at(self, n: int) -> float:
        """Return the spread of the nearest sizes, the larger of two; 0 if it is not known."""
        if not self.spread:
            return 0.0
        above = min(bisect_left(self.sizes, n), len(self.sizes) - 1)
        below = above if self.sizes[above] <= n else above - 1
        return max(self.spread[below], self.spread[above])

    def wider(self, n: int, most: int, step: int = 1) -> int:
        """Return how many tokens to evaluate in place of n, at most so many: n, or a cheaper width.

        That is a width that was measured, or with a `step` n and a multiple of it.

        Kernels of quantized weights may take less for 8 tokens than for 5: then 3 are added that
        nobody reads. A width that is cheaper by no more than the spread may only be noise. A single
        token stays alone: that is plain decoding, which all else is compared with.
        """
        if n < 2 or not self.spread:
            return n
        steps = self.sizes if step == 1 else range(n + step, most + 1, step)
        sizes = [size for size in steps if n < size <= most]
        best = min(sizes, key=self.seconds, default=n)
        margin = 1.0 + max(_WORTH_PADDING, self.spread_at(n), self.spread_at(best))
        return best if self.seconds(best) * margin < self.seconds(n) else n

    def as_padded(self, most: int | None = None) -> CostCurve:
        """Return the curve of padded batches: from two tokens on, min over m >= n of T(m).

        They are padded to at most `most` tokens: wider ones stay.
        Within the spread nothing is padded, but then T(n) is no more than T(m) either: a batch is
        a part of the larger one, and noise only adds.
        """

        n = len(self.sizes) if most is None else bisect_right(self.sizes, max(1, most))

        def least(times: tuple[float, ...]) -> tuple[float, ...]:
            from_above = [*itertools.accumulate(reversed(times[1:n]), min)]
            return (times[0], *reversed(from_above), *times[n:])

        return replace(self, reused=least(self.reused), rebuilt=least(self.rebuilt))


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


# Relative to one token. CPU: a 400M F16 Llama on two AVX-512 cores; quantized models are steeper
# still. GPU: as a memory-bound 7B on current cards, which pay little for rows until the
# matrix kernels change.
_SIZES = (1, 2, 4, 6, 8, 16, 32, 64)
_CPU_TIMES = (1.0, 1.37, 1.64, 1.85, 2.65, 3.3, 5.8, 10.8)
_GPU_TIMES = (1.0, 1.06, 1.1, 1.14, 1.18, 1.3, 1.45, 1.8)
TYPICAL_CPU = CostCurve(_SIZES, _CPU_TIMES, _CPU_TIMES, source="typical")
TYPICAL_GPU = CostCurve(_SIZES, _GPU_TIMES, _GPU_TIMES, source="typical")


def typical_curve(n_gpu_layers: int) -> CostCurve:
    """Return a curve, relative to one token, for `n_gpu_layers` (-1: all) of a target on a GPU."""
    return TYPICAL_GPU if n_gpu_layers != 0 else TYPICAL_CPU


@dataclass(frozen=True, slots=True)
class RoundCosts:
    """All that decides how long a round takes.

    The target evaluates the same shape round after round, so its graph is reused; the draft model's
    is if one depth is as wide as the one before. The others are seconds of Python around the
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
        """Return the draft model's time for `width` nodes after `before` (None: the root)."""
        rebuilt = before is not None and width != before
        return self.draft.seconds(width, rebuilt=rebuilt) + width * self.per_law

    def verify_seconds(self, nodes: int) -> float:
        """Return the time of the target and the loop for a tree of so many nodes."""
        python = self.per_round + self.per_tree + nodes * self.per_node
        # The root, the token that was decided last, is evaluated with the tree.
        return self.target.seconds(nodes + 1) + python

    def round_seconds(self, nodes: int, widths: Sequence[int]) -> float:
        """Return the time of a round with a tree whose depths are drafted in such evaluations."""
        # Each depth with the width before it, which decides whether the draft model's graph is
        # rebuilt.
        return self.verify_seconds(nodes) + sum(map(self.depth_seconds, widths, (None, *widths)))


def levelled(row: Sequence[float]) -> list[float]:
    """Return shares that do not rise with rank: runs that do, by noise, become their mean.

    Whoever drafts a later token drafts the earlier ones too: only the sum counts, which stays.
    """
    groups: list[tuple[float, int]] = []  # sum and length of runs of equal shares
    for share in row:
        total, length = share, 1
        # Pool adjacent violators, the means compared as products: no division on the way.
        while groups and groups[-1][0] * length < total * groups[-1][1]:
            before = groups.pop()
            total, length = total + before[0], length + before[1]
        groups.append((total, length))
    return [total / length for total, length in groups for _ in range(length)]


# == Cost curves that every round of decoding corrects =============================================
#
# It begins as the curve that was measured or is typical, and holds as far as nothing else was seen.
# For each width the lower median of its last rounds counts, over that of rounds of one token:
# pauses of the machine lengthen single rounds, and whatever slows all of them cancels out. Between
# widths that were seen the correction (a factor, in logarithms) is interpolated, and goes on beyond
# the largest; it fades while a width is not seen, so that one bad round does not count for ever.
# More tokens are then expected to take less time only if the curve descended as it began, or of two
# tokens and one: the part above the least of all larger widths is set aside, the rest is made to
# ascend (isotonic regression), and that part is added again.


_KEPT = 9  # rounds of a width that count
_ENOUGH = 3  # rounds of one token from which they alone give the time of one token
STALL = 2.0
"""Rounds that take more than so many usual ones were disturbed, and count as so many."""
_DOUBT = 0.5  # rounds that the first belief counts for, beside those that were seen of a width
_FADING = 256  # rounds after which half of an unseen width's evidence is forgotten
_STALE = 8  # rounds after which the curve is fitted again
_OFTEN = 4  # of rounds of one token, which come by the hundred, every fourth is counted
_TICK = 1e-9  # the shortest round: clocks may stand still
_BELIEVED = 3  # drafts that the estimate counts for: as many are cold at first


class LiveCurve(CostCurve):
    """A curve that goes on learning: `seconds` is the estimate now, the fields hold the first one.

    Whatever plans with a `CostCurve` plans with this one. If nothing is learnt it stays as it
    began. `_table[n]` is the estimate for n tokens.
    """

    def __init__(self, start: CostCurve) -> None:
        super().__init__(start.sizes, start.reused, start.rebuilt, start.spread, "learnt")
        self._start, self._single = start, start.seconds(1)
        self._padded = start.as_padded()
        self._times: dict[int, deque[float]] = {}
        self._seen: dict[int, int] = {}  # the round in which a width was last seen
        self._round = self._fitted = self._n_single = 0
        self._estimates: dict[int, float] = {}
        self._table: list[float] = []

    @property
    def widest(self) -> int:
        """The largest width that was seen; 0 until two rounds of a single token were."""
        return max(self._times) if len(self._times.get(1, ())) > 1 else 0

    @property
    def is_told(self) -> bool:
        """Whether it holds the time of plain rounds here: that was measured, or seen."""
        return bool(self.spread) or self.widest > 0

    @property
    def is_timed(self) -> bool:
        """Whether rounds are timed, and their reference is known.

        They are not if an ensemble draws tokens: no clock may change the drafts of its members.
        """
        return self.is_told and bool(self._times)

    def learn(self, width: int, seconds: float) -> None:
        """Count a round in which so many tokens were evaluated."""
        self._round += 1
        self._seen[width] = self._round
        times = self._times.get(width)
        if width == 1:
            self._n_single += 1
            if times is not None and len(times) == _KEPT and self._n_single % _OFTEN != 1:
                return
        if times is None:
            times = self._times[width] = deque(maxlen=_KEPT)
            self._estimates[width] = seconds
        times.append(max(_TICK, min(seconds, STALL * self._estimates[width])))
        # A fit takes some tens of microseconds: it waits, unless little was known.
        if len(times) <= _ENOUGH or self._round - self._fitted >= _STALE:
            self._fit()

    def pass_over(self, rounds: int) -> None:
        """Count rounds of one token that were not timed: earlier ones are as much older."""
        self._round += rounds

    def seconds(self, n: int, *, rebuilt: bool = False) -> float:
        """Return the time of n tokens, as estimated now."""
        start, table = self._start, self._table
        if n < len(table):
            seconds = table[n]
        elif not table:
            seconds = start.seconds(n)
        else:
            # Beyond the largest width that was seen it goes on as it began.
            last = len(table) - 1
            seconds = table[last] * start.seconds(n) / start.seconds(last)
        return seconds * start.seconds(n, rebuilt=True) / start.seconds(n) if rebuilt else seconds

    def _fit(self) -> None:
        self._fitted = self._round
        self._estimates = {width: lower_median(times) for width, times in self._times.items()}
        single = self._single_seconds()
        factors = [(1, 0.0)]
        for width in sorted(self._times):
            if width > 1:
                factors.append((width, self._factor(width, single)))
        most = factors[-1][0]
        # The least that so many tokens or more took over one, as the curve began, corrected; then
        # how many times that the width itself took.
        padded, start = self._padded.seconds, self._start.seconds
        ratios = [
            padded(n) / self._single * math.exp(_between(factors, n)) for n in range(most, 1, -1)
        ]
        # One token stands apart: two cost less if a kernel likes them better.
        ascending = enumerate(reversed(levelled(ratios)), 2)
        wider = (single * ratio * (start(n) / padded(n)) for n, ratio in ascending)
        self._table = [single, single, *wider]

    def _single_seconds(self) -> float:
        """Return the time of one token."""
        alone = self._times.get(1, ())
        if alone:
            # The first round of an answer is often slow: of few the least counts.
            return self._estimates[1] if len(alone) >= _ENOUGH else min(alone)
        return min(min(times) / self._expected(width) for width, times in self._times.items())

    def _factor(self, width: int, single: float) -> float:
        """Return the logarithm of a width's time over the expected one, as estimated."""
        count, age = len(self._times[width]), self._round - self._seen[width]
        weight = count / (count + _DOUBT) * math.exp2(-age / _FADING)
        return weight * math.log(self._estimates[width] / single / self._expected(width))

    def _expected(self, width: int) -> float:
        """Return the time of a width over that of one token, at first."""
        return self._start.seconds(width) / self._single


class DraftCost:
    """The time of a draft: `rounds` plain ones for so many depths, and their time in seconds.

    At first a plain round is one of the target's (`plain`), for a drafter takes its share of that.
    If a `clock` receives the start and the end of a draft, it is the lower median of the last ones:
    graphs are built and weights read for the first time in a few of them. Nothing counts before
    `told`: then the target's rounds are timed, too.
    """

    def __init__(
        self,
        rounds: Callable[[int], float],
        plain: Callable[[], float],
        clock: Callable[[], float] | None = None,
        told: Callable[[], bool] = lambda: True,
    ) -> None:
        self._rounds, self._plain, self._clock, self._told = rounds, plain, clock, told
        self._seen: deque[float] = deque(maxlen=_KEPT)  # seconds of a plain round
        self._usual: float | None = None  # their median: rounds need it several times
        self._started: float | None = None

    def seconds(self, depth: int) -> float:
        """Return the estimated time of a draft of so many depths."""
        return (self._usual or self._plain()) * self._rounds(depth)

    def start(self) -> None:
        """Note that a draft begins."""
        if self._clock is not None:
            self._started = self._clock()

    def end(self, depth: int) -> None:
        """Note that a draft of so many depths is done."""
        started, self._started = self._started, None
        if self._clock is not None and started is not None and depth and self._told():
            self._seen.append(max(_TICK, self._clock() - started) / self._rounds(depth))
            self._usual = lower_median([self._plain()] * _BELIEVED + [*self._seen])


def lower_median(times: Sequence[float] | deque[float]) -> float:
    """Return the median, of an even number of times the lower of the two."""
    return sorted(times)[(len(times) - 1) // 2]


def _between(points: Sequence[tuple[int, float]], n: int) -> float:
    """Return the value at n, on straight lines over log n, and level behind the last point."""
    above = bisect_left(points, (n, -math.inf))
    if above == len(points):
        return points[-1][1]
    (size, value), (before, low) = points[above], points[above - 1]
    share = math.log(n / before) / math.log(size / before)
    return low + share * (value - low)
