"""Laws of several rows in one call: those of one after the other."""

from __future__ import annotations

import numpy as np
import pytest

from specrun.bindings.errors import DecodeFailedError
from specrun.runtime.drafters.growing.source import HighestLogits
from specrun.runtime.laws import Law, SamplingParams, transformed_law
from specrun.runtime.laws.transform import transformed_laws


def rows_of(seed: int, n: int, size: int = 500) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    rows = generator.standard_normal((n, size)) * generator.choice([0.5, 3.0, 20.0], (n, 1))
    return list((np.round(rows) if seed % 2 else rows).astype(np.float32))


def params_of(seed: int) -> SamplingParams:
    top_k = (1, 3, 40, 128, 200)[seed % 5]
    return SamplingParams(temperature=(0.3, 1.0, 1.9)[seed % 3], top_k=top_k, min_p=0.01 * seed)


def bits(laws: list[Law]) -> list[tuple[bytes, bytes]]:
    return [(law.probs.tobytes(), np.asarray(law.ids).tobytes()) for law in laws]


@pytest.mark.parametrize("seed", range(15))
def test_laws_of_several_rows_are_those_of_each(seed: int) -> None:
    rows, params = rows_of(seed, 1 + seed % 6), params_of(seed)
    laws = transformed_laws(rows, params)
    assert bits(laws) == bits([transformed_law(row, params) for row in rows])
    assert bits(laws) != bits([transformed_law(-row, params) for row in rows])


@pytest.mark.parametrize("seed", range(15))
def test_highest_logits_say_the_law_of_whole_rows(seed: int) -> None:
    rows, params = [*map(np.abs, rows_of(2 * seed, 4))], params_of(seed)
    tokens = np.stack([np.sort(np.argsort(-row)[: params.top_k + 1]) for row in rows])
    logits = np.stack([row[best] for row, best in zip(rows, tokens, strict=True)])
    highest = HighestLogits(tokens.astype(np.int32), logits)
    expected = bits([transformed_law(row, params) for row in rows])
    assert bits(highest.laws(params)) == expected
    shifted = HighestLogits(tokens.astype(np.int32) + 1, logits)
    assert bits(shifted.laws(params)) != expected


def test_broken_rows_are_refused() -> None:
    rows, params = rows_of(0, 3), SamplingParams(top_k=4)
    rows[1][7] = np.nan
    with pytest.raises(DecodeFailedError, match="logits of"):
        transformed_laws(rows, params)
    assert transformed_laws([], params) == []
    few = [row[:4] for row in rows_of(0, 2)]  # nothing to cut
    assert bits(transformed_laws(few, params)) == bits(
        [transformed_law(row, params) for row in few]
    )
