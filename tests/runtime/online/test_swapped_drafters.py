"""Drafters swapped between answers: the law stays the target's, whatever was learnt; never in the
middle of an answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
from support.enumeration import PROMPT, TOLERANCE, Propose, chain
from support.interrupts import Interrupted, sampled_points
from support.scripted import PLAIN, LawTable, ScriptedDrafter, TableTarget, conversation_of, law_of
from support.tiny_models import F32, fresh_logits

from specrun.bench.prove.rules import BranchingNoise, enumerate_law
from specrun.bindings.errors import BusyError, ClosedError, ModelError, OptionError
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.acceptance import build_rule
from specrun.runtime.engine.answer import note_rejected
from specrun.runtime.engine.choices import Choices
from specrun.runtime.language import quoted
from specrun.runtime.online import RejectionBuffer, RejectionNotes, likeliest
from specrun.runtime.round import DraftRequest
from specrun.runtime.round.loop import DecodeSettings, RoundLimits, decode_rounds
from specrun.runtime.trees import DraftTree

NO_END = {319: float("-inf"), 318: float("-inf"), 317: float("-inf")}
GREEDY = SamplingParams(temperature=0.0, logit_bias=NO_END)
WARM = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, logit_bias=NO_END, seed=7)
QUESTION = list(b"the quick brown fox, the quick")
SIZE, LENGTH = 3, 2


class LearntTable(LawTable):
    """What a drafter says that has learnt everything a buffer holds."""

    def __init__(self, before: LawTable, buffer: RejectionBuffer) -> None:
        super().__init__(before.size, 0)
        self._before = before
        self._learnt = {
            tuple(answer.tokens[: position + 1].tolist()): logs
            for answer in buffer
            for position, logs in zip(answer.positions, answer.log_probs, strict=True)
        }

    def __call__(self, prefix) -> np.ndarray:
        logs = self._learnt.get(tuple(prefix))
        if logs is None:
            return self._before(prefix)
        law = np.exp(logs[: self.size].astype(float))
        return law / law.sum()


def two_answers(target: LawTable, drafts: LawTable, second: Propose | None) -> dict:
    """The exact law of two answers to one prompt, the drafter swapped between them for one that
    learnt from the first; `second` drafts in its place."""

    def answer(conversation, noise, buffer) -> tuple[int, ...]:
        limits, notes = (
            RoundLimits(n_ctx=64, max_nodes=32, max_tokens=LENGTH),
            RejectionNotes(buffer),
        )
        settings = DecodeSettings(build_rule("exact"), PLAIN, limits)
        for this_round in decode_rounds(TableTarget(target), conversation, settings):
            if this_round.rejected:
                note_rejected(notes, conversation, this_round)
        notes.end_answer(conversation.tokens)
        return tuple(conversation.tokens[len(PROMPT) :])

    def program(noise: BranchingNoise) -> tuple[int, ...]:
        buffer = RejectionBuffer(kept_tokens=SIZE)
        first = answer(
            conversation_of(ScriptedDrafter(chain(drafts, LENGTH)), PROMPT, noise), noise, buffer
        )
        learnt = chain(LearntTable(drafts, buffer), LENGTH) if second is None else second
        again = conversation_of(ScriptedDrafter(learnt), PROMPT, noise)
        return first + answer(again, noise, RejectionBuffer(kept_tokens=SIZE))

    return enumerate_law(program)


def largest_error(found: dict, target: LawTable) -> float:
    def law_of_answer(text: tuple[int, ...]) -> float:
        return float(
            np.prod([target([*PROMPT, *text[:at]])[token] for at, token in enumerate(text)])
        )

    assert sum(found.values()) == pytest.approx(1.0, abs=TOLERANCE)
    return max(
        abs(chance - law_of_answer(text[:LENGTH]) * law_of_answer(text[LENGTH:]))
        for text, chance in found.items()
    )


@pytest.mark.parametrize("seed", range(3))
def test_two_answers_have_the_targets_law_whatever_was_learnt_between_them(seed: int) -> None:
    target, drafts = LawTable(SIZE, seed, zeros=0.0), LawTable(SIZE, seed + 50, zeros=0.0)
    assert largest_error(two_answers(target, drafts, None), target) < TOLERANCE


def test_what_is_learnt_is_the_targets_law_so_the_control_can_fail() -> None:
    """The first rejected place of an answer is then drafted with the target's own law."""
    target = LawTable(SIZE, 1, zeros=0.0)
    buffer = RejectionBuffer(kept_tokens=SIZE)
    notes = RejectionNotes(buffer)
    with np.errstate(divide="ignore"):
        notes.note(len(PROMPT) - 1, np.log(target(PROMPT)))
    notes.end_answer([*PROMPT, 0])
    np.testing.assert_allclose(LearntTable(target, buffer)(PROMPT), target(PROMPT), atol=2e-3)


def test_a_swap_in_the_middle_of_an_answer_would_bias_it() -> None:
    """The negative control: drafts drawn from the old drafter's law, tested with the new one's."""
    target, drafts = LawTable(SIZE, 1, zeros=0.0), LawTable(SIZE, 51, zeros=0.0)
    new = LawTable(SIZE, 71, zeros=0.0)

    def confused(request: DraftRequest) -> DraftTree:
        tree = chain(drafts, 1)(request)
        law = law_of(new(request.tokens))
        draws = {
            parent: tuple(draw._replace(law=law) for draw in of_parent)
            for parent, of_parent in tree.draws.items()
        }
        return dataclasses.replace(tree, draws=draws)

    assert largest_error(two_answers(target, drafts, confused), target) > 1e-2


# -- an open runtime -------------------------------------------------------------------------------


