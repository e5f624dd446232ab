"""Laws bit for bit what a plain sort makes, loops over rows, and the walk at temperature 0."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.plain_laws import plain_law

from specrun.bindings.errors import DecodeFailedError, OptionError
from specrun.runtime import SamplingParams
from specrun.runtime.acceptance import (
    Acceptance,
    BlockRule,
    ExactRule,
    decide,
    walk,
)
from specrun.runtime.laws import Law, SeededNoise, rows, transformed_law
from specrun.runtime.laws.law import FAVOURITE, RowLaws, scale_to_one
from specrun.runtime.laws.rows import MOST_RANKED
from specrun.runtime.laws.transform import greedy_token
from specrun.runtime.trees import ROOT, DraftTree, TreeBuilder

SIZES = [1, 2, 15, 16, 40, 41, 300, 511, 512, 513, 2047, 2048, 5000]


def random_case(seed: int) -> tuple[np.ndarray, SamplingParams, list[int]]:
    """A row with ties, zeros of both signs and infinities, and settings of every kind."""
    generator = np.random.default_rng(seed)
    size = int(generator.choice(SIZES))
    row = (generator.choice([0.5, 2.0, 6.0]) * generator.standard_normal(size)).astype(np.float32)
    if generator.random() < 0.4:  # ties, also across every cut
        row = np.round(row * generator.choice([0.2, 1.0, 4.0])).astype(np.float32)
    if generator.random() < 0.3:
        row[generator.random(size) < generator.choice([0.1, 0.999])] = -math.inf
        row[-1] = 1.0  # the bias below leaves it, too
    params = SamplingParams(
        temperature=float(generator.choice([0.0, 1e-40, 0.3, 0.8, 1.0, 2.5])),
        top_k=int(generator.choice([0, 1, 2, 7, 40, 64, 65, MOST_RANKED, MOST_RANKED + 1])),
        top_p=float(generator.choice([0.0, 0.4, 0.95, 1.0])),
        min_p=float(generator.choice([0.0, 0.05, 1.0])),
        repeat_penalty=float(generator.choice([1.0, 1.3])),
        frequency_penalty=float(generator.choice([0.0, 0.7])),
        presence_penalty=float(generator.choice([0.0, -0.4])),
        logit_bias={0: -math.inf, 3: 2.0} if size > 1 and generator.random() < 0.3 else {},
    )
    return row, params, generator.integers(size, size=int(generator.integers(9))).tolist()


def same_law(first: Law, other: Law) -> bool:
    if (first.ids is None) != (other.ids is None):
        return False
    same_ids = first.ids is None or np.array_equal(first.ids, other.ids)
    return same_ids and first.probs.tobytes() == other.probs.tobytes()


def test_laws_are_bit_for_bit_those_of_a_plain_sort():
    told_apart = 0
    for seed in range(1500):
        row, params, window = random_case(seed)
        before = row.tobytes()
        made = transformed_law(row, params, window)
        assert same_law(made, plain_law(row, params, window)), seed
        assert row.tobytes() == before
        told_apart += not same_law(made, plain_law(row, params, window, higher_ids_first=True))
    assert told_apart > 100  # where ties fall the other way, this test sees it


@pytest.mark.parametrize("size", [30, 3000, 70_000])
@pytest.mark.parametrize("top_k", [1, 20])
def test_rows_that_are_no_law_are_refused(size, top_k):
    params = SamplingParams(top_k=top_k)
    for broken in (math.nan, math.inf):
        # In both halves of what is compared in pairs, within blocks and behind them.
        for place in (0, min(65, size - 2), size // 2, size - 1):
            row = np.linspace(-1, 1, size).astype(np.float32)
            row[place] = broken
            with pytest.raises(DecodeFailedError, match="logits of"):
                transformed_law(row, params)
    with pytest.raises(DecodeFailedError, match="logits of -inf"):
        transformed_law(np.full(size, -math.inf, np.float32), params)
    with pytest.raises(OptionError, match="none of"):
        bias = dict.fromkeys(range(size), -math.inf)
        transformed_law(np.zeros(size, np.float32), params.replace(logit_bias=bias))


@pytest.mark.parametrize("size", [1, 7, 8, 9, 127, 128, 129, 136, 137, 300, 1000, 5000])
def test_sums_are_numpys(size):
    generator, told_apart = np.random.default_rng(size), 0
    for _ in range(50):
        weights = generator.exponential(size=size) ** 3
        total = float(np.add.reduce(weights))
        assert scale_to_one(weights.copy()) == total
        told_apart += float(weights.cumsum()[-1]) != total
    assert told_apart > 0 or size < 8  # added one by one they differ


def kernels(*names: str) -> list[tuple[Callable[..., Any], Callable[..., Any]]]:
    """The functions in C, each with numpy's."""
    if rows._LOOPS is None:
        pytest.skip("installed without a compiler")
    return [(getattr(rows._LOOPS, name), getattr(rows, f"{name}_in_numpy")) for name in names]


def test_the_highest_entries_are_those_of_numpy() -> None:
    (rank, rank_in_numpy), favourites = kernels("rank", "favourite")
    refused = 0
    for seed in range(600):
        row, params, _ = random_case(seed)
        k = max(1, min(params.top_k, len(row), MOST_RANKED))
        if seed % 20 == 0:
            row[seed % len(row)] = np.nan if seed % 40 else np.inf
        found = []
        for each in (rank, rank_in_numpy):
            arrays = np.zeros(k + 3, np.intp), np.zeros(k + 3), np.zeros(k)
            found.append([each(row, *arrays, seed % 3), *(array.tobytes() for array in arrays)])
        assert found[0] == found[1], seed
        assert len({each(row) for each in favourites}) == 1
        refused += not found[0][0]
    assert refused > 20


