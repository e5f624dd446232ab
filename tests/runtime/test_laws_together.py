"""Laws of several rows in one call: those of one after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specrun.bindings.errors import DecodeFailedError
from specrun.runtime.compiled import LOOPS
from specrun.runtime.drafters.source import HighestLogits
from specrun.runtime.laws import Law, SamplingParams, transform, transformed_law
from specrun.runtime.laws.transform import transformed_laws

needs_loops = pytest.mark.skipif(LOOPS is None, reason="installed without a compiler")


def rows_of(seed: int, n: int, size: int = 500) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    rows = generator.standard_normal((n, size)) * generator.choice([0.5, 3.0, 20.0], (n, 1))
    return list((np.round(rows) if seed % 2 else rows).astype(np.float32))


def params_of(seed: int) -> SamplingParams:
    top_k = (1, 3, 40, 128, 200)[seed % 5]
    return SamplingParams(temperature=(0.3, 1.0, 1.9)[seed % 3], top_k=top_k, min_p=0.01 * seed)


def bits(laws: list[Law]) -> list[tuple[bytes, bytes]]:
    return [(law.probs.tobytes(), np.asarray(law.ids).tobytes()) for law in laws]


@needs_loops
@pytest.mark.parametrize("seed", range(15))
def test_laws_of_several_rows_are_those_of_each(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, params = rows_of(seed, 1 + seed % 6), params_of(seed)
    laws = transformed_laws(rows, params)
    assert bits(laws) == bits([transformed_law(row, params) for row in rows])
    assert bits(laws) != bits([transformed_law(-row, params) for row in rows])
    monkeypatch.setattr(transform, "LOOPS", None)
    assert bits(transformed_laws(rows, params)) == bits(laws)


@pytest.mark.parametrize("seed", range(15))
def test_highest_logits_say_the_law_of_whole_rows(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, params = [*map(np.abs, rows_of(2 * seed, 4))], params_of(seed)
    tokens = np.stack([np.sort(np.argsort(-row)[: params.top_k + 1]) for row in rows])
    logits = np.stack([row[best] for row, best in zip(rows, tokens, strict=True)])
    highest = HighestLogits(tokens.astype(np.int32), logits)
    expected = bits([transformed_law(row, params) for row in rows])
    assert bits(highest.laws(params)) == expected
    monkeypatch.setattr(transform, "LOOPS", None)
    assert bits(highest.laws(params)) == expected
    shifted = HighestLogits(tokens.astype(np.int32) + 1, logits)
    assert bits(shifted.laws(params)) != expected


@needs_loops
def test_broken_rows_and_wrong_arrays_are_refused() -> None:
    assert LOOPS is not None
    rows, params = rows_of(0, 3), SamplingParams(top_k=4)
    rows[1][7] = np.nan
    with pytest.raises(DecodeFailedError, match="logits of"):
        transformed_laws(rows, params)
    assert transformed_laws([], params) == []
    few = [row[:4] for row in rows_of(0, 2)]  # nothing to cut
    assert bits(transformed_laws(few, params)) == bits(
        [transformed_law(row, params) for row in few]
    )
    ids, probs, array, cuts = np.empty(8, np.intp), np.empty(8), np.empty(4), (np.exp, 1, -9, 1)
    row, names = rows[0], np.zeros(1000, np.int32)
    given = [[row, row], names, ids, probs, array, cuts]
    assert len(LOOPS.truncate_rows(*given)) == 2
    assert len(LOOPS.truncate_rows(given[0], None, *given[2:])) == 2
    refused(LOOPS.truncate_rows, given, 0, ValueError, [row], [row, row[:3]], [row, row[:400]])
    refused(LOOPS.truncate_rows, given, 0, TypeError, (row, row), [row, 3], [row.astype(float)] * 2)
    refused(LOOPS.truncate_rows, given, 1, ValueError, names[1:])
    refused(LOOPS.truncate_rows, given, 1, TypeError, names.astype(np.int64), 3)
    refused(LOOPS.truncate_rows, given, 2, ValueError, ids[:4])
    refused(LOOPS.truncate_rows, given, 2, TypeError, ids.astype(np.int32))
    refused(LOOPS.truncate_rows, given, 4, ValueError, np.empty(0), np.empty(300))
    refused(LOOPS.truncate_rows, given, 5, TypeError, cuts[:3], [*cuts])
    refused(LOOPS.truncate_rows, given[:1], 0, TypeError, [row])


def refused(call: Any, given: list[Any], place: int, error: type[Exception], *wrong: Any) -> None:
    for value in wrong:
        changed = [*given]
        changed[place] = value
        with pytest.raises(error):
            call(*changed)


@needs_loops
def test_exponentials_are_numpys_own_where_its_loop_is_called_alone() -> None:
    """By numpy's function, and by one that calls it: the same bits; by another one, others."""
    assert LOOPS is not None

    def law(exp: object, row: np.ndarray, k: int) -> bytes:
        ids, probs = np.empty(k, np.intp), np.zeros(k)
        LOOPS.truncate(row, ids, probs, exp, 0.97, -30.0, 0.7)
        return probs.tobytes()

    differing = 0
    for seed, row in enumerate(rows_of(4, 40, 3000)):
        k = 1 + 6 * seed
        assert law(np.exp, row, k) == law(lambda values: np.exp(values), row, k)
        differing += law(np.exp2, row, k) != law(np.exp, row, k)
    assert differing > 10
    for wrong, error in (
        (np.add, TypeError),
        (lambda values: values[:0], ValueError),
        (lambda values: None, TypeError),
        (3, TypeError),
    ):
        with pytest.raises(error):
            law(wrong, rows_of(0, 1)[0], 40)
