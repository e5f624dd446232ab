"""Best points of cascades: the fastest at the target's quality, the best at its latency.

The table of the paper's section 6 (Narasimhan et al. 2024, table 2): of each method's points, one
for each alpha, the fastest that is as good as the plain target, and the best that is as fast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from specrun.bench.cascade.comparison import (
    LOWER_IS_BETTER,
    ORACLE,
    PLAIN_SMALL,
    PLAIN_TARGET,
    CascadePoint,
    Metric,
)


@dataclass(frozen=True, slots=True)
class BestPoints:
    """The best of a method's points at one setting, by one measure of quality.

    `fastest` is the point of least latency among those whose quality is the target's, within two
    standard errors of their difference; `best` that of best quality among those no slower. None
    where no point is. `over_exact` is the speed-up of `fastest` over exact speculation.
    """

    method: str
    metric: Metric
    temperature: float
    top_p: float
    draft_length: int
    target_quality: float
    fastest: CascadePoint | None
    over_exact: float | None
    best: CascadePoint | None


def metric_of(points: Sequence[CascadePoint]) -> Metric:
    """Return the measure of quality that points are compared by.

    ROUGE-2 where there are references, else the cross-entropy of real text; where some law gives a
    real token no chance, that is infinite, and its expected accuracy is taken.
    """
    if all(point.rouge_2 is not None for point in points):
        return "rouge_2"
    # Those that state a law for a place: the others have neither.
    stated = [point for point in points if point.expected_accuracy is not None]
    finite = all(point.cross_entropy is not None for point in stated)
    return "cross_entropy" if finite else "expected_accuracy"


def settings_of(points: Sequence[CascadePoint]) -> list[tuple[float, float, int]]:
    """Return the settings (temperature, top-p, draft length) that were measured, in order."""
    keys = (
        (point.temperature, point.top_p, point.draft_length)
        for point in points
        if point.draft_length is not None
    )
    return list(dict.fromkeys(keys))


def points_at(
    points: Sequence[CascadePoint], setting: tuple[float, float, int]
) -> list[CascadePoint]:
    """Return the points of a setting, with those of plain models, which draft nothing."""
    temperature, top_p, length = setting
    return [
        point
        for point in points
        if (point.temperature, point.top_p) == (temperature, top_p)
        and point.draft_length in (None, length)
    ]


def best_points(points: Sequence[CascadePoint], metric: Metric | None = None) -> list[BestPoints]:
    """Return the best points of each method at each setting, by a metric (None: `metric_of`)."""
    found: list[BestPoints] = []
    for setting in settings_of(points):
        here = points_at(points, setting)
        by = metric or metric_of(here)
        target = next(point for point in here if point.method == PLAIN_TARGET)
        exact = next(point for point in here if point.method == "exact")
        wanted = target.quality(by)
        if wanted is None:
            continue
        left_out = (PLAIN_TARGET, PLAIN_SMALL, ORACLE)
        for method in dict.fromkeys(point.method for point in here):
            if method not in left_out:
                own = [point for point in here if point.method == method]
                found.append(_best(own, setting, by, target, wanted, exact))
    return found


def _best(
    own: Sequence[CascadePoint],
    setting: tuple[float, float, int],
    metric: Metric,
    target: CascadePoint,
    wanted: float,
    exact: CascadePoint,
) -> BestPoints:
    sign = -1.0 if metric in LOWER_IS_BETTER else 1.0
    known = [(point, sign * value) for point in own if (value := point.quality(metric)) is not None]
    as_good = [
        point
        for point, value in known
        if value >= sign * wanted - 2.0 * math.hypot(target.doubt(metric), point.doubt(metric))
    ]
    as_fast = [(point, value) for point, value in known if (point.speed_up or 0.0) >= 1.0]
    fastest = max(as_good, key=lambda point: point.speed_up or 0.0, default=None)
    best = max(as_fast, key=lambda pair: pair[1], default=(None, 0.0))[0]
    over = None
    if fastest is not None and fastest.speed_up and exact.speed_up:
        over = fastest.speed_up / exact.speed_up
    temperature, top_p, length = setting
    return BestPoints(
        own[0].method, metric, temperature, top_p, length, wanted, fastest, over, best
    )
