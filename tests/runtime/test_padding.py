"""Batches that are padded to a cheaper width: same rows, same cache, same text, for every tree."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiny_hybrids import HYBRIDS
from support.tiny_mamba import write_tiny_mamba
from support.tiny_models import F32, fresh_logits
from support.tiny_nextn import write_tiny_qwen35

from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.models.model import Model
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.planning import CostCurve, save_curve
from specrun.runtime.round import CachedText, NoDrafter, TargetModel
from specrun.runtime.round.padding import PaddedTarget, Parents, filled, open_target, paddings
from specrun.runtime.trees import ROOT, DraftTree
from specrun.runtime.trees.layout import layout_tree, moves_onto

WIDTH = 12
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4]
TREES = [
    DraftTree.of_points((7,), (ROOT,)),
    DraftTree.of_points((7, 8, 9), (ROOT, 0, 1)),
    DraftTree.of_points((7, 8, 9, 7), (ROOT, ROOT, 0, 1)),
    DraftTree.of_points((7, 8, 9, 7, 2), (ROOT, ROOT, 1, 1, 0)),
]


def wider(n: int, most: int) -> int:
    """All that is wider than one token costs as much as 12."""
    return min(WIDTH, most) if n > 1 else n


def random_parents(source: random.Random, n: int) -> tuple[int, ...]:
    return tuple(source.randrange(-1, node) for node in range(n))


def leaves(parents: tuple[int, ...]) -> int:
    return max(1, len(parents) - len(set(parents) - {ROOT}))


def beside(parents: Parents, width: int) -> Parents:
    """Wrong: what fills the batch hangs below the root, so it is one leaf more."""
    return (*parents, ROOT, *range(len(parents), width - 2))


def same_sequences(parents: Parents, padded: Parents, n_sequences: int) -> bool:
    n = len(parents)
    own, other = (layout_tree(each, n_sequences) for each in (parents, padded))
    return own.ids == other.ids[:n] and own.n_leaves == other.n_leaves


def test_no_tree_gets_another_leaf_or_other_sequences() -> None:
    """300 random trees: ids of nodes, and what a commit moves, are those of the tree alone."""
    source, wrong = random.Random(1), 0
    for _ in range(300):
        parents = random_parents(source, source.randrange(1, 10))
        tree, n_sequences = DraftTree.of_points(range(len(parents)), parents), 10
        width = 1 + len(parents) + source.randrange(1, 9)
        padded = filled(parents, width)
        assert (padded[: len(parents)], len(padded)) == (parents, width - 1)
        assert same_sequences(parents, padded, n_sequences)
        wrong += same_sequences(parents, beside(parents, 14), n_sequences)
        for node in range(len(tree)):
            path = tuple(tree.path_to(node))
            ours, theirs = (moves_onto(path, each, n_sequences) for each in (parents, padded))
            assert [move[:2] for move in ours] == [move[:2] for move in theirs]
    assert wrong == 0  # the control: below the root it is another leaf every time


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Iterator[Model]:
    with Model(tiny_model) as model:
        yield model


class Sized(NoDrafter):
    max_leaves, max_nodes = 3, 6


def opened(model: Model, **options: Any) -> TargetModel:
    return open_target(model, Sized(), ContextOptions(**{**F32, **options}), "free", wider)


def test_rows_and_cache_are_those_of_a_fresh_evaluation(model: Model) -> None:
    """After rounds with every tree and path the logits of each node equal a fresh evaluation's, and
    nothing but the committed tokens is left in the cache."""
    target = opened(model)
    assert isinstance(target, PaddedTarget)
    with closing(target.context):
        text = CachedText(PROMPT)
        target.prefill(text, len(PROMPT) - 1)
        widths = []
        for tree in TREES * 3:
            for node in (*range(len(tree)), ROOT):
                rows = target.evaluate(text, tree)
                widths.append(target._batch.n_tokens)
                path = [] if node == ROOT else tree.path_to(node)
                wanted = fresh_logits(model, [*text.tokens, *(tree.tokens[i] for i in path)])[-1]
                np.testing.assert_allclose(rows.logits(node + 1), wanted, atol=1e-5)
                target.commit(text, tree, path)
                text.tokens.append(5)
                assert target.context.memory.last_position() == text.n_cached - 1
        assert set(widths) == {WIDTH}


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_recurrent_state_takes_back_what_fills_a_chain(tmp_path: Path, family: str) -> None:
    """After chains of every length, accepted as far as can be, logits are a fresh evaluation's."""
    with Model(HYBRIDS[family](tmp_path / "model.gguf")) as model:
        drafter = Sized()
        drafter.max_leaves = 1
        target = open_target(model, drafter, ContextOptions(**F32), "free", wider)
        with closing(target.context):
            text, widths = CachedText(PROMPT), set()
            target.prefill(text, len(PROMPT) - 1)
            for length, kept in [(0, 0), (1, 1), (1, 0), (3, 1), (3, 3), (6, 2), (5, 5), (6, 6)]:
                tree = DraftTree.chain((7, 8, 9, 7, 2, 3)[:length])
                rows = target.evaluate(text, tree)
                widths.add(target._batch.n_tokens)
                wanted = fresh_logits(model, [*text.tokens, *tree.tokens])
                for row in range(length + 1):
                    place = len(text.tokens) - 1 + row
                    np.testing.assert_allclose(rows.logits(row), wanted[place], atol=1e-4)
                target.commit(text, tree, range(kept))
                text.tokens.append(5)
                assert target.context.memory.last_position() == text.n_cached - 1
            assert widths == {1, 1 + drafter.max_nodes}  # as many as there are states for