def test_arrays_of_another_kind_are_refused() -> None:
    [(rank, _)] = kernels("rank")
    row, ids, values = np.zeros(50, np.float32), np.zeros(5, np.intp), np.zeros(5)
    assert rank(row, ids, values, values.copy(), 0)
    read_only = values.copy()
    read_only.flags.writeable = False
    for wrong in (
        (row.astype(np.float64), ids, values, values),
        (np.zeros(100, np.float32)[::2], ids, values, values),
        (row.reshape(5, 10), ids, values, values),
        (row, ids.astype(np.int32), values, values),
        (row, ids, values[:4], values),
        (row, ids[:4], values, values),
        (row[:4], ids, values, values),
        (row, ids, values, values[:0]),
        (row, ids, values, values, 1),
        (row, ids, values, values, -1),
        (row, ids, values, values, "0"),
        (row, ids, "values", values),
        (row, ids, read_only, values),
        (row, ids, values),
    ):
        with pytest.raises((TypeError, ValueError, BufferError)):
            rank(*wrong, *(0,)[len(wrong) - 4 :])


@pytest.mark.parametrize("scale", [0.1, 3.0, 40.0])
@pytest.mark.parametrize("size", [1, 5, 31, 32, 33, 100, 32_000])
def test_sums_of_exponentials_are_numpys_but_for_rounding(size: int, scale: float) -> None:
    """Also of rows with entries of no mass; they decide thresholds, so bits do not matter."""
    row = (scale * np.random.default_rng(size).normal(size=size)).astype(np.float32)
    if size > 5:
        row[3] = -np.inf
    shifted = row.astype(np.float64) - float(row.max())
    powers = np.exp(shifted)
    shifted[powers == 0.0] = 0.0
    for log_mass in kernels("log_mass")[0]:
        highest, mass, weighted = log_mass(row)
        assert highest == row.max()
        assert mass == pytest.approx(powers.sum(), rel=3e-6)
        assert weighted == pytest.approx((shifted * powers).sum(), rel=1e-5, abs=1e-6)


def test_rows_of_no_entries_and_of_another_kind() -> None:
    empty = np.empty(0, np.float32)
    assert rows.log_mass(empty) == (-math.inf, 0.0, 0.0)
    assert rows.log_mass(np.zeros(3)) == (0.0, 3.0, 0.0)  # of 64 bits: by numpy


GREEDY = SamplingParams(temperature=0.0)


def random_tree_of_points(generator: np.random.Generator, rows: list[np.ndarray]) -> DraftTree:
    """A tree whose children often are what the rows say, some of them drafted twice or hidden."""
    builder, hidden = TreeBuilder(), set[int]()
    for _ in range(len(rows) - 1):
        parents = [ROOT, *(place for place in range(len(builder)) if place not in hidden)]
        parent = int(generator.choice(parents))
        likely = int(rows[parent + 1].argmax())
        token = likely if generator.random() < 0.6 else int(generator.integers(len(rows[0])))
        if generator.random() < 0.1:
            hidden.add(builder.add_hidden(parent, token))
        else:
            builder.add(parent, token)
    return builder.build()


def python_walk(tree: DraftTree, rows: list[np.ndarray], *, last_of_equals: bool) -> Acceptance:
    """The walk of rules, a law at a time; as a control, of equal logits the last one stands."""

    def law_at(node: int) -> Law:
        row = rows[node + 1]
        last = len(row) - 1 - int(row[::-1].argmax())
        return Law.point(last if last_of_equals else greedy_token(row, GREEDY))

    return walk(tree, law_at, SeededNoise(0), 5, decide)


def test_the_walk_at_temperature_0_is_that_of_laws_one_by_one():
    depths, differing = set(), 0
    for seed in range(1500):
        generator = np.random.default_rng(seed)
        size = int(generator.choice([1, 2, 63, 64, 65, 300, 4096, 5000, 8300]))
        rows = [generator.standard_normal(size) for _ in range(int(generator.integers(1, 9)))]
        if seed % 2:  # ties, also of zeros of both signs
            rows = [np.round(row) * generator.choice([0.0, -1.0, 1.0]) for row in rows]
        rows = [row.astype(np.float32) for row in rows]
        if size > 1 and seed % 5 == 0:
            rows[0][generator.integers(size - 1)] = -math.inf
        tree = random_tree_of_points(generator, rows)
        laws = RowLaws(FAVOURITE, rows.__getitem__)
        kept = BlockRule().accept(tree, laws, SeededNoise(0), 5)
        assert kept == python_walk(tree, rows, last_of_equals=False), seed
        depths.add(len(kept.path))
        differing += kept != python_walk(tree, rows, last_of_equals=True)
    assert depths >= {0, 1, 2, 3}
    assert differing > 100  # where ties fall the other way, this test sees it


@pytest.mark.parametrize("cuts", [FAVOURITE, SamplingParams().cuts])
def test_broken_rows_below_others_are_refused(cuts):
    row = np.arange(5, dtype=np.float32)
    for broken in (math.nan, math.inf):
        rows = [row * 100, row.copy()]
        rows[1][2] = broken
        laws = RowLaws(cuts, rows.__getitem__)
        with pytest.raises(DecodeFailedError, match="logits of"):
            ExactRule().accept(DraftTree.chain([4]), laws, SeededNoise(0), 0)
        assert ExactRule().accept(DraftTree.chain([3]), laws, SeededNoise(0), 0).path == ()
