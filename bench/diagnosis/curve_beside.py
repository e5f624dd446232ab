"""The target's cost curve, measured between the answers that are compared with it.

A machine that others use, or that grows warm, is not as fast as it was when its curve was measured,
and not alike for all sizes: a curve of another minute may be 10 % off, which looks as if rounds
cost what they do not. So evaluations are timed behind each answer, and their medians count, not
their least: the answers have met the same disturbances.
"""

from __future__ import annotations

import dataclasses
import math

from specrun.bindings.contexts.context import Context
from specrun.runtime.engine import Runtime
from specrun.runtime.planning import MEASURED_SIZES, CostCurve, EvaluationTimes, sized_to_measure
from specrun.runtime.round import GenerationResult

_ALWAYS = tuple(size for size in MEASURED_SIZES if size <= 8)
ENOUGH = 16
"""Visits of each size whose median is to be believed."""


class CurveBeside:
    """Times evaluations of a runtime's target, in a small context of their own, behind each answer.

    `known` is the curve of another minute, which tells of larger sizes. `n_answers` will be timed,
    whose middle lies behind `depth` tokens: attention to them is a part of what a token costs.
    """

    def __init__(self, runtime: Runtime, known: CostCurve, n_answers: int, depth: int) -> None:
        self._known = known
        self._passes = math.ceil(ENOUGH / n_answers)
        model = runtime.model
        options = sized_to_measure(runtime.options.context, model)
        n_ctx = min(options.n_ctx, depth + max(MEASURED_SIZES))
        options = dataclasses.replace(options, n_ctx=n_ctx, n_outputs=max(MEASURED_SIZES))
        self._context = Context(model, options)
        depth = min(depth, self._context.n_ctx - max(MEASURED_SIZES))
        try:
            self._times = EvaluationTimes(self._context, max(0, depth))
        except BaseException:  # nobody enters what was never made
            self._context.close()
            raise
        self._is_backwards = False

    def __enter__(self) -> CurveBeside:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the context; what was timed stays."""
        self._context.close()

    def visit(self, answer: GenerationResult) -> None:
        """Time the smallest sizes, and those of the rounds of an answer that was just timed."""
        sizes = sorted({*_ALWAYS, *_widths(answer, max(MEASURED_SIZES))})
        for _ in range(self._passes):
            for size in reversed(sizes) if self._is_backwards else sizes:
                self._times.visit(size)
            self._is_backwards = not self._is_backwards

    def curve(self) -> CostCurve:
        """Return what was timed, and for larger sizes the known curve, in proportion."""
        here, known = self._times.typical(), self._known
        last = here.sizes[-1]
        beyond = [place for place, size in enumerate(known.sizes) if size > last]
        by = here.seconds(last) / known.seconds(last)
        return CostCurve(
            (*here.sizes, *(known.sizes[place] for place in beyond)),
            (*here.reused, *(by * known.reused[place] for place in beyond)),
            (*here.rebuilt, *(by * known.rebuilt[place] for place in beyond)),
        )


def _widths(answer: GenerationResult, most: int) -> tuple[int, ...]:
    """Return the whole numbers of tokens beside the mean of an answer's rounds with drafts."""
    stats = answer.stats
    tested = stats.tested_by_position
    if not tested or not tested[0]:
        return ()
    mean = 1.0 + (stats.drafted + stats.non_candidates) / tested[0]
    return tuple(min(most, width) for width in {math.floor(mean), math.ceil(mean)})
