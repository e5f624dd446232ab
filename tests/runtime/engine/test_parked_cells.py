"""Several conversations have the rows of each alone, bit by bit, with the flags that users run.

Default flash attention, quantized weights, real text. The drafts that one text refuses leave cells
among another's: if later tokens went there, the text's cells would lie in another order, and its
rows would differ by tenths of a nat (`tests/runtime/test_order_of_cells.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.models.model import Model
from specrun.runtime.demo import demo_questions, demo_target
from specrun.runtime.engine import SharedEvaluation, SlotClock
from specrun.runtime.engine.slots import SlotTarget
from specrun.runtime.planning import CostCurve
from specrun.runtime.round import CachedText, TargetModel
from specrun.runtime.trees import ROOT, DraftTree, TreeBuilder

CURVE = CostCurve((1, 64), (1.0, 2.0), (1.0, 2.0))
N_SLOTS, N_LEAVES, N_PROMPT, N_ROUNDS = 4, 5, 12, 20

Drafted = tuple[DraftTree, list[int]]
"""A tree, and the path of it that is kept."""


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with Model(demo_target()) as model:
        yield model


@pytest.fixture(scope="module")
def texts(model: Model) -> list[list[int]]:
    lines = demo_questions().read_text().splitlines()
    pairs = [json.loads(line) for line in lines[: 12 * N_SLOTS]]
    whole = [" ".join(pair["question"] + " " + pair["answer"] for pair in pairs[i::N_SLOTS])
             for i in range(N_SLOTS)]  # fmt: skip
    return [model.vocabulary.tokenize(text)[:100] for text in whole]


def opened(model: Model, n_slots: int, n_ctx: int = 1024) -> Context:
    n_sequences = n_slots * N_LEAVES + 2 * (n_slots > 1)  # parking's, and what fills batches up
    sizes = {"n_ctx": n_ctx, "n_sequences": n_sequences, "n_outputs": 16 * n_slots}
    return Context(model, ContextOptions(**sizes, n_threads=1, n_threads_batch=1))


def chain(coming: list[int], round_: int) -> Drafted:
    """A chain of 4 drafts, of which 0 to 3 are right."""
    n = min(round_ % 4, len(coming))
    return DraftTree.chain([*coming[:n], *[9] * (4 - n)]), [*range(n)]


def second_child(coming: list[int], round_: int) -> Drafted:
    """A tree of up to 3 depths whose first child is wrong, and another at the end."""
    builder, parent, path = TreeBuilder(), ROOT, []
    for token in coming[: round_ % 4]:
        builder.add(parent, token + 1)
        path.append(parent := builder.add(parent, token))
    builder.add(ROOT, 11)
    return builder.build(), path


Draft = Callable[[list[int], int], Drafted]


def rows_alone(model: Model, tokens: list[int]) -> list[bytes]:
    """The row after each token from the prompt on, one evaluation of a token each."""
    with opened(model, 1) as context:
        target, text = TargetModel(context), CachedText(tokens[:N_PROMPT])
        target.prefill(text, N_PROMPT - 1)
        bits = []
        for token in tokens[N_PROMPT:]:
            bits.append(target.evaluate(text, DraftTree()).logits(0).tobytes())
            target.commit(text, DraftTree(), ())
            text.tokens.append(token)
    return bits


def rows_together(
    shared: SharedEvaluation, texts: list[list[int]], draft: Draft
) -> list[list[bytes]]:
    """The same of all texts, in rounds of drafts side by side."""
    bits: list[list[bytes]] = [[] for _ in texts]
    for slot, tokens in zip(shared.slots, texts, strict=True):
        slot.rewind(slot.text, 0)
        slot.text = CachedText(tokens[:N_PROMPT])
        slot.prefill(slot.text, N_PROMPT - 1)
    for round_ in range(N_ROUNDS):
        drafted: list[tuple[SlotTarget, Drafted]] = []
        for index, (slot, tokens) in enumerate(zip(shared.slots, texts, strict=True)):
            coming = tokens[len(slot.text.tokens) :]
            if (round_ + index) % 5 and len(coming) > 4:  # each leaves out every fifth round
                drafted.append((slot, draft(coming, round_ + index)))
                slot.evaluate(slot.text, drafted[-1][1][0])
        shared.evaluate(shared.slots)
        for slot, (tree, path) in drafted:
            index = shared.slots.index(slot)
            rows = slot.evaluate(slot.text, tree)
            assert rows is not None
            bits[index] += [rows.logits(node + 1).tobytes() for node in (ROOT, *path)]
            slot.commit(slot.text, tree, path)
            slot.text.tokens.append(texts[index][len(slot.text.tokens)])
    return bits


@pytest.mark.parametrize("draft", [chain, second_child])
@pytest.mark.parametrize("n_ctx", [1024, 512])
@pytest.mark.parametrize("width", [0, 40], ids=["free", "filled up"])
def test_rows_beside_others_have_the_bits_of_rows_alone(
    model: Model, texts: list[list[int]], draft: Draft, n_ctx: int, width: int
) -> None:
    """512 cells are too few for all that is dropped: the texts are copied together meanwhile."""
    widths = dict.fromkeys(range(1, width), width)
    wanted = [rows_alone(model, tokens) for tokens in texts]
    copied = 0
    with opened(model, N_SLOTS, n_ctx) as context:
        shared = SharedEvaluation(context, N_SLOTS, n_ctx, CURVE, SlotClock(), widths=widths)
        copy = shared._copy_together

        def counted() -> None:
            nonlocal copied
            copied += 1
            copy()

        shared._copy_together = counted  # type: ignore[method-assign]
        for _ in range(2):
            found = rows_together(shared, texts, draft)
            for ours, theirs in zip(wanted, found, strict=True):
                assert len(theirs) > N_ROUNDS
                assert ours[: len(theirs)] == theirs
    assert (copied > 0) == (n_ctx == 512)


@pytest.mark.parametrize("draft", [chain, second_child])
def test_control_dropped_cells_that_are_filled_move_rows(
    model: Model, texts: list[list[int]], draft: Draft
) -> None:
    """Without parking, as it was: rows move by tenths of a nat."""
    wanted = [rows_alone(model, tokens) for tokens in texts]
    moved = []
    with opened(model, N_SLOTS) as context:
        shared = SharedEvaluation(context, N_SLOTS, 1024, CURVE, SlotClock())
        for slot in shared.slots:
            slot._park = lambda *_: None  # type: ignore[method-assign]
        found = rows_together(shared, texts, draft)
        for ours, theirs in zip(wanted, found, strict=True):
            for one, other in zip(ours, theirs, strict=False):
                rows = np.frombuffer(one, np.float32), np.frombuffer(other, np.float32)
                moved.append(float(np.abs(rows[0] - rows[1]).max()))
    assert max(moved) > 0.1


def test_texts_that_share_a_prefix_are_copied_apart(model: Model, texts: list[list[int]]) -> None:
    """Each has cells of its own then, the rows of plain decoding, and counts in full."""
    tokens = texts[0]
    wanted = rows_alone(model, tokens)
    with opened(model, N_SLOTS) as context:
        shared = SharedEvaluation(context, N_SLOTS, 1024, CURVE, SlotClock())
        first, second, *_ = shared.slots
        first.text = CachedText(tokens[:N_PROMPT])
        first.prefill(first.text, N_PROMPT - 1)
        second.text = CachedText()
        second.take_over(first, N_PROMPT - 1)
        second.text.tokens = tokens[:N_PROMPT]
        assert shared.n_cells_used == N_PROMPT - 1
        shared._copy_together()
        assert shared.n_cells_used == shared.n_cells_taken == 2 * (N_PROMPT - 1)
        for slot in (first, second):
            slot.evaluate(slot.text, DraftTree())
        shared.evaluate(shared.slots)
        for slot in (first, second):
            rows = slot.evaluate(slot.text, DraftTree())
            assert rows is not None
            assert rows.logits(0).tobytes() == wanted[0]
