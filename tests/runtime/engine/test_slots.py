"""Slots: what a shared evaluation counts for each, and which clock drafters measure rounds by."""

from __future__ import annotations

import pytest
from support.tiny_models import CHAT, F32

from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import DecodeFailedError, OptionError
from specrun.bindings.models.model import Model
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime.engine import SharedEvaluation, SlotClock
from specrun.runtime.engine import slots as slots_module
from specrun.runtime.engine.slots import longest_prefix
from specrun.runtime.planning import CostCurve
from specrun.runtime.round import CachedText, TargetModel
from specrun.runtime.trees import DraftTree

CURVE = CostCurve((1, 2, 4, 8), (1.0, 1.2, 1.6, 2.4), (1.0, 1.2, 1.6, 2.4))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = tmp_path_factory.mktemp("slots") / "model.gguf"
    write_random_llama(path, RandomLlama(**CHAT))
    return Model(path)


def shared_slots(model: Model, n_slots: int = 2) -> SharedEvaluation:
    options = ContextOptions(**F32, n_sequences=2 * n_slots + 1, n_outputs=8 * n_slots)
    return SharedEvaluation(Context(model, options), n_slots, 256, CURVE, SlotClock())


def test_rows_beside_others_are_those_alone(model: Model) -> None:
    shared = shared_slots(model)
    texts = [CachedText([3, 1, 4, 1, 5]), CachedText([2, 7, 1])]
    trees = [DraftTree.chain([9, 2]), DraftTree.chain([8])]
    for slot, text in zip(shared.slots, texts, strict=True):
        slot.text = text
        slot.prefill(text, len(text.tokens) - 1)
    for slot, text, tree in zip(shared.slots, texts, trees, strict=True):
        assert slot.evaluate(text, tree) is None
        assert slot.evaluate(text, tree) is None, "it waits until the evaluation is made"
    shared.evaluate(shared.slots)
    for slot, text, tree in zip(shared.slots, texts, trees, strict=True):
        rows = slot.evaluate(text, tree)
        assert rows is not None
        alone, own = TargetModel(Context(model, ContextOptions(**F32, n_outputs=8))), CachedText()
        own.tokens = list(text.tokens)
        alone.prefill(own, len(own.tokens) - 1)
        wanted = alone.evaluate(own, tree)
        for row in range(1 + len(tree)):
            assert rows.logits(row) == pytest.approx(wanted.logits(row), abs=1e-4)
        slot.commit(text, tree, [0])
    assert shared.n_cells_used == sum(text.n_cached for text in texts) == 6 + 4


def test_parts_of_an_evaluation() -> None:
    shared = SharedEvaluation.__new__(SharedEvaluation)
    shared._curve = CURVE
    assert shared._parts([1, 1]) == [0.5, 0.5]
    # T(4) = 1.6, T(2) = 1.2: the drafts of the second add a quarter, which it pays.
    assert shared._parts([1, 3]) == pytest.approx([0.6 / 1.6, 1.0 / 1.6])
    assert sum(shared._parts([2, 5, 1])) == pytest.approx(1.0)


def test_a_slots_clock_stands_still_while_others_work(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(slots_module.time, "perf_counter", lambda: now[0])
    clock = SlotClock()
    with clock.working_for("a"):
        before = clock()
        now[0] += 1.0
    with clock.working_for("b"):
        now[0] += 10.0
    clock.add("a", 0.25)
    now[0] += 100.0
    with clock.working_for("a"):
        now[0] += 0.5
        assert clock() - before == pytest.approx(1.75)


def test_a_failed_evaluation_is_everyones_error(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = shared_slots(model)

    def fail(_batch: object) -> None:
        raise DecodeFailedError("made up", -3)

    monkeypatch.setattr(shared.context, "decode", fail)
    for slot in shared.slots:
        slot.text = CachedText([3])
        assert slot.evaluate(slot.text, DraftTree()) is None
    shared.evaluate(shared.slots)
    for slot in shared.slots:
        with pytest.raises(DecodeFailedError, match="made up"):
            slot.evaluate(slot.text, DraftTree())
        assert slot.n_waiting == 0


def test_a_text_that_is_not_cached_is_refused(model: Model) -> None:
    shared = shared_slots(model)
    with pytest.raises(OptionError, match="of 3 tokens 0 are cached"):
        shared.slots[0].evaluate(CachedText([1, 2, 3]), DraftTree())


def test_the_longest_prefix_leaves_the_last_token_to_be_evaluated(model: Model) -> None:
    shared = shared_slots(model)
    texts = [CachedText([1, 2, 3, 4]), CachedText([1, 2, 5])]
    for slot, text in zip(shared.slots, texts, strict=True):
        slot.text = text
        slot.prefill(text, len(text.tokens))
    pairs = [*zip(shared.slots, texts, strict=True)]
    assert longest_prefix(pairs, [1, 2, 3, 4]) == (0, 3)
    assert longest_prefix(pairs, [1, 2, 5, 9]) == (1, 3)
    assert longest_prefix(pairs, [7]) == (None, 0)
