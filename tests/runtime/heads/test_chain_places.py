"""Where a head's rows stand: compiled code writes the same arrays as numpy."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from specrun.runtime.compiled import LOOPS
from specrun.runtime.heads import graphs as graphs_module

pytestmark = pytest.mark.skipif(LOOPS is None, reason="installed without a compiler")
SPARE, FEATURES = 4096, 3


def inputs(rows: int, length: int) -> SimpleNamespace:
    """The inputs of a graph, in which anything may stand before they are filled."""
    arrays = {
        "positions": np.full((1, rows), 7, np.int32),
        "cells": np.full((1, rows), 7, np.int64),
        "mask": np.full((rows, length), 7.0, np.float32),
        "rows": np.full((rows, FEATURES), 7.0, np.float32),
    }
    cells = {name: array.reshape(-1).data for name, array in arrays.items()}
    return SimpleNamespace(inputs=arrays, cells=cells, filled=None)


def test_both_ways_write_the_same_round_after_round(monkeypatch):
    generator = np.random.default_rng(1)
    n_fresh = n_far = 0
    for _ in range(400):
        rows = int(generator.integers(1, 9))
        length = int(generator.choice([32, 64, 256]))
        compiled, plain = inputs(rows, length), inputs(rows, length)
        count = int(generator.integers(0, length - rows))
        for _round in range(6):
            n, position = int(generator.integers(1, rows + 1)), int(generator.integers(0, 1000))
            given = generator.normal(size=(n, FEATURES)).astype(np.float32)
            # A mask that is not known, or of a longer text, is written anew.
            n_fresh += plain.filled is None or plain.filled > count
            n_far += plain.filled is not None and count > plain.filled + 16
            for graph, loops in ((compiled, LOOPS), (plain, None)):
                monkeypatch.setattr(graphs_module, "LOOPS", loops)
                graphs_module.fill_chain(graph, given, position, count, SPARE)
            for name, array in plain.inputs.items():
                np.testing.assert_array_equal(compiled.inputs[name], array)
            assert compiled.filled == plain.filled == count
            step = int(generator.integers(-3, 30))
            count = min(length - rows, max(0, count + step))
    assert min(n_fresh, n_far) > 100


def test_arrays_that_do_not_fit_one_another_are_refused():
    positions, cells = np.zeros(4, np.int32), np.zeros(4, np.int64)
    mask, into = np.zeros(4 * 32, np.float32), np.zeros(3 * FEATURES, np.float32)
    given, numbers = np.zeros((2, FEATURES), np.float32), (0, 3, 1, -1, SPARE)
    LOOPS.chain_places(positions, cells, mask, into, given, *numbers)
    for wrong in (
        (positions[:3], cells, mask, into, given, *numbers),
        (positions, cells, mask[:-1], into, given, *numbers),
        (positions, cells, mask, into[:-1], given, *numbers),
        (positions, cells, mask, into, np.zeros((4, FEATURES), np.float32), *numbers),
        (positions, cells, mask, into, given, 0, 33, 1, -1, SPARE),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            LOOPS.chain_places(*wrong)
    for wrong in (
        (positions.astype(np.int64), cells, mask, into, given, *numbers),
        (positions, cells, mask, into, given[0], *numbers),
        (positions, cells, mask, into, given.astype(np.float64), *numbers),
    ):
        with pytest.raises(TypeError):
            LOOPS.chain_places(*wrong)


# -- rows wherever they stand ----------------------------------------------------------------------


def test_rows_anywhere_are_written_the_same_both_ways(monkeypatch):
    generator = np.random.default_rng(2)
    n_filled = n_without = 0
    for _ in range(300):
        rows, length = int(generator.integers(1, 9)), int(generator.choice([32, 64]))
        n, more = int(generator.integers(1, rows + 1)), int(generator.integers(0, 12))
        seen = int(generator.integers(0, length - more + 1))
        has_rows = generator.random() < 0.7
        given = generator.normal(size=(n, FEATURES)).astype(np.float32) if has_rows else None
        tokens, at, own = (generator.integers(0, 1000, n).tolist() for _ in range(3))
        places = at, own, seen, generator.random((n, more)) < 0.5
        n_filled += n < rows
        n_without += given is None
        graphs = [inputs(rows, length) for _ in range(2)]
        for graph, loops in zip(graphs, (LOOPS, None), strict=True):
            graph.inputs["tokens"] = np.full((1, rows), 7, np.int32)
            graph.cells["tokens"] = graph.inputs["tokens"].reshape(-1).data
            graph.filled = 3  # of a chain before
            monkeypatch.setattr(graphs_module, "LOOPS", loops)
            graphs_module.fill_places(graph, tokens, given, places, SPARE)
            assert graph.filled is None
        for name, array in graphs[0].inputs.items():
            np.testing.assert_array_equal(graphs[1].inputs[name], array)
    assert min(n_filled, n_without) > 50


def test_places_that_do_not_fit_one_another_are_refused():
    numbers = np.zeros(4, np.int32), np.zeros(4, np.int64), np.zeros(4 * 32, np.float32)
    arrays = *numbers, np.zeros(4, np.int32), np.zeros(4 * FEATURES, np.float32)
    given, sees = np.zeros((2, FEATURES), np.float32), np.ones((2, 3), np.bool_)
    LOOPS.places(*arrays, given, [0, 1], [2, 3], [4, 5], 29, sees, SPARE)
    right = [*arrays, given, [0, 1], [2, 3], [4, 5], 29, sees, SPARE]
    for place, wrong, kind in (
        (0, arrays[0][:3], ValueError),
        (2, arrays[2][:-1], ValueError),
        (3, arrays[3][:3], ValueError),
        (4, arrays[4][:-1], ValueError),
        (5, given[:1], ValueError),
        (6, [0], ValueError),
        (9, 30, ValueError),
        (9, -1, ValueError),
        (10, np.ones((5, 3), np.bool_), ValueError),
        (1, arrays[0], TypeError),
        (5, given.astype(np.float64), TypeError),
        (7, None, TypeError),
        (10, sees.astype(np.int8), TypeError),
        (6, [0, 2**31], OverflowError),
        (8, [0, -1], OverflowError),
    ):
        with pytest.raises(kind):
            LOOPS.places(*right[:place], wrong, *right[place + 1 :])
