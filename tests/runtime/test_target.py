"""Invariant 2, KV truth: after any rounds, the next logits equal a fresh evaluation of the same
tokens.

F32 weights and cache, flash attention off, so that only the order of sums differs: 1e-5.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from specrun.bindings.contexts.batch import Batch
from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.contexts.memory import Memory, Moves
from specrun.bindings.errors import OptionError
from specrun.bindings.models.model import Model
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime.round import CachedText, TargetModel
from specrun.runtime.trees import ROOT, DraftTree, TreeBuilder
from specrun.runtime.trees.layout import arrange_tree, count_leaves, layout_tree, moves_onto

SEQUENCES = 8
VOCABULARY = 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path: Path = tmp_path_factory.mktemp("kv") / "model.gguf"
    write_random_llama(path, RandomLlama(vocab_size=VOCABULARY, seed=3, scale=2.0))
    with Model(path) as model:
        yield model


def options(n_sequences: int = SEQUENCES) -> ContextOptions:
    return ContextOptions(
        n_ctx=256,
        n_sequences=n_sequences,
        n_outputs=32,
        n_threads=1,
        flash_attention="off",
        cache_type_k="f32",
        cache_type_v="f32",
    )


def fresh_logits(model: Model, tokens: list[int], shift: int = 0) -> np.ndarray:
    """The last token's logits, evaluated from nothing; `shift` moves it away from its position."""
    with Context(model, options(1)) as context:
        batch = Batch(context.n_batch, 1)
        if len(tokens) > 1:
            batch.fill_chain(tokens[:-1], 0, [0], 0)
            context.decode(batch)
        if shift:
            context.memory.truncate(len(tokens) - 1 - shift)
        batch.fill_one(tokens[-1], len(tokens) - 1 - shift)
        return context.decode(batch).logits(0).copy()


def random_tree(generator: np.random.Generator) -> DraftTree:
    """A tree of up to 16 nodes and `SEQUENCES` leaves, hidden nodes among them."""
    builder = TreeBuilder()
    candidates = [ROOT]
    for _ in range(int(generator.integers(0, 17))):
        parent = int(generator.choice(candidates))
        token = int(generator.integers(VOCABULARY))
        if generator.random() < 0.2:
            builder.add_hidden(parent, token)
        else:
            candidates.append(builder.add(parent, token))
        if count_leaves(builder.build().parents) == SEQUENCES:
            break
    return builder.build()


def random_path(tree: DraftTree, generator: np.random.Generator) -> list[int]:
    """Any path of candidates from the root down, possibly empty."""
    nodes = [ROOT, *(node for node in range(len(tree)) if tree.is_candidate[node])]
    return tree.path_to(int(generator.choice(nodes)))