@pytest.fixture
def drafter(tiny_flat_twin) -> str:
    return f"draft({quoted(str(tiny_flat_twin))}, n=4, sampling=argmax)"


@pytest.fixture
def learning(tiny_model, drafter) -> Iterator[Runtime]:
    with Runtime(tiny_model, drafter, learn=True, **F32) as runtime:
        yield runtime


def test_the_buffer_holds_the_targets_rows_where_drafts_were_rejected(learning: Runtime) -> None:
    result = learning.generate(QUESTION, WARM, max_tokens=24)
    store = learning.rejections
    assert store is not None
    (answer,) = store.buffer
    text = [*QUESTION, *result.token_ids]
    assert answer.tokens.tolist() == text[: len(answer.tokens)]
    # A round ends with a rejected draft, unless all of it was kept.
    assert 0 < len(answer.positions) <= result.stats.rounds
    rows = fresh_logits(learning.model, text)
    for place, position in enumerate(answer.positions):
        ids, logs = likeliest(rows[position], store.buffer.kept_tokens)
        assert answer.ids[place].tolist() == ids.tolist()
        np.testing.assert_allclose(answer.log_probs[place], logs, atol=2e-2)


def test_the_text_stays_and_the_caches_begin_anew(learning: Runtime, tiny_model) -> None:
    with Runtime(tiny_model, "none", **F32) as plain:
        wanted = [plain.generate(QUESTION, p, max_tokens=20).token_ids for p in (GREEDY, WARM)]
    first = learning.generate(QUESTION, GREEDY, max_tokens=20)
    old = learning.session.drafter
    learning.swap_drafter(f"draft({quoted(str(tiny_model))}, n=4, sampling=argmax)")
    assert learning.session.drafter is not old
    with pytest.raises(ClosedError):
        old.propose(DraftRequest(QUESTION, GREEDY, learning.session.conversation.noise, 4, 4))
    assert first.token_ids == wanted[0]
    found = [learning.generate(QUESTION, p, max_tokens=20) for p in (GREEDY, WARM)]
    assert [each.token_ids for each in found] == wanted
    # The target drafts for itself now: all is accepted, and its own cache was kept.
    assert found[0].stats.acceptance_rate == 1.0
    assert found[0].usage.cached_tokens == len(QUESTION) - 1


def test_no_swap_in_the_middle_of_an_answer(learning: Runtime, tiny_model) -> None:
    stream = learning.stream(QUESTION, GREEDY, max_tokens=20)
    next(stream)
    before = learning.session.drafter
    with pytest.raises(BusyError, match="still being streamed"):
        learning.swap_drafter(f"draft({quoted(str(tiny_model))}, n=4)")
    with pytest.raises(BusyError):
        learning.session.draft_with(before)
    assert learning.session.drafter is before
    rest = list(stream)
    assert len(rest) == 19
    learning.swap_drafter(f"draft({quoted(str(tiny_model))}, n=4)")


def test_what_the_context_has_no_room_for_is_refused_and_the_old_drafter_goes_on(
    learning: Runtime, tiny_model, tmp_path
) -> None:
    wanted = learning.generate(QUESTION, GREEDY, max_tokens=12).token_ids
    before = learning.session.drafter
    twin = quoted(str(tiny_model))
    with pytest.raises(OptionError, match="drafts 9 nodes, and the context has room for 4"):
        learning.swap_drafter(f"draft({twin}, n=9)")
    with pytest.raises(OptionError, match="drafts 4 paths"):
        learning.swap_drafter(f"draft({twin}, tree=4)")
    with pytest.raises(ModelError):
        learning.swap_drafter(f"draft({quoted(str(tmp_path / 'none.gguf'))}, n=4)")
    assert learning.session.drafter is before
    assert learning.generate(QUESTION, GREEDY, max_tokens=12).token_ids == wanted


def test_swaps_free_what_they_replace(learning: Runtime, tiny_model) -> None:
    """Every swap loads a model: ten of them close nine, and the runtime closes the last."""
    opened = []
    for _ in range(3):
        learning.swap_drafter(f"draft({quoted(str(tiny_model))}, n=4)")
        opened.append(learning._choices.weights[learning._choices.own])
    assert [weights.owned == () for weights in opened] == [True, True, False]
    learning.close()
    assert opened[-1].owned == ()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a __del__
def test_an_interrupt_of_a_swap_leaves_the_old_drafter_or_the_new_one(
    tiny_model, drafter, whole_sweep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C at lines of a swap, before anything is closed: the runtime answers, swaps again, and
    closes everything."""
    other = f"draft({quoted(str(tiny_model))}, n=4, sampling=argmax)"
    close_unused, n_lines = Choices.close_unused, list[int]()
    with Runtime(tiny_model, drafter, **F32) as runtime, monkeypatch.context() as patch:
        wanted = runtime.generate(QUESTION, GREEDY, max_tokens=6).token_ids
        with Interrupted() as counting:

            def noted(choices: Choices) -> None:
                n_lines.append(counting.lines)
                close_unused(choices)

            patch.setattr(Choices, "close_unused", noted)
            runtime.swap_drafter(other)
    points = sampled_points(n_lines[0], 12, whole=whole_sweep)
    # The last lines replace one drafter by the other.
    for at in sorted({*points, *range(n_lines[0] - 30, n_lines[0] + 1)}):
        with Runtime(tiny_model, drafter, **F32) as runtime:
            with Interrupted(at):
                runtime.swap_drafter(other)
            where = f"before line {at} of {n_lines[0]}"
            assert runtime.generate(QUESTION, GREEDY, max_tokens=6).token_ids == wanted, where
            runtime.swap_drafter(other)
            found = runtime.generate(QUESTION, GREEDY, max_tokens=6)
            assert (found.token_ids, found.stats.acceptance_rate) == (wanted, 1.0), where
