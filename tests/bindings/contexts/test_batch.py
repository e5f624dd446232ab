"""Batches: refused contents, and llama.cpp's reading of the written ones."""

from __future__ import annotations

import numpy as np
import pytest
from support.tiny_models import F32, fresh_logits

from specrun.bindings.contexts import Batch, BatchShape, Context, ContextOptions, chain_shape
from specrun.bindings.errors import OptionError
from specrun.bindings.models import Model


@pytest.mark.parametrize(("capacity", "ids"), [(0, 1), (-1, 1), (1, 0)])
def test_a_batch_without_room_is_refused(capacity, ids):
    with pytest.raises(OptionError, match="at least one"):
        Batch(capacity, ids)


FILLS = {
    "overfull": (([1] * 5, range(5), [1] * 5, [0] * 5, [1] * 5), "5 tokens in a batch for 1 to 4"),
    "empty": (([], [], [], [], []), "0 tokens"),
    "positions-short": (([1, 2], [0], [1, 1], [0, 0], [1, 1]), "differ in length"),
    "counts-short": (([1, 2], [0, 1], [1], [0, 0], [1, 1]), "differ in length"),
    "outputs-long": (([1, 2], [0, 1], [1, 1], [0, 0], [1, 1, 1]), "differ in length"),
    "too-many-ids": (
        ([1] * 4, range(4), [3] * 4, [0] * 12, [1] * 4),
        "12 sequence ids in a batch for 8",
    ),
    "token-without-id": (([1, 2], [0, 1], [2, 0], [0, 1], [1, 1]), "at least one sequence id"),
    "id-left-over": (([1, 2], [0, 1], [1, 1], [0, 0, 0], [1, 1]), "left over"),
    "id-missing": (([1, 2], [0, 1], [1, 2], [0, 0], [1, 1]), "left over"),
}


@pytest.mark.parametrize(("arguments", "message"), FILLS.values(), ids=FILLS)
def test_a_fill_that_does_not_fit_is_refused(arguments, message):
    with pytest.raises(OptionError, match=message):
        Batch(4, 2).fill(*arguments)


@pytest.mark.parametrize(("tokens", "start"), [([1, 1 << 31], 0), ([1, 2], (1 << 31) - 1)])
def test_numbers_of_more_than_32_bits_are_refused_before_anything_is_written(tokens, start):
    batch, shape = Batch(4, 2), BatchShape.of((0, 1), [[0], [0]], [0, 1])
    batch.fill_shape([7, 8], 5, shape)
    with pytest.raises(OverflowError):
        batch.fill_shape(tokens, start, shape)
    assert (batch.tokens[:2].tolist(), batch.positions[:2].tolist()) == ([7, 8], [5, 6])


#       3 - 4 - 5
# root <
#       6 - 7
#        \- 8 - 9     as sequences 0, 1 and 2
TREE = {
    "tokens": [3, 4, 5, 6, 7, 8, 9],
    "depths": [1, 2, 3, 1, 2, 2, 3],
    "ids": [(0,), (0,), (0,), (1, 2), (1,), (2,), (2,)],
}
PATHS = {2: [3, 4, 5], 4: [6, 7], 6: [6, 8, 9]}


@pytest.mark.parametrize("n_ubatch", [512, 3], ids=["one-ubatch", "split-into-ubatches"])
def test_a_tree_in_one_batch_equals_its_paths_one_by_one(tiny_model, n_ubatch):
    prompt = [11, 12, 13]
    options = ContextOptions(**F32, n_sequences=3, n_outputs=8, n_ubatch=n_ubatch)
    with Model(tiny_model) as model, Context(model, options) as context:
        batch = Batch(16, 3)
        batch.fill_chain(prompt[:-1], 0, [0, 1, 2], 0)
        context.decode(batch)
        batch.fill(
            [prompt[-1], *TREE["tokens"]],
            [2, *(2 + depth for depth in TREE["depths"])],
            [3, *map(len, TREE["ids"])],
            [0, 1, 2, *(seq_id for ids in TREE["ids"] for seq_id in ids)],
            [1] * 8,
        )
        rows = context.decode(batch)
        for leaf, path in PATHS.items():
            expected = fresh_logits(model, [*prompt, *path])
            np.testing.assert_allclose(rows.logits(0), expected[2], atol=1e-4)
            np.testing.assert_allclose(rows.logits(leaf + 1), expected[-1], atol=1e-4)
            wrong = fresh_logits(model, [*prompt[:-1], *path])[-1]
            assert np.abs(rows.logits(leaf + 1) - wrong).max() > 1e-2  # the comparison can fail


def test_rows_belong_to_the_tokens_that_asked_for_output(tiny_model):
    tokens = [5, 6, 7, 8]
    with Model(tiny_model) as model, Context(model, ContextOptions(**F32, n_outputs=4)) as context:
        batch = Batch(4, 1)
        batch.fill(tokens, range(4), [1] * 4, [0] * 4, [0, 1, 0, 1])
        rows = context.decode(batch)
        assert rows.count == 2
        expected = fresh_logits(model, tokens)
        np.testing.assert_allclose(rows.logits(0), expected[1], atol=1e-4)
        np.testing.assert_allclose(rows.logits(1), expected[3], atol=1e-4)


