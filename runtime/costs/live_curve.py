"""Costs that are learnt while decoding: every round tells what it took to evaluate and to draft.

It begins as the curve that was measured or is typical, and is believed as far as nothing else was
seen. For each width the lower median of its last rounds counts, over that of rounds of one token:
pauses of the machine lengthen single rounds, and whatever slows all of them cancels out. Between
widths that were seen the correction (a factor, in logarithms) is interpolated, and goes on beyond
the largest; it fades while a width is not seen, so that one bad round is not believed for ever.
The whole then ascends (isotonic regression): no more tokens for less time, unless that was seen of
two tokens and one.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence

from specrun.runtime.costs.curves import CostCurve
from specrun.runtime.costs.medusa_tree import levelled

_KEPT = 9  # rounds of a width that count
_ENOUGH = 3  # rounds of one token from which they alone say what one token takes
STALL = 2.0
"""Rounds that take more than so many usual ones were disturbed, and count as so many."""
_DOUBT = 0.5  # rounds that the first belief counts for, beside those that were seen of a width
_FADING = 256  # rounds after which half of what an unseen width showed is forgotten
_STALE = 8  # rounds after which the curve is fitted again
_OFTEN = 4  # of rounds of one token, which come by the hundred, every fourth is counted
_TICK = 1e-9  # the shortest round: clocks may stand still
_BELIEVED = 3  # drafts that what was reckoned counts for: as many are cold at first


class LiveCurve(CostCurve):
    """A curve that goes on learning: `seconds` says what is believed now, the fields how it began.

    Whatever plans with a `CostCurve` plans with this one. Where nothing is learnt it stays as it
    began.
    """

    def __init__(self, start: CostCurve) -> None:
        super().__init__(start.sizes, start.reused, start.rebuilt, start.spread)
        # The fields of a frozen dataclass cannot be assigned to, and this is none of them.
        object.__setattr__(self, "_learnt", _Learnt(start))

    _learnt: _Learnt

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    def learn(self, width: int, seconds: float) -> None:
        """Count a round in which so many tokens were evaluated."""
        self._learnt.learn(width, seconds)

    def pass_over(self, rounds: int) -> None:
        """Count rounds of one token that nobody timed."""
        self._learnt.pass_over(rounds)

    @property
    def widest(self) -> int:
        """The largest width that was seen; 0 until two rounds of a single token were."""
        times = self._learnt.times
        return max(times) if len(times.get(1, ())) > 1 else 0

    def seconds(self, n: int, *, rebuilt: bool = False) -> float:
        """Return the time of n tokens, as it is believed now."""
        seconds = self._learnt.seconds(n)
        if not rebuilt:
            return seconds
        return seconds * super().seconds(n, rebuilt=True) / super().seconds(n)


class _Learnt:
    """What was seen of each width, and the curve fitted to it: `_table[n]` for n tokens."""

    def __init__(self, start: CostCurve) -> None:
        self._start, self._single = start, start.seconds(1)
        self.times: dict[int, deque[float]] = {}
        self._seen: dict[int, int] = {}  # the round in which a width was last seen
        self._round = self._fitted = self._n_single = 0
        self._estimates: dict[int, float] = {}
        self._table: list[float] = []

    def learn(self, width: int, seconds: float) -> None:
        """Count a round."""
        self._round += 1
        self._seen[width] = self._round
        times = self.times.get(width)
        if width == 1:
            self._n_single += 1
            if times is not None and len(times) == _KEPT and self._n_single % _OFTEN != 1:
                return
        if times is None:
            times = self.times[width] = deque(maxlen=_KEPT)
            self._estimates[width] = seconds
        times.append(max(_TICK, min(seconds, STALL * self._estimates[width])))
        # A fit takes some tens of microseconds: it waits, unless little was known.
        if len(times) <= _ENOUGH or self._round - self._fitted >= _STALE:
            self._fit()

    def pass_over(self, rounds: int) -> None:
        """Count rounds that nobody timed: what was seen before them is as much older."""
        self._round += rounds

    def seconds(self, n: int) -> float:
        """Return the time of n tokens."""
        table = self._table
        if n < len(table):
            return table[n]
        if not table:
            return self._start.seconds(n)
        # Beyond the largest width that was seen it goes on as it began.
        last = len(table) - 1
        return table[last] * self._start.seconds(n) / self._start.seconds(last)

    def _fit(self) -> None:
        self._fitted = self._round
        self._estimates = {width: lower_median(times) for width, times in self.times.items()}
        single = self._single_seconds()
        factors = [(1, 0.0)]
        for width in sorted(self.times):
            if width > 1:
                factors.append((width, self._factor(width, single)))
        most = factors[-1][0]
        ratios = [self._expected(n) * math.exp(_between(factors, n)) for n in range(most, 1, -1)]
        # One token stands apart: two cost less where a kernel likes them better.
        self._table = [single, single, *(single * ratio for ratio in reversed(levelled(ratios)))]

    def _single_seconds(self) -> float:
        """Return the time of one token."""
        alone = self.times.get(1, ())
        if alone:
            # The first round of an answer is often slow: of few the least counts.
            return self._estimates[1] if len(alone) >= _ENOUGH else min(alone)
        return min(min(times) / self._expected(width) for width, times in self.times.items())

    def _factor(self, width: int, single: float) -> float:
        """Return the logarithm of what a width takes over what was expected, as far as believed."""
        count, age = len(self.times[width]), self._round - self._seen[width]
        weight = count / (count + _DOUBT) * math.exp2(-age / _FADING)
        return weight * math.log(self._estimates[width] / single / self._expected(width))

    def _expected(self, width: int) -> float:
        """Return what a width took over one token, as it began."""
        return self._start.seconds(width) / self._single


class DraftCost:
    """What a draft takes: `rounds` plain ones for so many depths, and what they are in seconds.

    At first a plain round is one of the target's (`plain`), for a drafter takes what it reads of
    that. Where a `clock` is told when a draft starts and ends it is what its drafts say, the lower
    median of the last ones: graphs are built and weights read for the first time in a few of them.
    Nothing is believed before `told` says that the target's rounds are timed, too.
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
        self._usual: float | None = None  # their median: rounds ask for it several times
        self._started: float | None = None

    def seconds(self, depth: int) -> float:
        """Return what a draft of so many depths takes, as it is believed now."""
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
