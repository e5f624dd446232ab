"""The curve that is measured between answers: which sizes, where, and what counts."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from specrun.bench.diagnosis import pair
from specrun.bench.diagnosis.pair import CurveBeside
from specrun.bindings.contexts import Batch, Context, Rows
from specrun.bindings.errors import DecodeError
from specrun.runtime.engine import Runtime
from specrun.runtime.laws import SamplingParams
from specrun.runtime.planning import CostCurve
from specrun.runtime.round import GenerationResult

KNOWN = CostCurve((1, 8, 16, 32), (1.0, 2.0, 4.0, 8.0), (2.0, 3.0, 5.0, 9.0))
"""What another minute told."""

WIDTH = 11  # tokens of a round: the root and ten drafted ones


class Clockwork(Context):
    """Claims to take n + 10 seconds for n tokens, and 100 for every third evaluation of a size."""

    at: set[int] = set()  # noqa: RUF012 - the class is made anew by each test
    sizes: list[int] = []  # noqa: RUF012
    is_closed = False

    def decode(self, batch: Batch) -> Rows:
        before = self.native_seconds
        rows = super().decode(batch)
        n = batch.n_tokens
        disturbed = self.sizes.count(n) % 3 == 2
        self.native_seconds = before + (100.0 if disturbed else n + 10.0)
        if batch.n_outputs == n and self.options.n_outputs > 1:
            self.sizes.append(n)
            self.at.add(batch.first_position)
        return rows

    def close(self) -> None:
        super().close()
        type(self).is_closed = True


@pytest.fixture
def clockwork(monkeypatch: pytest.MonkeyPatch) -> type[Clockwork]:
    """The context in which evaluations are timed."""
    kind = type("Clockwork", (Clockwork,), {"at": set(), "sizes": []})
    monkeypatch.setattr(pair, "Context", kind)
    return kind


def answer_of(model: Path, drafter: str) -> tuple[Runtime, GenerationResult]:
    runtime = Runtime(model, drafter, n_ctx=512)
    greedy = SamplingParams(temperature=0.0)
    return runtime, runtime.generate([5, 6, 7] * 8, greedy, max_tokens=64)


def test_medians_behind_as_many_tokens_count_and_larger_sizes_follow(
    tiny_model: Path, clockwork: type[Clockwork]
) -> None:
    runtime, answer = answer_of(tiny_model, f'draft("{tiny_model}", n={WIDTH - 1})')
    with runtime, closing(CurveBeside(runtime, KNOWN, 4, 40)) as beside:
        for _ in range(4):
            beside.visit(answer)
        curve = beside.curve()
    assert clockwork.is_closed
    assert clockwork.at == {40}
    visited = set(clockwork.sizes)
    assert {1, 2, 3, 4, 5, 6, 7, 8} <= visited
    assert visited <= set(range(1, WIDTH + 1))
    assert max(visited) > 8  # those of the answer's rounds
    assert clockwork.sizes.count(1) >= 16
    last = max(visited)
    assert curve.sizes == (*sorted(visited), 16, 32)
    # The least would be the same; a mean would hold the disturbed ones.
    assert curve.reused[:-2] == tuple(n + 10.0 for n in sorted(visited))
    by = (last + 10.0) / KNOWN.seconds(last)
    assert curve.reused[-2:] == pytest.approx((4.0 * by, 8.0 * by))
    assert curve.rebuilt[-2:] == pytest.approx((5.0 * by, 9.0 * by))


def test_a_context_that_is_short_is_enough(tiny_model: Path, clockwork: type[Clockwork]) -> None:
    runtime, answer = answer_of(tiny_model, "none")
    with runtime, closing(CurveBeside(runtime, KNOWN, 40, 100_000)) as beside:
        beside.visit(answer)  # which drafted nothing
        curve = beside.curve()
    assert set(clockwork.sizes) == {1, 2, 3, 4, 5, 6, 7, 8}
    assert clockwork.at <= set(range(512))
    assert curve.sizes == (1, 2, 3, 4, 5, 6, 7, 8, 16, 32)


def test_a_context_that_cannot_be_filled_is_closed(
    tiny_model: Path, clockwork: type[Clockwork], monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, _ = answer_of(tiny_model, "none")
    with monkeypatch.context() as patched:

        def failing(self: Context, batch: Batch) -> Rows:
            raise DecodeError("there is no memory for it", -2)

        patched.setattr(clockwork, "decode", failing)
        with runtime, pytest.raises(DecodeError):
            CurveBeside(runtime, KNOWN, 4, 40)
    assert clockwork.is_closed