def test_a_smaller_fill_leaves_nothing_of_the_larger_one_before(tiny_model):
    with Model(tiny_model) as model, Context(model, ContextOptions(**F32, n_outputs=4)) as context:
        batch = Batch(8, 1)
        batch.fill_chain([300, 301, 302, 303], 0, [0], 4)
        batch.fill_chain([5, 6], 0, [0], 1)
        rows = context.decode(batch)
        assert rows.count == 1
        assert context.memory.last_position() == 1
        np.testing.assert_allclose(rows.logits(0), fresh_logits(model, [5, 6])[1], atol=1e-4)


def test_fill_one_is_a_chain_of_one(tiny_model):
    with Model(tiny_model) as model, Context(model, ContextOptions(**F32)) as context:
        batch = Batch(4, 1)
        for position, token in enumerate([5, 6, 7]):
            batch.fill_one(token, position)
            rows = context.decode(batch)
        np.testing.assert_allclose(rows.logits(0), fresh_logits(model, [5, 6, 7])[2], atol=1e-4)


def test_a_single_token_after_a_batch_of_several_is_filled_anew():
    batch = Batch(4, 2)
    for _ in range(2):
        batch.fill_one(7, 30, 2)
        batch.fill([1, 2], [5, 6], [1, 1], [0, 1], [0, 0])
        batch.fill_one(8, 31, 2)
        batch.fill_one(9, 32, 2)  # only token and position differ from the earlier contents
        assert (batch.n_tokens, batch.n_outputs, batch.first_position) == (1, 1, 32)
        assert (batch.token_bounds, batch.id_bounds) == ((9, 9), (2, 2))
        assert [
            int(column[0]) for column in (batch.tokens, batch.positions, batch.id_counts, batch.ids)
        ] == [9, 32, 1, 2]
        batch.fill_one(9, 33, 1)
        assert batch.id_bounds == (1, 1)
        assert int(batch.ids[0]) == 1


def written(batch: Batch, n: int) -> tuple[object, ...]:
    """Everything of n tokens that llama.cpp reads, and that the context checks."""
    n_ids = int(batch.id_counts[:n].sum())
    fields = (batch.tokens, batch.positions, batch.id_counts, batch.outputs)
    return (
        *(field[:n].tolist() for field in fields),
        batch.ids[:n_ids].tolist(),
        (batch._pointers[:n] - batch.ids.ctypes.data).tolist(),
        (batch.n_tokens, batch.n_outputs, batch.first_position),
        (batch.token_bounds, batch.id_bounds),
    )


def test_a_shape_is_written_as_its_tokens_one_by_one():
    ids = [(0, 1, 2), (0,), (1, 2), (1,), (2,)]
    shape = BatchShape.of([0, 1, 1, 2, 2], ids, [1, 1, 1, 0, 1])
    shaped, plain = Batch(8, 3), Batch(8, 3)
    for start, tokens in ((4, [9, 8, 7, 6, 5]), (5, [1, 2, 3, 4, 0]), (0, [3, 3, 3, 3, 3])):
        shaped.fill_shape(tokens, start, shape)
        plain.fill(
            tokens,
            [start + depth for depth in shape.depths],
            [len(own) for own in ids],
            [sequence for own in ids for sequence in own],
            [1, 1, 1, 0, 1],
        )
        assert written(shaped, 5) == written(plain, 5)
        # Whatever came in between, a shape is written as a whole the next time.
        shaped.fill_one(2, 1, 2)
        shaped.fill_shape([4, 4], 2, chain_shape(2, (1,), 1))
        shaped.fill_shape([4, 5], 3, chain_shape(2, (1,), 1))
        plain.fill([4, 5], [3, 4], [1, 1], [1, 1], [0, 1])
        assert written(shaped, 2) == written(plain, 2)


def test_tokens_that_do_not_fit_their_shape_are_refused():
    with pytest.raises(OptionError, match="3 tokens in a shape for 2"):
        Batch(4, 1).fill_shape([1, 2, 3], 0, chain_shape(2, (0,), 1))
    with pytest.raises(OptionError, match="5 tokens in a batch for 1 to 4"):
        Batch(4, 1).fill_shape([1] * 5, 0, chain_shape(5, (0,), 1))


def test_what_was_found_right_of_a_batch_is_looked_at_again_where_it_changes(tiny_model):
    """A context checks ids and flags of a shape once, tokens and positions every time."""
    with Model(tiny_model) as model, Context(model, ContextOptions(**F32, n_outputs=4)) as context:
        batch = Batch(8, 1)
        batch.fill_shape([1, 2], 0, chain_shape(2, (0,), 1))
        context.decode(batch)
        for tokens, start, problem in (
            ([1, 320], 2, "outside the vocabulary"),
            ([-1, 2], 2, "outside the vocabulary"),
            ([1, 2], -1, "position -1"),
        ):
            batch.fill_shape(tokens, start, chain_shape(2, (0,), 1))
            with pytest.raises(OptionError, match=problem):
                context.decode(batch)
        for ids, n_outputs, problem in (
            ((1,), 1, "a sequence id of the batch"),
            ((0,), 5, "5 output rows"),
        ):
            n = max(2, n_outputs)
            batch.fill_shape([1] * n, 2, chain_shape(n, ids, n_outputs))
            with pytest.raises(OptionError, match=problem):
                context.decode(batch)
        batch.fill_shape([1, 2], 2, chain_shape(2, (0,), 1))
        assert context.decode(batch).count == 1
