"""Laws of several rows, and draws from them, in one call: those of one after the other."""

from __future__ import annotations

import numpy as np
import pytest

from specrun.bindings.errors import DecodeFailedError
from specrun.runtime import noise as noise_module
from specrun.runtime import transform
from specrun.runtime.compiled import LOOPS
from specrun.runtime.law import Law, LawsTogether
from specrun.runtime.noise import DraftNoise, NoiseSource
from specrun.runtime.sampling import SamplingParams
from specrun.runtime.transform import transformed_law, transformed_laws
from specrun.runtime.tree import DraftTree
from specrun.runtime.trees import grow_tree, parse_topology, propose_without_replacement
from specrun.runtime.trees.growth import Steps, tree_steps
from specrun.runtime.trees.tree_laws import HighestLogits

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
    assert isinstance(laws, LawsTogether)
    assert bits(laws) == bits([transformed_law(row, params) for row in rows])
    assert bits(laws) != bits([transformed_law(-row, params) for row in rows])
    monkeypatch.setattr(transform, "LOOPS", None)
    assert bits(transformed_laws(rows, params)) == bits(laws)


@needs_loops
@pytest.mark.parametrize("seed", range(15))
def test_draws_from_several_laws_are_those_from_each(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    laws = transformed_laws(rows_of(seed, 1 + seed % 6), params_of(seed))
    counts = np.random.default_rng(seed).integers(0, 6, len(laws)).tolist()

    def drawn(laws: list[Law], position: int = 9) -> tuple[list[list[int]], list[int]]:
        noise = DraftNoise(seed, 2, 3)
        noise.seek(position)
        first = noise.choose_distinct_each(laws, counts)
        # What comes after them at this position takes the next numbers.
        return first, noise.choose_distinct(laws[0], 3)

    expected = drawn(list(laws))
    assert drawn(laws) == expected
    if max(map(len, (law.probs for law in laws))) > 5 and sum(counts) > 3:
        assert drawn(laws, 10) != expected
    monkeypatch.setattr(noise_module, "LOOPS", None)
    assert drawn(laws) == expected


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
@pytest.mark.parametrize("shape", ["4x3", "2x2x2", "1x4", "0 1 2 00 01 10 000"])
def test_trees_grow_alike_from_laws_together_and_one_by_one(shape: str) -> None:
    params, topology = params_of(2), parse_topology(shape)

    def grown(noise: NoiseSource, *, together: bool) -> DraftTree:
        def below(steps: Steps[DraftTree]) -> DraftTree:
            seed = 0
            try:
                _, tokens = next(steps)
                while True:
                    laws = transformed_laws(rows_of(2 * seed, max(1, len(tokens))), params)
                    _, tokens = steps.send(laws if together else list(laws))
                    seed += 1
            except StopIteration as ended:
                tree: DraftTree = ended.value
                return tree

        return below(tree_steps(topology, propose_without_replacement, noise, 7))

    for key in range(20):
        one, other = (grown(DraftNoise(key, 0, 7), together=way) for way in (True, False))
        parts = [(tree.tokens, tree.parents, tree.depths) for tree in (one, other)]
        assert parts[0] == parts[1]
        assert set(one.draws) == set(other.draws)
        for parent, draws in one.draws.items():
            laws = [[draw.law for draw in made] for made in (draws, other.draws[parent])]
            assert bits(laws[0]) == bits(laws[1])
    assert grown(DraftNoise(1, 0, 7), together=True) != grown(DraftNoise(2, 0, 7), together=True)
    assert grow_tree.__doc__


@needs_loops
def test_broken_rows_and_wrong_arrays_are_refused() -> None:
    assert LOOPS is not None
    rows, params = rows_of(0, 3), SamplingParams(top_k=4)
    rows[1][7] = np.nan
    with pytest.raises(DecodeFailedError, match="logits of"):
        transformed_laws(rows, params)
    assert transformed_laws([], params) == []
    few = transformed_laws([row[:4] for row in rows_of(0, 2)], params)  # nothing to cut
    assert not isinstance(few, LawsTogether)
    ids, probs, array, cuts = np.empty(8, np.intp), np.empty(8), np.empty(4), (np.exp, 1, -9, 1)
    row, names = rows[0], np.zeros(1000, np.int32)
    assert len(LOOPS.truncate_rows([row, row], names, ids, probs, array, cuts)) == 2
    assert len(LOOPS.truncate_rows([row, row], None, ids, probs, array, cuts)) == 2
    for wrong in (
        ([row], None, ids, probs, array, cuts),
        ([row, row], None, ids[:4], probs, array, cuts),
        ([row, row], None, ids, probs, np.empty(0), cuts),
        ([row, row[:3]], None, ids, probs, array, cuts),
        ([row] * 300, None, np.empty(300 * 300, np.intp), np.empty(300**2), np.empty(300), cuts),
        ([row, row], names[1:], ids, probs, array, cuts),
        ([row, row[:400]], names, ids, probs, array, cuts),
    ):
        with pytest.raises(ValueError, match=r"highest of|names"):
            LOOPS.truncate_rows(*wrong)
    for wrong in (
        ((row, row), None, ids, probs, array, cuts),
        ([row, 3], None, ids, probs, array, cuts),
        ([row.astype(float)] * 2, None, ids, probs, array, cuts),
        ([row, row], names.astype(np.int64), ids, probs, array, cuts),
        ([row, row], None, ids.astype(np.int32), probs, array, cuts),
        ([row, row], None, ids, probs, array, cuts[:3]),
        ([row, row], None, ids, probs, array, [*cuts]),
        ([row, row],),
    ):
        with pytest.raises(TypeError):
            LOOPS.truncate_rows(*wrong)
    ids[:], probs[:] = [0, 1, 2, 3] * 2, 0.25
    assert [*map(len, LOOPS.distinct_each(probs, ids, [4, 2], [2, 9], 1, 1))] == [2, 2]
    for sizes, counts in (([5, 4], [1, 1]), ([0, 4], [1, 1]), ([4] * 3, [1] * 3)):
        with pytest.raises(ValueError, match="law"):
            LOOPS.distinct_each(probs, ids, sizes, counts, 1, 1)
    with pytest.raises(ValueError, match="differ in length"):
        LOOPS.distinct_each(probs, ids[:4], [4], [1], 1, 1)
    for wrong in (
        (probs, ids, [4], [1, 1], 1, 1),
        (probs, ids, (4, 4), [1, 1], 1, 1),
        (probs, ids, ["4", 4], [1, 1], 1, 1),
        (probs, ids, [4, 4], [1, None], 1, 1),
        (probs, ids, [4, 4], [1, 1], "1", 1),
        (probs, ids, [4, 4]),
    ):
        with pytest.raises(TypeError):
            LOOPS.distinct_each(*wrong)


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