def test_a_position_that_is_missing_at_the_end_is_not_padded(model: Model) -> None:
    target = opened(model, n_ctx=256)
    with closing(target.context):
        tokens = [n % 60 for n in range(target.n_positions - 4)]
        text = CachedText(tokens)
        target.prefill(text, len(tokens) - 1)
        target.evaluate(text, TREES[1])
        assert target._batch.n_tokens == 4


def test_only_what_branches_and_drafts_is_padded(tmp_path: Path, model: Model) -> None:
    assert paddings(wider, 6, 64) == dict.fromkeys(range(2, 7), WIDTH)
    assert paddings(lambda n, most: n, 6, 64) == {}
    with closing(open_target(model, NoDrafter(), ContextOptions(**F32), "free", wider).context):
        pass
    plain = open_target(model, NoDrafter(), ContextOptions(**F32), "free", wider)
    with closing(plain.context):
        assert type(plain) is TargetModel
    fixed = open_target(
        model, Sized(), ContextOptions(**{**F32, "flash_attention": "on"}), 8, wider
    )
    with closing(fixed.context):
        assert fixed.width == 8
    path = tmp_path / "mamba.gguf"
    write_tiny_mamba(path)
    with Model(path) as recurrent:
        drafter = Sized()
        drafter.max_leaves = 1
        target = open_target(recurrent, drafter, ContextOptions(**F32), "free", wider)
        with closing(target.context):
            assert type(target) is TargetModel


@pytest.mark.parametrize(
    "drafter",
    [
        "draft(FILE, n=4)",
        "draft(FILE, tree=3x2)",
        "prompt-lookup(min_ngram=1, branches=3)",
        "lookahead(window=3, ngram=3, guesses=3)",
        "mtp(n=12, p_min=0.01)",
    ],
)
def test_texts_are_the_same_with_a_measured_curve_that_pads(tmp_path: Path, drafter: str) -> None:
    """The curve lies where `tune` keeps it: what is drafted and drawn is as without padding, in
    float32. NextN blocks draft for a model with a recurrent state."""
    files = [tmp_path / name for name in ("a.gguf", "b.gguf")]
    for path in files:
        if drafter.startswith("mtp"):
            write_tiny_qwen35(path, blocks=1)
        else:
            write_random_llama(path, RandomLlama(vocab_size=64, layers=2, scale=4.0))
    files[1].write_bytes(files[1].read_bytes() + b"\0")  # another file, with a curve of its own
    draft = tmp_path / "draft.gguf"
    write_random_llama(draft, RandomLlama(vocab_size=64, layers=1, scale=4.0))
    sizes = tuple(range(1, 33))
    flat = (1.0, *(1.5,) * 10, *(1.1,) * 21)
    context = ContextOptions(**F32)
    save_curve(CostCurve(sizes, flat, flat, (0.0,) * 32), files[0], context, 0)
    even = (1.0, *(1.1,) * 31)
    save_curve(CostCurve(sizes, even, even, (0.0,) * 32), files[1], context, 0)
    said, kinds = [], []
    for path in files:
        with Runtime(path, drafter.replace("FILE", f'"{draft}"'), **F32) as runtime:
            kinds.append(type(runtime.session.target))
            answers = []
            for temperature in (0.0, 1.0):
                params = SamplingParams(temperature=temperature, seed=3)
                result = runtime.generate(PROMPT * 3, params, max_tokens=40)
                answers.append((result.token_ids, result.stats.drafted, result.stats.accepted))
            said.append(answers)
    assert kinds == [PaddedTarget, TargetModel]
    assert said[0] == said[1]
    assert sum(accepted for _, _, accepted in said[0]) > 0