@pytest.mark.parametrize("seed", range(8))
def test_after_many_rounds_the_cache_is_that_of_the_committed_tokens(
    model: Model, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    with Context(model, options()) as context:
        target = TargetModel(context)
        tokens = [int(token) for token in generator.integers(VOCABULARY, size=7)]
        text = CachedText(tokens)
        target.prefill(text, 6)
        waited = 0
        for _ in range(8):
            tree = random_tree(generator)
            rows = target.evaluate(text, tree)
            np.testing.assert_allclose(rows.logits(0), fresh_logits(model, tokens), atol=1e-5)
            for node in range(len(tree)):
                path = [tree.tokens[ancestor] for ancestor in tree.path_to(node)]
                np.testing.assert_allclose(
                    rows.logits(node + 1), fresh_logits(model, tokens + path), atol=1e-5
                )
            accepted = random_path(tree, generator)
            target.commit(text, tree, accepted)
            tokens += [tree.tokens[node] for node in accepted]
            assert text.tokens == tokens
            waited += text.n_cached < len(tokens)
            tokens.append(int(generator.integers(VOCABULARY)))
            text.tokens.append(tokens[-1])
            positions = {context.memory.last_position(sequence) for sequence in range(SEQUENCES)}
            assert positions == {text.n_cached - 1}
        # Accepted nodes beside the first path were evaluated again, or this test sees none of it.
        assert waited


def test_a_position_shifted_by_one_is_seen(model: Model) -> None:
    """Negative control: the comparison above fails for a cache that is off by one position."""
    tokens = [5, 9, 2, 40, 33, 17]
    shifted = fresh_logits(model, tokens, shift=1)
    assert np.abs(shifted - fresh_logits(model, tokens)).max() > 1e-3


def test_a_rejected_sibling_left_in_the_cache_is_seen(model: Model) -> None:
    """Negative control: with one stale cell among the committed ones the next logits differ."""
    with Context(model, options()) as context:
        target = TargetModel(context)
        text = CachedText([5, 9, 2, 17])
        target.prefill(text, 3)
        builder = TreeBuilder()
        keep, stale = builder.add(ROOT, 40), builder.add(ROOT, 21)
        tree = builder.build()
        target.evaluate(text, tree)
        sequence_of_stale = layout_tree(tree.parents, SEQUENCES).ids[stale][0]
        target.commit(text, tree, [keep])
        text.tokens.append(8)
        clean = fresh_logits(model, [5, 9, 2, 17, 40, 8])
        np.testing.assert_allclose(target.evaluate(text, DraftTree()).logits(0), clean, atol=1e-5)
        assert sequence_of_stale != 0
    with Context(model, options()) as context:
        target = TargetModel(context)
        text = CachedText(
            [5, 9, 2, 17, 21, 8]
        )  # what a commit that keeps the wrong sibling would leave
        target.prefill(text, 5)
        assert np.abs(target.evaluate(text, DraftTree()).logits(0) - clean).max() > 1e-3


def test_rewinding_and_going_another_way_leaves_no_trace(model: Model) -> None:
    with Context(model, options()) as context:
        target = TargetModel(context)
        text = CachedText([1, 2, 3, 4, 5, 6])
        target.prefill(text, 5)
        target.evaluate(text, DraftTree.chain([7, 8]))
        target.rewind(text, 3)
        assert (text.tokens, text.n_cached) == ([1, 2, 3], 3)
        text.tokens += [9, 10]
        target.prefill(text, 4)
        np.testing.assert_allclose(
            target.evaluate(text, DraftTree()).logits(0),
            fresh_logits(model, [1, 2, 3, 9, 10]),
            atol=1e-5,
        )


def interrupt_change(patch: pytest.MonkeyPatch, memory: Memory, call: int, *, after: bool) -> None:
    """Interrupt the k-th change of a memory by llama.cpp, before or after it is made."""
    left = [call]

    def interrupted(change: Callable[..., object]) -> Callable[..., object]:
        def changed(*values: int) -> object:
            left[0] -= 1
            if not left[0] and not after:
                raise KeyboardInterrupt
            result = change(*values)
            if not left[0]:
                raise KeyboardInterrupt
            return result

        return changed

    for name in ("_remove", "_share"):
        patch.setattr(memory, name, interrupted(getattr(memory, name)))


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("call", range(1, 6))
def test_an_interrupt_in_the_midst_of_a_commit_or_a_rewind_leaves_a_number_that_is_true(
    model: Model, monkeypatch: pytest.MonkeyPatch, call: int, after: bool
) -> None:
    """Cache and tokens change together: what the text says is cached is, and is what a fresh
    evaluation finds."""
    builder = TreeBuilder()
    nodes = [builder.add(ROOT, token) for token in (40, 21, 33)]
    last = builder.add(nodes[0], 50)
    tree = builder.build()
    with Context(model, options()) as context:
        target, text = TargetModel(context), CachedText([5, 9, 2, 17])
        target.prefill(text, 3)
        target.evaluate(text, tree)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            interrupt_change(patch, context.memory, call, after=after)
            target.commit(text, tree, [nodes[0], last])
            target.rewind(text, 2)
            target.rewind(text, 1)
            target.rewind(text, 0)
            raise AssertionError("there are fewer changes than that")
        target.rewind(text, min(text.n_cached, 3))
        text.tokens = [5, 9, 2, 8]
        target.prefill(text, 3)
        np.testing.assert_allclose(
            target.evaluate(text, DraftTree()).logits(0),
            fresh_logits(model, [5, 9, 2, 8]),
            atol=1e-5,
        )


def one_by_one(memory: Memory, source: int, first: int, end: int, moves: Moves) -> None:
    for sequence, shared, strays in moves:
        if strays:
            memory.truncate(first + shared, end, sequence)
        memory.branch(source, sequence, first + shared, end)


def test_moves_leave_what_drops_and_shares_one_by_one_leave(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over random trees and paths: each sequence holds the same cells, and goes on alike."""
    generator = np.random.default_rng(3)
    n_moves = 0
    for _ in range(12):
        builder = TreeBuilder()
        for token in range(10, 20):
            nodes = range(-1, len(builder))
            parent = int(generator.choice(nodes))
            if count_leaves((*builder.build().parents, parent)) <= SEQUENCES:
                builder.add(parent, token)
        tree = builder.build()
        path = tree.path_to(int(generator.integers(len(tree))))
        n_moves += len(moves_onto(tuple(path), tree.parents, SEQUENCES))
        held: list[list[object]] = []
        for follow in (Memory.follow, one_by_one):
            monkeypatch.setattr(Memory, "follow", follow)
            with Context(model, options()) as context:
                target, text = TargetModel(context), CachedText([5, 9, 2, 17])
                target.prefill(text, 3)
                target.evaluate(text, tree)
                target.commit(text, tree, path)
                text.tokens.append(7)
                memory = context.memory
                ends = [memory.last_position(sequence) for sequence in range(SEQUENCES)]
                rows = target.evaluate(text, tree)
                logits = [rows.logits(row).tobytes() for row in range(1 + len(tree))]
                held.append([ends, text.tokens, text.n_cached, logits])
        assert held[0] == held[1]
    assert n_moves > 30  # or this test compares nothing


@pytest.mark.parametrize(("n_prompt", "n_cached"), [(2, 1), (0, 3)])
def test_a_text_whose_prompt_was_not_read_or_that_is_cached_whole_is_refused(
    model: Model, n_prompt: int, n_cached: int
) -> None:
    text = CachedText([1, 2, 3])
    text.n_prompt, text.n_cached = n_prompt, n_cached
    with (
        Context(model, options()) as context,
        pytest.raises(OptionError, match=f"of 3 tokens {n_cached} are cached"),
    ):
        TargetModel(context).evaluate(text, DraftTree())


def test_more_pending_tokens_than_a_round_takes_have_batches_of_their_own(model: Model) -> None:
    """40 tokens behind a prompt of 4, in a context whose evaluations take 32."""
    tokens = [n % VOCABULARY for n in range(44)]
    with Context(model, options()) as context:
        target, text = TargetModel(context), CachedText(tokens)
        target.prefill(text, 4)
        rows = target.evaluate(text, DraftTree.chain([7]))
        np.testing.assert_allclose(rows.logits(1), fresh_logits(model, [*tokens, 7]), atol=1e-5)
        target.commit(text, DraftTree.chain([7]), [0])
        assert (text.tokens, text.n_cached) == ([*tokens, 7], 45)


def test_nodes_that_are_no_path_are_refused(model: Model) -> None:
    with Context(model, options()) as context:
        target = TargetModel(context)
        builder = TreeBuilder()
        first, second = builder.add(ROOT, 1), builder.add(ROOT, 2)
        text = CachedText([3])
        target.evaluate(text, builder.build())
        with pytest.raises(OptionError, match="not a path"):
            target.commit(text, builder.build(), [first, second])


def test_a_tree_with_too_many_leaves_is_refused_before_the_call(model: Model) -> None:
    with Context(model, options()) as context:
        builder = TreeBuilder()
        for token in range(SEQUENCES + 1):
            builder.add(ROOT, token)
        with pytest.raises(OptionError, match="more leaves"):
            TargetModel(context).evaluate(CachedText([3]), builder.build())


def random_parents(source: random.Random) -> tuple[int, ...]:
    return tuple(source.randrange(-1, node) for node in range(source.randrange(8)))


@pytest.mark.parametrize("width", [0, 16])
def test_a_tree_is_arranged_likeliest_path_first(width: int) -> None:
    source = random.Random(5)
    for _ in range(300):
        parents, n_pending = random_parents(source), source.randrange(4)
        hidden = {n for n in range(len(parents)) if source.random() < 0.3}
        candidates = tuple(node not in hidden for node in range(len(parents)))
        arranged = arrange_tree(parents, candidates, n_pending, width)
        n_real = n_pending + len(parents)
        assert len(arranged.parents) == (width - 1 if width else n_real)
        assert all(parent < node for node, parent in enumerate(arranged.parents))
        assert arranged.places[0] == n_pending
        assert sorted(arranged.places[1:]) == [*range(n_pending + 1, n_real + 1)]
        # Every node hangs where it did; numbers below the first token are places less 1.
        for node, parent in enumerate(parents):
            place = arranged.places[node + 1]
            assert arranged.parents[place - 1] == arranged.places[parent + 1] - 1
            assert arranged.order[place - n_pending - 1] == node
        # The first child that can be accepted, if any, comes right behind its parent.
        for parent in range(-1, len(parents)):
            below = [node for node, above in enumerate(parents) if above == parent]
            if below:
                first = min(below, key=lambda node: (node in hidden, node))
                assert arranged.places[first + 1] == arranged.places[parent + 1] + 1
        # The filling hangs below the first token, and nothing else hangs below it.
        assert [*arranged.parents[n_real:]][:1] in ([], [ROOT])
        assert all(parent >= n_real for parent in arranged.parents[n_real + 1 :])


@pytest.mark.parametrize(
    "parents", [(), (-1,), (-1, 0, 1), (-1, -1, 0, 0, 1), (-1, 0, -1, 2, 2)], ids=str
)
def test_layout_gives_every_path_its_sequences(parents: tuple[int, ...]) -> None:
    layout = layout_tree(parents, 4)
    ids = [set(sequence_ids) for sequence_ids in layout.ids]
    for node, parent in enumerate(parents):
        if parent != ROOT:
            assert ids[node] <= ids[parent]
        siblings = [
            set(layout.ids[other])
            for other in range(len(parents))
            if other != node and parents[other] == parent
        ]
        assert all(ids[node].isdisjoint(other) for other in siblings)
    assert set(range(4)) == (
        set().union(*(ids[n] for n, p in enumerate(parents) if p == ROOT))
        if parents
        else set(range(4))
    )
    assert list(layout.shape.ids[:4]) == [0, 1, 2, 3]


def test_moves_bring_every_other_sequence_onto_the_path():
    parents = (ROOT, ROOT, 0, 0, 1)  # leaves 2, 3 and 4; sequence 3 rides along with leaf 2
    assert moves_onto((), parents, 4) == ()
    assert moves_onto((0, 2), parents, 4) == ((1, 1, True), (2, 0, True))
    assert moves_onto((0,), parents, 4) == ((2, 0, True),)
    with pytest.raises(OptionError, match="not a path"):
        moves_onto((0, 4), parents, 4)
