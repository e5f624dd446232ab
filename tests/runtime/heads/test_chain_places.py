"""Where a head's rows stand: the loops write the same arrays as operations of numpy."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from specrun.runtime.heads import RowPlaces, fill_chain, fill_places
from specrun.runtime.heads.places import write_below, write_chain, write_places

SPARE, FEATURES = 4096, 3


def chain_in_numpy(graph: SimpleNamespace, given: np.ndarray, position: int, count: int) -> None:
    """What `fill_chain` writes."""
    inputs, n = graph.inputs, len(given)
    rows, length = inputs["mask"].shape
    inputs["rows"][:n], inputs["rows"][n:] = given, 0.0
    inputs["positions"][0] = [*range(position, position + n), *[0] * (rows - n)]
    inputs["cells"][0] = [*range(count, count + n), *[SPARE] * (rows - n)]
    seen = np.arange(length)[None] < count + np.minimum(np.arange(1, rows + 1), n)[:, None]
    seen[n:, count:] = False
    inputs["mask"][:] = np.where(seen, 0.0, -np.inf)


def places_in_numpy(
    graph: SimpleNamespace, tokens: list[int], given: np.ndarray | None, places: RowPlaces
) -> None:
    """What `fill_places` writes."""
    at, own, seen, sees = places
    inputs, (n, more) = graph.inputs, sees.shape
    for name, values, filling in (
        ("positions", at, 0),
        ("cells", own, SPARE),
        ("tokens", tokens, 0),
    ):
        inputs[name][0, :n], inputs[name][0, n:] = values, filling
    if given is not None:
        inputs["rows"][:n], inputs["rows"][n:] = given, 0.0
    mask = inputs["mask"]
    mask.fill(-np.inf)
    mask[:n, :seen] = 0.0
    np.copyto(mask[:n, seen : seen + more], 0.0, where=sees)
    mask[n:, 0] = 0.0


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


def test_chains_are_numpys_round_after_round():
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
            n_fresh += compiled.filled is None or compiled.filled > count
            n_far += compiled.filled is not None and count > compiled.filled + 16
            fill_chain(compiled, given, position, count, SPARE)
            chain_in_numpy(plain, given, position, count)
            for name, array in plain.inputs.items():
                np.testing.assert_array_equal(compiled.inputs[name], array)
            assert compiled.filled == count
            step = int(generator.integers(-3, 30))
            count = min(length - rows, max(0, count + step))
    assert min(n_fresh, n_far) > 100


def test_arrays_that_do_not_fit_one_another_are_refused():
    positions, cells = np.zeros(4, np.int32), np.zeros(4, np.int64)
    mask, into = np.zeros(4 * 32, np.float32), np.zeros(3 * FEATURES, np.float32)
    given, numbers = np.zeros((2, FEATURES), np.float32), (0, 3, -1, SPARE)
    into = np.zeros(4 * FEATURES, np.float32)
    write_chain(positions, cells, mask, into, given, *numbers)
    for wrong in (
        (positions[:3], cells, mask, into, given, *numbers),
        (positions, cells, mask[:-1], into, given, *numbers),
        (positions, cells, mask, into[:-1], given, *numbers),
        (positions, cells, mask, into, np.zeros((5, FEATURES), np.float32), *numbers),
        (positions, cells, mask, into, given, 0, 33, -1, SPARE),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            write_chain(*wrong)


# -- rows wherever they stand ----------------------------------------------------------------------


def test_rows_anywhere_are_numpys():
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
        for graph in graphs:
            graph.inputs["tokens"] = np.full((1, rows), 7, np.int32)
            graph.cells["tokens"] = graph.inputs["tokens"].reshape(-1).data
            graph.filled = 3  # of a chain before
        fill_places(graphs[0], tokens, given, places, SPARE)
        places_in_numpy(graphs[1], tokens, given, places)
        assert graphs[0].filled is None
        for name, array in graphs[0].inputs.items():
            np.testing.assert_array_equal(graphs[1].inputs[name], array)
    assert min(n_filled, n_without) > 50


def test_places_that_do_not_fit_one_another_are_refused():
    numbers = np.zeros(4, np.int32), np.zeros(4, np.int64), np.zeros(4 * 32, np.float32)
    arrays = *numbers, np.zeros(4, np.int32), np.zeros(4 * FEATURES, np.float32)
    given, sees = np.zeros((2, FEATURES), np.float32), np.ones((2, 3), np.bool_)
    write_places(*arrays, given, [0, 1], [2, 3], [4, 5], 29, sees, SPARE)
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
        (7, [0], ValueError),
        (8, [0], ValueError),
        (7, None, TypeError),
        (6, [0, 2**31], OverflowError),
    ):
        with pytest.raises(kind):
            write_places(*right[:place], wrong, *right[place + 1 :])


# -- rows of a tree --------------------------------------------------------------------------------


def test_rows_below_a_root_stand_at_their_depths() -> None:
    depths, places = np.array([1, 1, 2, 2, 2], np.int32), np.array([0, 1, 0, 1, 2], np.int64)
    at, cells, own = np.zeros(5, np.int32), np.zeros(5, np.int64), np.zeros(5, np.int64)
    write_below(at.data, cells.data, own.data, depths.data, places.data, 30, 40, 64)
    assert at.tolist() == [31, 31, 32, 32, 32]
    assert cells.tolist() == [40, 41, 42, 43, 44]
    assert own.tolist() == [40, 64 + 41, 42, 64 + 43, 2 * 64 + 44]
    with pytest.raises(ValueError, match="do not fit"):
        write_below(at, cells[:4], own, depths, places, 30, 40, 64)
