"""Draws from the highest logits of an EAGLE head are those from its whole rows, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from support.head_chains import eagle_drafter

from specrun.bindings.models.model import Model
from specrun.runtime.drafters.eagle import Eagle3Head
from specrun.runtime.drafters.growing.source import HighestLogits
from specrun.runtime.laws import Law, SamplingParams, SeededNoise, transformed_law
from specrun.runtime.round import DraftRequest
from specrun.runtime.trees import TreeSampling, parse_topology

torch = pytest.importorskip("torch")
from support.tiny_eagle3 import Variant, random_eagle3  # noqa: E402

HIDDEN, VOCAB = 32, 320


def same(a: Law, b: Law) -> bool:
    ids = a.ids is not None and b.ids is not None and np.array_equal(a.ids, b.ids)
    return ids and a.probs.tobytes() == b.probs.tobytes()


@pytest.mark.parametrize("top_k", [1, 2, 7, 40])
def test_the_highest_logits_say_the_law_of_the_row(top_k: int) -> None:
    """Over random rows with ties, tokens that cannot come, and every truncation."""
    rng = np.random.default_rng(top_k)
    for trial in range(200):
        row = rng.normal(0.0, rng.choice([0.5, 3.0, 30.0]), VOCAB).astype(np.float32)
        if trial % 2:
            row = np.round(row * 2) / 2  # ties everywhere
        if trial % 3 == 0:
            row[rng.integers(0, VOCAB, 250)] = -np.inf
        params = SamplingParams(
            temperature=float(rng.choice([0.3, 1.0, 2.0])),
            top_k=top_k,
            top_p=float(rng.choice([1.0, 0.95, 0.4])),
            min_p=float(rng.choice([0.0, 0.05, 0.5])),
        )
        # The order of equals is the backend's: here it is random.
        best = np.lexsort((rng.random(VOCAB), -row))[: top_k + 1]
        if row[best[-1]] == row[best[-2]]:
            continue  # whole rows are read then
        tokens = np.sort(best).astype(np.int32)[None]
        found = HighestLogits(tokens, row[tokens]).laws(params)[0]
        assert same(found, transformed_law(row, params))


@pytest.fixture
def head(tiny_deep_model: Path, tmp_path: Path) -> Iterator[Eagle3Head]:
    """A head of 64 tokens, neighbours of which have equal logits after every pair."""
    path = tmp_path / "head.gguf"
    made = random_eagle3(HIDDEN, VOCAB, Variant(draft_tokens=64))
    made.weights["lm_head.weight"][1::2] = made.weights["lm_head.weight"][::2]
    made.write(path, tiny_deep_model)
    with Model(tiny_deep_model) as target:
        opened = Eagle3Head(path, target, ranks=4, whole_rows=True, n_threads=1)
        yield opened
        opened.close()


@pytest.mark.parametrize("sampling", ["with", "without"])
@pytest.mark.parametrize("top_k", [3, 4, 63])
def test_drafts_and_laws_are_those_of_whole_rows(
    head: Eagle3Head, sampling: TreeSampling, top_k: int
) -> None:
    """An even top_k cuts between two pairs of equals, an odd one between equals."""
    shape = parse_topology("3x2x2")
    highest, whole = (eagle_drafter(head.cells(200), shape, sampling=sampling) for _ in range(2))
    asked: list[int] = []
    evaluate = highest.source.state._cells.evaluate

    def noted(*arguments, **named):  # type: ignore[no-untyped-def]
        asked.append(named["highest"])
        rows = evaluate(*arguments, **named)
        assert (rows.logits is None) == (top_k % 2 == 0)
        return rows

    highest.source.state._cells.evaluate = noted  # type: ignore[method-assign]
    whole._most_highest = lambda _: 0  # type: ignore[method-assign]
    rng = np.random.default_rng(0)
    text = rng.integers(0, VOCAB, 2).tolist()
    params = SamplingParams(temperature=0.9, top_k=top_k, top_p=0.9, min_p=0.01)
    with closing(highest), closing(whole):
        for number in range(10):
            states = rng.normal(size=(1, head.sizes.features)).astype(np.float32)
            trees = []
            for drafter in (highest, whole):
                drafter.source.state.learn(len(text) - 2, states, text)
                noise = SeededNoise(number).for_drafting(len(text))
                trees.append(drafter.propose(DraftRequest(text, params, noise, 9, 99)))
            ours, theirs = trees
            assert (ours.tokens, ours.parents) == (theirs.tokens, theirs.parents)
            for parent, draws in theirs.draws.items():
                for mine, other in zip(ours.draws[parent], draws, strict=True):
                    assert mine.node == other.node
                    assert same(mine.law, other.law)  # type: ignore[arg-type]
            text = [*text, int(rng.integers(0, VOCAB))]
    assert set(asked) == {top_k + 1}


def test_what_was_said_for_other_settings_is_asked_again(head: Eagle3Head) -> None:
    """Two proposals after one text: a greedy one, and draws with other truncations."""
    drafter = eagle_drafter(head.cells(200), parse_topology("2x2"), sampling="without", p_min=0.001)
    fresh = eagle_drafter(head.cells(200), parse_topology("2x2"), sampling="without", p_min=0.001)
    states = np.random.default_rng(1).normal(size=(1, head.sizes.features)).astype(np.float32)
    settings = [
        SamplingParams(temperature=0.9, top_k=4),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.9, top_k=10),
        SamplingParams(temperature=0.9, top_k=0),
        SamplingParams(temperature=0.9, top_k=4),
    ]
    with closing(drafter), closing(fresh):
        drafter.source.state.learn(0, states, [3, 4])
        for params in settings:
            fresh.begin(())
            fresh.source.state.learn(0, states, [3, 4])
            trees = [
                asked.propose(DraftRequest([3, 4], params, SeededNoise(5).for_drafting(2), 9, 99))
                for asked in (drafter, fresh)
            ]
            assert trees[0].tokens == trees[1].tokens
            assert len(trees[0]) > 1


def test_settings_that_need_whole_rows(head: Eagle3Head) -> None:
    with closing(eagle_drafter(head.cells(9), parse_topology("2"), sampling="with")) as drafter:
        assert drafter._most_highest(SamplingParams(temperature=1.0, top_k=40)) == 41
        for changes in (
            {"top_k": 0},
            {"top_k": 64},
            {"top_k": 4, "repeat_penalty": 1.1},
            {"top_k": 4, "logit_bias": {3: 1.0}},
        ):
            assert drafter._most_highest(SamplingParams(temperature=1.0, **changes)) == 0
