"""Backend sampling: candidates are those of whole rows to the bit, for every layout of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from support.tiny_models import F32

from specrun.bindings.contexts import BackendSamplers, Batch, Context, ContextOptions, Rows
from specrun.bindings.errors import OptionError, StaleViewError
from specrun.bindings.models import Model

N_SEQUENCES = 4
# Sequence ids of the seven tokens of trees, one after the other. Samplers that stay attached give
# wrong candidates of a row of the second and of the third.
CHANGING = [
    [(0, 1, 2, 3), (0, 1, 2, 3), (1,), (0, 2, 3), (1,), (1,), (1,)],
    [(0, 1, 2, 3), (0, 1, 2, 3), (0, 1, 2, 3), (0, 1, 2, 3), (1,), (0, 2, 3), (1,)],
    [(0, 1, 2, 3), (1,), (0, 2, 3), (1,), (1,), (1,), (1,)],
]
CHAIN = [(0, 1, 2, 3)] * 5


@pytest.fixture
def model(tiny_model: Path) -> Iterator[Model]:
    with Model(tiny_model) as opened:
        yield opened


@pytest.fixture(params=[False, True], ids=["", "hidden states"])
def context(model: Model, request: pytest.FixtureRequest) -> Iterator[Context]:
    sizes = {"n_sequences": N_SEQUENCES, "n_outputs": 8, "hidden_states": request.param}
    with Context(model, ContextOptions(**F32, **sizes)) as opened:
        yield opened


def evaluate(context: Context, ids: Sequence[tuple[int, ...]], seed: int) -> Rows:
    """Evaluate random tokens with these sequence ids, each behind those that it sees."""
    generator = np.random.default_rng(seed)
    context.memory.clear()
    deepest = [0] * N_SEQUENCES
    positions = []
    for own in ids:
        positions.append(max(deepest[sequence] for sequence in own))
        for sequence in own:
            deepest[sequence] = positions[-1] + 1
    batch = Batch(16, N_SEQUENCES)
    flat = [sequence for own in ids for sequence in own]
    tokens = generator.integers(0, 300, len(ids)).tolist()
    batch.fill(tokens, positions, [len(own) for own in ids], flat, [1] * len(ids))
    return context.decode(batch)


def whole_rows(context: Context, ids: Sequence[tuple[int, ...]], seed: int) -> np.ndarray:
    context.cut_rows(None)
    rows = evaluate(context, ids, seed)
    assert rows.candidates(0) is None
    return np.stack([rows.logits(row) for row in range(len(ids))])


def agree(rows: Rows, whole: np.ndarray, k: int) -> bool:
    """Whether every row's candidates are its k best logits, to the bit."""
    for row, logits in enumerate(whole):
        found = rows.candidates(row)
        assert found is not None
        if len(set(found.tokens.tolist())) != k or (logits[found.tokens] != found.logits).any():
            return False
        if sorted(found.logits.tolist()) != np.sort(logits)[-k:].tolist():
            return False
    return True


@pytest.mark.parametrize("k", [1, 9, 48])
def test_candidates_are_the_best_of_whole_rows(context: Context, k: int) -> None:
    for ids in (CHAIN, *CHANGING):
        whole = [whole_rows(context, ids, seed) for seed in range(3)]
        assert context.cut_rows(k)
        for seed in range(3):  # the graph is reused from the second one on
            assert agree(evaluate(context, ids, seed), whole[seed], k)


def test_another_layout_takes_the_samplers_off(context: Context) -> None:
    """llama.cpp plans memory anew for another number of nodes only, not for another order of rows.

    So candidates of rows that lie otherwise are never read.
    """
    whole = [whole_rows(context, ids, 5) for ids in CHANGING]
    assert context.cut_rows(9)
    assert agree(evaluate(context, CHANGING[0], 5), whole[0], 9)
    for ids, wanted in zip(CHANGING[1:], whole[1:], strict=True):
        rows = evaluate(context, ids, 5)
        assert rows.candidates(0) is None
        assert (np.stack([rows.logits(row) for row in range(7)]) == wanted).all()


def test_samplers_that_stay_on_are_caught(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without that, the comparison fails. (If it does not any more, llama.cpp
    was mended, and samplers may stay on.)"""
    sizes = {"n_sequences": N_SEQUENCES, "n_outputs": 8}
    with Context(model, ContextOptions(**F32, **sizes)) as context:
        whole = [whole_rows(context, ids, 5) for ids in CHANGING]
        monkeypatch.setattr(BackendSamplers, "before_evaluation", lambda *_: None)
        context.cut_rows(9)
        good = [agree(evaluate(context, CHANGING[i], 5), whole[i], 9) for i in (0, 1, 2, 0, 1)]
    assert not all(good)


def test_cut_rows_have_no_logits_and_grow_stale(context: Context) -> None:
    context.cut_rows(9)
    rows = evaluate(context, CHAIN, 0)
    with pytest.raises(OptionError, match="only the 9 best logits"):
        rows.logits(0)
    context.cut_rows(None)
    assert rows.candidates(0) is not None  # until the next evaluation
    evaluate(context, CHAIN, 0)
    with pytest.raises(StaleViewError):
        rows.candidates(0)


def test_an_interrupt_while_samplers_are_attached_leaves_whole_rows(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = whole_rows(context, CHAIN, 1)
    attach, left = context._samplers._set, 0

    def interrupted(*arguments: object) -> bool:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        return bool(attach(*arguments))

    for call in range(1, N_SEQUENCES + 1):
        left = call
        monkeypatch.setattr(context._samplers, "_set", interrupted)
        with pytest.raises(KeyboardInterrupt):
            context.cut_rows(9)
        rows = evaluate(context, CHAIN, 1)
        assert (np.stack([rows.logits(row) for row in range(5)]) == whole).all()
        assert context.cut_rows(9)
        assert agree(evaluate(context, CHAIN, 1), whole, 9)
        context.cut_rows(None)


def test_where_llama_cpp_refuses_rows_stay_whole(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    attach = context._samplers._set
    monkeypatch.setattr(
        context._samplers,
        "_set",
        lambda handle, sequence, chain: bool(attach(handle, sequence, chain)) and sequence < 2,
    )
    assert not context.cut_rows(9)
    assert evaluate(context, CHAIN, 1).candidates(0) is None
