"""Trees drawn below the highest logits of a head: those of whole rows, bit by bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from support.tree_laws import drafted_bits

from specrun.bench.prove.rules import RowsByPath
from specrun.bindings.errors import DecodeFailedError
from specrun.runtime.drafters.growing import GrowingDrafter
from specrun.runtime.drafters.growing.source import HighestLogits, NodeRows
from specrun.runtime.laws import SamplingParams, SeededNoise
from specrun.runtime.round import DraftRequest
from specrun.runtime.trees import DraftTree, parse_topology

VOCAB = 200
TEXT = [3, 1, 4]
SETTINGS = [
    SamplingParams(temperature=0.8, top_k=40),
    SamplingParams(temperature=1.5, top_k=128, top_p=1.0, min_p=0.0),
    SamplingParams(temperature=0.3, top_k=5, top_p=0.6),
    SamplingParams(temperature=1.0, top_k=1),
]


def row_after(seed: int, path: Sequence[int]) -> np.ndarray:
    """Logits of few values, so that many are equal."""
    generator = np.random.default_rng([seed, *path])
    return generator.integers(-6, 7, VOCAB).astype(np.float32)


def whole(rows: list[np.ndarray], k: int) -> NodeRows:
    return NodeRows(rows)


def highest(rows: list[np.ndarray], k: int) -> NodeRows:
    """The k + 1 highest of each row, the lower ids of equals, ascending."""
    order = [np.sort(np.argsort(-row, kind="stable")[: k + 1]) for row in rows]
    logits = [row[best] for row, best in zip(rows, order, strict=True)]
    return NodeRows(highest=HighestLogits(np.array(order, np.int32), np.array(logits)))


def drawn(
    said: Callable[[list[np.ndarray], int], NodeRows],
    params: SamplingParams,
    tree: str,
    seed: int,
    limits: tuple[int, int] = (100, 100),
    rows: Callable[[int, Sequence[int]], np.ndarray] = row_after,
) -> DraftTree:
    noise = SeededNoise(seed).for_drafting(len(TEXT))
    request = DraftRequest(TEXT, params, noise, *limits)
    source = RowsByPath(lambda paths: said([rows(seed, path) for path in paths], params.top_k))
    return GrowingDrafter(source, parse_topology(tree), sampling="without").propose(request)


@pytest.mark.parametrize("params", SETTINGS)
@pytest.mark.parametrize("tree", ["4x2x2", "5", "1x1x1", "0 1 2 10 20 21 100 210 211"])
def test_trees_of_the_highest_logits_are_those_of_whole_rows(tree, params):
    seeds = [(seed, (100, 100) if seed % 3 else (2, 6)) for seed in range(12)]
    of_rows, of_highest = (
        [drafted_bits(drawn(said, params, tree, seed, limits)) for seed, limits in seeds]
        for said in (whole, highest)
    )
    assert of_rows == of_highest
    assert len({str(each[0]) for each in of_rows}) > 6


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("said", [whole, highest])
def test_rows_that_are_no_laws_are_refused(said, depth):
    def rows(seed: int, path: Sequence[int]) -> np.ndarray:
        row = row_after(seed, path)
        if len(path) == depth:
            row[:] = math.nan
        return row

    with pytest.raises(DecodeFailedError, match="nan"):
        drawn(said, SETTINGS[0], "3x2", 1, rows=rows)
