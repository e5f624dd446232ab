"""Contexts: checks before an assertion of llama.cpp would end the process, failures, rows,
state."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from support.tiny_models import F32, fresh_logits

from specrun.bindings.contexts import Batch, Context, ContextOptions
from specrun.bindings.errors import (
    ClosedError,
    DecodeFailedError,
    InvalidBatchError,
    NoCacheSlotError,
    OptionError,
    OutOfMemoryError,
    StaleViewError,
)
from specrun.bindings.models import Model

PROMPT = [11, 12, 13]


@pytest.fixture
def model(tiny_model) -> Iterator[Model]:
    with Model(tiny_model) as opened:
        yield opened


@pytest.fixture
def context(model) -> Iterator[Context]:
    """Three sequences, four rows, eight tokens an evaluation."""
    with Context(model, ContextOptions(**F32, n_sequences=3, n_outputs=4, n_batch=8)) as opened:
        yield opened


def chain(tokens, start=0, ids=(0,), n_outputs=1, capacity=300) -> Batch:
    batch = Batch(capacity, 3)
    batch.fill_chain(tokens, start, ids, n_outputs)
    return batch


# -- checks before the native call -----------------------------------------------------------------

BAD_BATCHES = {
    "more tokens than n_batch": (
        lambda: chain([1] * 9),
        "9 tokens in one evaluation of a context for 8",
    ),
    "more rows than n_outputs": (
        lambda: chain([1] * 5, n_outputs=5),
        "5 output rows asked of a context for 4",
    ),
    "empty batch": (lambda: Batch(4, 1), "empty batch"),
    "token beyond the vocabulary": (lambda: chain([1, 320]), "outside the vocabulary of 320"),
    "negative token": (lambda: chain([-1, 1]), "outside the vocabulary"),
    "sequence id beyond": (lambda: chain([1], ids=(0, 3)), "outside 0 to 2"),
    "negative sequence id": (lambda: chain([1], ids=(-1,)), "outside 0 to 2"),
    "negative position": (lambda: chain([1, 2], start=-1), "position -1"),
}


@pytest.mark.parametrize(("make", "message"), BAD_BATCHES.values(), ids=BAD_BATCHES)
def test_a_batch_that_would_abort_the_process_is_refused(context, make, message):
    with pytest.raises(OptionError, match=message):
        context.decode(make())


@pytest.mark.parametrize(
    ("token", "position", "sequence", "problem"),
    [
        (320, 0, 0, "a token of the batch"),
        (-1, 0, 0, "a token of the batch"),
        (1, -1, 0, "position -1"),
        (1, 0, 3, "a sequence id of the batch"),
    ],
)
def test_fill_one_is_checked_too(context, token, position, sequence, problem):
    batch = Batch(1, 1)
    batch.fill_one(token, position, sequence)
    with pytest.raises(OptionError, match=problem):
        context.decode(batch)


def test_hidden_states_count_every_token_as_a_row(model):
    with Context(model, ContextOptions(**F32, n_outputs=2, hidden_states=True)) as context:
        with pytest.raises(OptionError, match="3 output rows asked of a context for 2"):
            context.decode(chain([1, 2, 3]))
        assert context.decode(chain([1, 2])).count == 1


BAD_MEMORY_CALLS = {
    "branch from beyond": (lambda memory: memory.branch(3, 0), "sequence 3"),
    "branch to beyond": (lambda memory: memory.branch(0, 3), "sequence 3"),
    "branch from all": (lambda memory: memory.branch(-1, 0), "sequence -1"),
    "truncate beyond": (lambda memory: memory.truncate(0, sequence=3), "sequence 3"),
    "truncate below all": (lambda memory: memory.truncate(0, sequence=-2), "sequence -2"),
    "truncate from a negative position": (lambda memory: memory.truncate(-1), "position -1"),
    "keep beyond": (lambda memory: memory.keep(3), "sequence 3"),
    "keep all": (lambda memory: memory.keep(-1), "sequence -1"),
    "last position beyond": (lambda memory: memory.last_position(3), "sequence 3"),
    "first position beyond": (lambda memory: memory.first_position(-1), "sequence -1"),
}


@pytest.mark.parametrize(("call", "problem"), BAD_MEMORY_CALLS.values(), ids=BAD_MEMORY_CALLS)
def test_a_memory_call_that_would_abort_the_process_is_refused(context, call, problem):
    with pytest.raises(OptionError, match=problem):
        call(context.memory)


BAD_OPTIONS = [
    {"n_ctx": -1},
    {"n_ctx": 2**31},
    {"n_batch": 0},
    {"n_ubatch": -5},
    {"n_outputs": 0},
    {"n_sequences": 0},
    {"n_sequences": 257},
    {"n_threads": -1},
    {"n_threads": 513},  # ggml's largest is 512: more end the process
    {"n_threads_batch": 100_000},
    {"flash_attention": "maybe"},
    {"cache_type_k": "f17"},
    {"cache_type_v": ""},
]


@pytest.mark.parametrize("options", BAD_OPTIONS, ids=str)
def test_an_option_out_of_range_is_refused_by_name(options):
    (name,) = options
    with pytest.raises(OptionError, match=name.replace("_", "[_ ]")):
        ContextOptions(**options)


@pytest.mark.parametrize(
    "reason", ["", "failed to initialize the context: std::bad_alloc", "Out Of Memory"]
)
def test_no_memory_for_a_context_is_an_error_with_advice(model, monkeypatch, reason):
    words = iter(["", reason])  # read before the call, to forget, and after it
    monkeypatch.setattr("specrun.bindings.contexts.context.last_native_errors", lambda: next(words))
    monkeypatch.setattr(model._native, "llama_init_from_model", lambda _model, _params: None)
    with pytest.raises(OutOfMemoryError, match=r"of 256 tokens .*-c\)") as caught:
        Context(model, ContextOptions(**F32))
    assert caught.value.exit_code == 5
    model.close()  # the failed context does not hold the model


@pytest.mark.parametrize(
    "options",
    [{"cache_type_v": "q8_0", "flash_attention": "off"}, {"cache_type_k": "q4_0"}],
    ids=["value", "key"],
)
def test_cache_types_that_llama_refuses_are_not_called_a_lack_of_memory(model, options):
    with pytest.raises(OptionError, match="cache"):
        Context(model, ContextOptions(n_ctx=256, n_threads=1, **options))
    model.close()


# -- failed evaluations ----------------------------------------------------------------------------


def test_a_full_cache_is_named_and_a_good_batch_follows(model):
    with Context(
        model, ContextOptions(**{**F32, "n_ctx": 256}, n_sequences=2, n_outputs=2)
    ) as context:
        context.decode(chain([7] * 200, ids=(0, 1), n_outputs=0))
        with pytest.raises(NoCacheSlotError, match="-c"):
            context.decode(chain([8] * 57, start=200, ids=(0, 1)))
        assert [context.memory.last_position(seq_id) for seq_id in (0, 1)] == [199, 199]
        rows = context.decode(chain([9], start=200, ids=(0, 1)))
        np.testing.assert_allclose(
            rows.logits(0), fresh_logits(model, [7] * 200 + [9])[-1], atol=1e-4
        )


@pytest.mark.parametrize("start", [5, 2, 0], ids=["gap", "overlap", "again"])
def test_positions_that_do_not_continue_are_named(context, start):
    context.decode(chain(PROMPT))
    with pytest.raises(InvalidBatchError, match="positions"):
        context.decode(chain([14], start=start))


def test_after_a_refused_batch_of_several_sequences_a_good_one_gives_the_right_logits(
    model, context
):
    context.decode(chain(PROMPT, ids=(0, 1, 2)))
    batch = Batch(8, 3)
    # The second token of sequences 1 and 2 leaves a gap: llama.cpp refuses the whole batch.
    batch.fill([14, 15, 16], [3, 5, 5], [3, 1, 1], [0, 1, 2, 1, 2], [1, 1, 1])
    with pytest.raises(InvalidBatchError):
        context.decode(batch)
    assert [context.memory.last_position(number) for number in range(3)] == [2, 2, 2]
    batch.fill([14, 15, 16], [3, 4, 4], [3, 1, 1], [0, 1, 2, 1, 2], [1, 1, 1])
    rows = context.decode(batch)
    np.testing.assert_allclose(
        rows.logits(1), fresh_logits(model, [*PROMPT, 14, 15])[-1], atol=1e-4
    )
    np.testing.assert_allclose(
        rows.logits(2), fresh_logits(model, [*PROMPT, 14, 16])[-1], atol=1e-4
    )


def test_what_a_failed_evaluation_left_behind_is_dropped_from_every_sequence(
    model, context, monkeypatch
):
    """Llama.cpp cleans up under each token's first id only: play a failure after the cells were
    written."""
    context.decode(chain(PROMPT, ids=(0, 1, 2)))
    batch = Batch(8, 3)
    batch.fill([14, 15], [3, 4], [3, 2], [0, 1, 2, 1, 2], [1, 1])
    native = context._native

    class FailsAfterwards:
        def __getattr__(self, name):
            return getattr(native, name)

        def llama_decode(self, handle, struct):
            assert native.llama_decode(handle, struct) == 0
            return -3

    monkeypatch.setattr(context, "_native", FailsAfterwards())
    with pytest.raises(DecodeFailedError, match="returned -3"):
        context.decode(batch)
    monkeypatch.undo()
    assert [context.memory.last_position(number) for number in range(3)] == [2, 2, 2]
    rows = context.decode(chain([16], start=3, ids=(0, 1, 2)))
    np.testing.assert_allclose(rows.logits(0), fresh_logits(model, [*PROMPT, 16])[-1], atol=1e-4)


# -- rows ------------------------------------------------------------------------------------------


def test_rows_are_stale_after_the_next_evaluation(context):
    rows = context.decode(chain(PROMPT))
    rows.logits(0)
    context.decode(chain([14], start=3))
    with pytest.raises(StaleViewError, match="copy"):
        rows.logits(0)


def test_rows_are_stale_after_a_failed_evaluation(context):
    rows = context.decode(chain(PROMPT))
    with pytest.raises(InvalidBatchError):
        context.decode(chain([14], start=9))
    with pytest.raises(StaleViewError):
        rows.logits(0)


def test_rows_outlive_a_batch_that_was_refused_before_the_call(context):
    rows = context.decode(chain(PROMPT))
    with pytest.raises(OptionError, match="outside the vocabulary"):
        context.decode(chain([320], start=3))
    assert rows.logits(0).shape == (320,)


def test_rows_cannot_be_read_after_close(context):
    rows = context.decode(chain(PROMPT))
    context.close()
    with pytest.raises((StaleViewError, ClosedError)):
        rows.logits(0)


@pytest.mark.parametrize("row", [-1, 1])
def test_a_row_that_was_not_asked_for_is_refused(context, row):
    rows = context.decode(chain(PROMPT))
    with pytest.raises(OptionError, match="gave 1 rows"):
        rows.logits(row)


def test_rows_are_views_not_copies(context):
    rows = context.decode(chain(PROMPT))
    assert np.shares_memory(rows.logits(0), rows.logits(0))


def test_hidden_states_must_be_asked_for(context):
    rows = context.decode(chain(PROMPT))
    with pytest.raises(OptionError, match="without hidden states"):
        rows.hidden_states((0,))


@pytest.mark.parametrize("n_outputs", [1, 3])
def test_rows_beside_hidden_states_are_those_asked_for(model, n_outputs):
    with Context(model, ContextOptions(**F32, n_outputs=3, hidden_states=True)) as context:
        rows = context.decode(chain(PROMPT, n_outputs=n_outputs))
        assert rows.count == n_outputs
        np.testing.assert_allclose(
            rows.logits(n_outputs - 1), fresh_logits(model, PROMPT)[-1], atol=1e-4
        )


def test_the_hidden_state_is_the_normed_one_that_the_output_matrix_reads(model, tiny_model):
    gguf = pytest.importorskip("gguf")
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tiny_model).tensors}
    with Context(model, ContextOptions(**F32, n_outputs=3, hidden_states=True)) as context:
        rows = context.decode(chain(PROMPT))
        expected = tensors["output.weight"] @ rows.hidden_states((0,))[0]
        np.testing.assert_allclose(rows.logits(0), expected, atol=1e-4)


# -- memory ----------------------------------------------------------------------------------------


def test_a_branch_continues_on_its_own(model, context):
    context.decode(chain(PROMPT))
    context.memory.branch(0, 1)
    context.decode(chain([14], start=3))
    rows = context.decode(chain([15], start=3, ids=(1,)))
    np.testing.assert_allclose(rows.logits(0), fresh_logits(model, [*PROMPT, 15])[-1], atol=1e-4)


def test_truncate_drops_positions_of_one_sequence_only(model, context):
    context.decode(chain([*PROMPT, 14], ids=(0, 1)))
    context.memory.truncate(3, sequence=0)
    assert [context.memory.last_position(seq_id) for seq_id in (0, 1)] == [2, 3]
    rows = context.decode(chain([15], start=3))
    np.testing.assert_allclose(rows.logits(0), fresh_logits(model, [*PROMPT, 15])[-1], atol=1e-4)


def test_keep_and_clear(context):
    context.decode(chain(PROMPT, ids=(0, 1, 2)))
    context.memory.keep(1)
    assert [context.memory.last_position(number) for number in range(3)] == [-1, 2, -1]
    context.memory.clear()
    assert context.memory.last_position(1) == -1


# -- lifetime --------------------------------------------------------------------------------------


def test_a_context_must_be_closed_before_its_model(model):
    context = Context(model, ContextOptions(**F32))
    with pytest.raises(ClosedError, match="contexts"):
        model.close()
    context.decode(chain(PROMPT))  # nothing was freed
    context.close()
    model.close()


def test_close_twice_does_nothing(model):
    context = Context(model, ContextOptions(**F32))
    context.close()
    context.close()
    model.close()  # would raise if the context had been counted down twice, or not at all
    model.close()
    with pytest.raises(ClosedError):
        _ = context.handle
    with pytest.raises(ClosedError):
        _ = model.handle


CLOSED_CALLS = {
    "decode": lambda context: context.decode(chain(PROMPT)),
    "truncate": lambda context: context.memory.truncate(0),
    "branch": lambda context: context.memory.branch(0, 1),
    "keep": lambda context: context.memory.keep(0),
    "clear": lambda context: context.memory.clear(),
    "last_position": lambda context: context.memory.last_position(),
}


@pytest.mark.parametrize("call", CLOSED_CALLS.values(), ids=CLOSED_CALLS)
def test_a_closed_context_raises_instead_of_reading_freed_memory(context, call):
    context.close()
    with pytest.raises(ClosedError):
        call(context)


def test_a_context_of_a_closed_model_is_refused(tiny_model):
    model = Model(tiny_model)
    model.close()
    with pytest.raises(ClosedError):
        Context(model, ContextOptions(**F32))


def test_native_time_adds_up(context):
    context.decode(chain(PROMPT))
    first = context.native_seconds
    context.decode(chain([14], start=3))
    assert 0.0 < first < context.native_seconds
