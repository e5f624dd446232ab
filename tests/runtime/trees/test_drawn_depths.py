"""Trees of a head drawn by compiled code, depth by depth: those that Python draws, bit by bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from support.tree_laws import drafted_bits

from specrun.bench.prove.rules import RowsByPath
from specrun.bindings.errors import DecodeFailedError
from specrun.runtime.compiled import LOOPS
from specrun.runtime.drafters import draft as draft_module
from specrun.runtime.drafters import growing
from specrun.runtime.drafters.growing import GrowingDrafter
from specrun.runtime.drafters.source import HighestLogits, NodeRows
from specrun.runtime.laws import SamplingParams, SeededNoise
from specrun.runtime.round import DraftRequest
from specrun.runtime.trees import DraftTree, parse_topology

pytestmark = pytest.mark.skipif(LOOPS is None, reason="installed without a compiler")
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


@pytest.mark.parametrize("said", [whole, highest])
@pytest.mark.parametrize("params", SETTINGS)
@pytest.mark.parametrize("tree", ["4x2x2", "5", "1x1x1", "0 1 2 10 20 21 100 210 211"])
def test_trees_are_those_that_python_draws(monkeypatch, tree, params, said):
    seeds = [(seed, (100, 100) if seed % 3 else (2, 6)) for seed in range(12)]
    compiled = [drafted_bits(drawn(said, params, tree, seed, limits)) for seed, limits in seeds]
    monkeypatch.setattr(growing, "can_draw", lambda request: False)
    assert [
        drafted_bits(drawn(said, params, tree, seed, limits)) for seed, limits in seeds
    ] == compiled
    assert len({str(each[0]) for each in compiled}) > 6


@pytest.mark.parametrize("top_k", [VOCAB, VOCAB + 1, 0])
def test_laws_of_whole_rows_are_left_to_python(monkeypatch, top_k):
    params = SamplingParams(temperature=0.8, top_k=top_k)
    compiled = drafted_bits(drawn(whole, params, "3x2", 5))
    monkeypatch.setattr(draft_module, "LOOPS", None)
    assert drafted_bits(drawn(whole, params, "3x2", 5)) == compiled


def test_compiled_code_draws_them(monkeypatch):
    """Control of the tests above: what they compare are two ways."""
    depths: list[object] = []

    class Loops:
        @staticmethod
        def drawn_depth(*args: object) -> object:
            depths.append(args)
            return LOOPS.drawn_depth(*args)

    monkeypatch.setattr(draft_module, "LOOPS", Loops)
    drawn(highest, SETTINGS[0], "4x2x2", 1)
    assert len(depths) == 3


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


def test_wrong_arguments_are_refused():
    rows, names = np.zeros((2, 6), np.float32), np.zeros((2, 6), np.int32)
    shape = {-1: (0, 1), 0: (2,)}
    right = {
        "rows": rows,
        "names": names,
        "level": ([(0, 1), (2,)], [-1, 0], 0),
        "shape": shape,
        "noise": (1, 2, 3, 1),
        "scratch": np.zeros(4),
        "cuts": (np.exp, 1.0, -math.inf, 1.0),
        "tree": ([], [], {}),
    }
    assert len(LOOPS.drawn_depth(*right.values())) == 4
    wrong: list[tuple[str, object, type[Exception]]] = [
        ("rows", rows[:1], IndexError),
        ("rows", rows.astype(np.float64), TypeError),
        ("rows", rows[:, :5].copy(), ValueError),
        ("names", names[:1], ValueError),
        ("names", names.astype(np.int64), TypeError),
        ("names", names[0], TypeError),
        ("level", [[(0, 1)], [-1], 0], TypeError),
        ("level", ([(0, 1)], [-1]), TypeError),
        ("level", ([(0, 1)], [-1, 0], 0), ValueError),
        ("level", ([[0, 1], (2,)], [-1, 0], 0), ValueError),
        ("shape", [(0, 1)], TypeError),
        ("shape", {0: [2]}, ValueError),
        ("noise", (1, 2, 3), TypeError),
        ("scratch", np.zeros(7), ValueError),
        ("cuts", (np.exp,), TypeError),
        ("tree", ([], []), TypeError),
    ]
    for name, value, kind in wrong:
        with pytest.raises(kind):
            LOOPS.drawn_depth(*(right | {name: value}).values())
