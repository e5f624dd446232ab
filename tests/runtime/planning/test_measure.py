"""Measured cost curves and acceptance by rank: what is measured is what it says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.scripted import LawTable, law_of

from specrun.bench.prove.rules import enumerate_law
from specrun.bindings.contexts.batch import Batch
from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.contexts.rows import Rows
from specrun.bindings.errors import OptionError
from specrun.bindings.models.model import Model
from specrun.runtime.laws import Law, NoiseSource, SamplingParams, transformed_law
from specrun.runtime.planning import CostCurve, measure_cost_curve
from specrun.runtime.planning.measure import beside, doubted
from specrun.runtime.trees import TreeSampling
from specrun.runtime.tuning import CalibrationText, RankedPair, acceptance_by_rank, law_pairs

SIZES = (1, 2, 4)


class Clockwork(Context):
    """A context whose evaluations claim to take known times: n seconds a token, 5 more for another
    shape."""

    def __init__(self, model: Model, n_outputs: int = 8) -> None:
        super().__init__(model, ContextOptions(n_ctx=256, n_outputs=n_outputs, n_threads=1))
        self.last = 0
        self.at: set[int] = set()
        self.n_evaluations = 0

    def decode(self, batch: Batch) -> Rows:
        before = self.native_seconds
        rows = super().decode(batch)
        rebuilt = batch.n_tokens != self.last
        self.last = batch.n_tokens
        self.native_seconds = before + batch.n_tokens + 5 * rebuilt
        self.n_evaluations += 1
        if batch.n_outputs == batch.n_tokens:
            self.at.add(batch.first_position)
        return rows


@pytest.mark.parametrize("depth", [0, 64])
def test_the_curve_is_what_evaluations_took(tiny_model: Path, depth: int) -> None:
    told: list[float] = []
    with Model(tiny_model) as model, Clockwork(model) as context:
        curve = measure_cost_curve(
            context, seconds=0.01, sizes=SIZES, depth=depth, progress=told.append
        )
        assert context.memory.last_position() == -1
    assert curve.sizes == SIZES
    assert curve.reused == (1.0, 2.0, 4.0)
    # At the ends passes turn, and a size comes twice running: that is no rebuilt graph.
    assert curve.rebuilt == (6.0, 7.0, 9.0)
    assert curve.spread == (0.0, 0.0, 0.0)
    assert context.at == {depth}  # always at the same position: nothing is left behind
    assert told == sorted(told)
    assert told[-1] == 1.0


class Disturbed(Clockwork):
    """Size 5 takes a hundred more in the first `times` evaluations of that size."""

    def __init__(self, model: Model, times: int) -> None:
        super().__init__(model, 16)
        self._times = times

    def decode(self, batch: Batch) -> Rows:
        before = self.native_seconds
        rows = super().decode(batch)
        if batch.n_tokens == 5 and self._times:
            self._times -= 1
            self.native_seconds = before + 105.0
        return rows


@pytest.mark.parametrize("times", [1, 10])
def test_what_contradicts_its_neighbours_is_measured_again(tiny_model: Path, times: int) -> None:
    """Three passes time each size six times or more: ten bad ones outlast them."""
    sizes = (1, 2, 3, 4, 5, 6, 7, 8)
    with Model(tiny_model) as model, Disturbed(model, times) as context:
        curve = measure_cost_curve(context, seconds=0.0001, sizes=sizes, depth=0)
    assert curve.reused == tuple(map(float, sizes))
    assert curve.rebuilt == tuple(size + 5.0 for size in sizes)


def test_what_is_doubted_are_contradictions_and_no_steps_of_kernels() -> None:
    sizes = (1, 2, 4, 8, 10, 12)

    def curve(times: tuple[float, ...], spread: float = 0.02) -> CostCurve:
        return CostCurve(sizes, times, times, (spread,) * len(sizes))

    assert doubted(curve((1.0, 1.3, 1.7, 2.2, 10.9, 2.6))) == [10]
    assert doubted(curve((1.0, 1.3, 1.7, 2.65, 2.7, 2.8))) == []
    assert doubted(curve((1.0, 1.3, 1.7, 1.65, 1.9, 2.1))) == [4]
    assert doubted(curve((1.0, 1.3, 1.7, 1.65, 1.9, 2.1), 0.1)) == []
    assert doubted(curve((1.0, 1.1, 2.2, 2.3, 2.4, 2.5))) == [4]  # far above the line
    # One token that takes longer than two, on a machine so busy that nothing is known for sure.
    assert doubted(curve((1.4, 1.0, 1.3, 2.2, 2.6, 2.9), 0.6)) == [1]
    assert doubted(curve((1.05, 1.0, 1.3, 2.2, 2.6, 2.9), 0.6)) == []
    assert beside([10], sizes) == [8, 10, 12]
    assert beside([1, 2], sizes) == [1, 2, 4]
    assert beside([], sizes) == []


def test_sizes_that_cost_far_too_much_are_left_out(tiny_model: Path) -> None:
    with Model(tiny_model) as model:
        with Clockwork(model) as context:
            context.n_outputs = 64
            with pytest.raises(OptionError, match="output rows of that size"):
                measure_cost_curve(context, seconds=0.01, sizes=(1, 600))
        with Context(model, ContextOptions(n_ctx=256, n_outputs=64, n_threads=1)) as real:
            curve = measure_cost_curve(real, seconds=0.05)
    assert curve.sizes[:8] == (1, 2, 3, 4, 5, 6, 7, 8)
    assert all(0 < seconds < 1 for seconds in (*curve.reused, *curve.rebuilt))


# -- acceptance by rank ----------------------------------------------------------------------------


def expected_share(
    target: np.ndarray, draft: np.ndarray, sampling: TreeSampling, ranks: int
) -> list[float]:
    """Every draw and test enumerated: the exact share of each rank."""

    def program(noise: NoiseSource) -> int:
        remaining, law = law_of(target), law_of(draft)
        nodes: list[int] = []
        for _ in range(ranks):
            token = noise.choose(law)
            if token not in nodes:
                nodes.append(token)
            if noise.accept(min(1.0, remaining.probability(token) / law.probability(token))):
                return nodes.index(token)
            remaining = remaining.residual(law)
            if sampling == "without":
                rest = law.without(token)
                if rest is law:
                    break
                law = rest
        return -1

    law = enumerate_law(program)  # type: ignore[arg-type]
    return [law.get(rank, 0.0) for rank in range(ranks)]


@pytest.mark.parametrize("sampling", ["with", "without"])
def test_drawn_ranks_are_accepted_as_enumeration_says(sampling: TreeSampling) -> None:
    target, draft = LawTable(4, 3, 0.0)(()), LawTable(4, 4, 0.0)(())
    pair = RankedPair(law_of(target), law_of(draft), law_of(draft))
    got = acceptance_by_rank([pair] * 2000, sampling, 3)
    np.testing.assert_allclose(got, expected_share(target, draft, sampling, 3), atol=0.01)
    assert got[0] == pytest.approx(np.minimum(target, draft).sum())


def test_point_masses_are_accepted_with_the_targets_probability() -> None:
    target, draft = LawTable(6, 3, 0.0)(()), LawTable(6, 4, 0.0)(())
    pair = RankedPair(law_of(target), law_of(draft), law_of(draft))
    got = acceptance_by_rank([pair], "argmax", 3)
    assert got.tolist() == target[np.argsort(-draft)[:3]].tolist()


def test_greedy_laws_rank_by_the_ranking_law() -> None:
    """At temperature 0 a drawn scheme has one token to draw; the ranking law knows the others."""
    pair = RankedPair(Law.point(2), Law.point(1), Law(np.array([0.1, 0.6, 0.3])))
    for sampling in ("argmax", "without", "with"):
        assert acceptance_by_rank([pair], sampling, 3).tolist() == [0.0, 1.0, 0.0]  # type: ignore[arg-type]


def test_no_positions_say_nothing() -> None:
    assert acceptance_by_rank([], "without", 3).tolist() == [0.0, 0.0, 0.0]


def test_laws_along_a_text_are_those_of_its_prefixes(tiny_model: Path, tiny_drafter: Path) -> None:
    params = SamplingParams(temperature=0.7, top_k=12)
    tokens = [5, 9, 2, 40, 41, 42, 43, 44, 45, 46]
    options = ContextOptions(n_ctx=256, n_threads=1, n_outputs=4, n_batch=4)
    with Model(tiny_model) as model, Model(tiny_drafter) as drafter:
        with Context(model, options) as ours, Context(drafter, options) as theirs:
            pairs, seconds = law_pairs(ours, theirs, CalibrationText(tuple(tokens), 3), params)
            for index, pair in enumerate(pairs):
                for context, law in ((ours, pair.target), (theirs, pair.draft)):
                    batch = Batch(16, 1)
                    context.memory.clear()
                    for place, token in enumerate(tokens[: 3 + index]):
                        batch.fill_one(token, place)
                        rows = context.decode(batch)
                    wanted = transformed_law(rows.logits(0), params)
                    np.testing.assert_allclose(law.aligned_to(wanted), wanted.probs, atol=2e-3)
    assert len(pairs) == len(tokens) - 3
    assert 0 < seconds < 0.1
