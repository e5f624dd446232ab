"""Draft models of several conversations: evaluated together, each drafts what it drafts alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.every_drafter import named
from support.held_engine import answered_together
from support.simulated_machine import end_chain
from support.tiny_models import F32

from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.contexts.rows import Rows
from specrun.bindings.errors import OptionError
from specrun.runtime import SamplingParams
from specrun.runtime.drafters import batching, environment
from specrun.runtime.drafters.batching import MemoryPart
from specrun.runtime.drafters.environment import DraftEnvironment
from specrun.runtime.engine import Engine
from specrun.runtime.planning import CostCurve

GREEDY = SamplingParams(temperature=0.0)
DRAWN = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=5)
PENALISED = DRAWN.replace(repeat_penalty=1.3, top_k=40)
LONG = [(7 * place + 3) % 90 for place in range(150)]
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], LONG, [3, 1, 4, 1, 5], LONG[:100], [2, 7, 1, 8, 2, 8]]
LENGTH = 30
BRANCHING = SimpleNamespace(can_branch=True)
"""All that a plan reads of a target."""


def answers(
    files: dict[str, Path], drafter: str, params: SamplingParams, slots: int, accept: str = "exact"
) -> tuple[list[Sequence[int]], float]:
    """The texts, and how many of them an evaluation of drafts served."""
    # Small batches: a prompt is read in several, and not all slots fit into the same.
    options = ContextOptions(**{**F32, "n_ctx": 1024, "n_batch": 64})
    with Engine(
        files["shallow"], named(drafter, files), slots=slots, accept=accept, context=options
    ) as engine:
        results = answered_together(engine, PROMPTS, params, max_tokens=LENGTH)
        load = engine.statistics().load
    texts = [each.token_ids for each in results]
    return texts, load.drafting_texts / max(1, load.draft_evaluations)


@pytest.mark.parametrize("params", [GREEDY, DRAWN, PENALISED], ids=["greedy", "drawn", "penalised"])
@pytest.mark.parametrize(
    "drafter",
    [
        "draft(FILE:twin, n=4)",
        "draft(FILE:small, n=3, p_min=0.1)",
        "draft(FILE:twin, n=4, p_min=adaptive)",
        "draft(FILE:twin, n=auto)",
        "draft(FILE:twin, n=4, sampling=argmax)",
        "medusa(FILE:medusa, tree=3x2x1)",
        "medusa(FILE:medusa)",
        "draft(FILE:twin, tree=2x2)",
        "draft(FILE:small, tree=3x2x1, sampling=with)",
        "draft(FILE:twin, depth=3, topk=2, nodes=5)",
    ],
)
def test_texts_are_those_of_each_alone(
    files: dict[str, Path], drafter: str, params: SamplingParams
) -> None:
    together, served = answers(files, drafter, params, 3)
    assert together == answers(files, drafter, params, 1)[0]
    # Lengths and sizes of their own find that models of this size do not pay.
    if "n=auto" not in drafter and drafter != "medusa(FILE:medusa)":
        assert served > 1.5, "drafts were not evaluated together"


@pytest.mark.parametrize(
    ("accept", "drafter"),
    [
        ("cascade-opt(alpha=0.3)", "draft(FILE:twin, n=4)"),
        ("bild(fallback=0.2)", "draft(FILE:twin, n=4)"),
        ("cascade-opt(alpha=0.3)", "draft(FILE:twin, tree=2x2)"),
    ],
)
@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_rows_outlive_the_evaluations_of_others(
    files: dict[str, Path], accept: str, drafter: str, params: SamplingParams
) -> None:
    """Rules that weigh the drafter's laws read its rows when all have drafted."""
    together, served = answers(files, drafter, params, 3, accept)
    assert together == answers(files, drafter, params, 1, accept)[0]
    assert served > 1.5


def test_rows_of_another_conversation_would_be_seen(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    placed = batching.PlacedRows

    def first_rows(rows: object, places: range) -> object:
        return placed(rows, range(len(places)))  # type: ignore[arg-type]

    wanted, _ = answers(files, "draft(FILE:twin, n=4)", DRAWN, 1)
    monkeypatch.setattr(batching, "PlacedRows", first_rows)
    assert answers(files, "draft(FILE:twin, n=4)", DRAWN, 3)[0] != wanted


@pytest.mark.parametrize("method", ["draft(FILE:twin, n=4)", "medusa(FILE:medusa, tree=3x2x1)"])
def test_an_answer_that_ends_in_the_middle_of_a_draft_leaves_nothing(
    files: dict[str, Path], method: str
) -> None:
    drafter = named(method, files)
    options = ContextOptions(**{**F32, "n_ctx": 1024})
    with Engine(files["shallow"], drafter, slots=3, context=options) as engine:
        wanted = engine.generate_many(PROMPTS, DRAWN, max_tokens=LENGTH)
        for _ in range(5):
            endless = [engine.submit(prompt, DRAWN) for prompt in PROMPTS]
            next(endless[0])
            for stream in endless:
                stream.cancel()
        again = engine.generate_many(PROMPTS, DRAWN, max_tokens=LENGTH)
        contexts = [each for each in engine._schedule.shared.meeting.joint if each.asking]
    assert [each.token_ids for each in again] == [each.token_ids for each in wanted]
    assert contexts == []


def test_a_long_prompt_is_read_by_the_draft_model_in_pieces_too(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or all others would wait until it has read the whole."""
    read: list[int] = []
    decode = batching.SharedDraftContext.decode

    def noted(
        shared: batching.SharedDraftContext, parts: Sequence[batching.ContextPart]
    ) -> tuple[Rows, float]:
        read.append(sum(part.given.n_tokens for part in parts))
        return decode(shared, parts)

    monkeypatch.setattr(batching.SharedDraftContext, "decode", noted)
    long = [(7 * place) % 90 for place in range(700)]
    drafter = named("draft(FILE:twin, n=4)", files)
    options = ContextOptions(**{**F32, "n_ctx": 2048})
    with Engine(files["shallow"], drafter, slots=2, context=options) as engine:
        together = engine.generate_many([PROMPTS[0], long], GREEDY, max_tokens=LENGTH)
        piece = engine._schedule.sessions[0].target.longest_piece
    assert sum(read) > 700
    assert max(read) <= piece < 700
    with Engine(files["shallow"], "none", slots=1, context=options) as engine:
        wanted = engine.generate_many([PROMPTS[0], long], GREEDY, max_tokens=LENGTH)
    assert [each.token_ids for each in together] == [each.token_ids for each in wanted]


def test_a_part_reaches_no_sequence_but_its_own(files: dict[str, Path]) -> None:
    drafter = named("draft(FILE:twin, n=4)", files)
    with Engine(files["shallow"], drafter, slots=2, n_ctx=512, n_threads=1) as engine:
        engine.generate_many(PROMPTS[:2], GREEDY, max_tokens=4)
        (shared,) = engine._schedule.shared.meeting.joint
        whole = shared.context.memory
        first, second = (MemoryPart(whole, number, 1) for number in range(2))
        assert first.last_position() > 0
        cached = second.last_position()
        first.clear()
        assert (first.last_position(), second.last_position()) == (-1, cached)
        with pytest.raises(OptionError, match="sequence 1 is outside 0 to 0 of this part"):
            first.truncate(0, sequence=1)


# -- how much is drafted, by the load --------------------------------------------------------------


_TIMES = (1.0, 1.2, 2.0, 8.0)
STEEPER = CostCurve((1, 8, 16, 64), _TIMES, _TIMES)
"""Tokens are cheap until there are eight of them."""


def drafted_at(load: int, *, by_clock: bool = True, points: bool = True) -> int:
    """How many tokens are drafted in a round where two are usually kept, after many of them."""
    together = batching.DraftMeeting(8)
    place = DraftEnvironment(
        target=BRANCHING,  # type: ignore[arg-type]
        context=ContextOptions(),
        costs=STEEPER,
        meeting=together,
        by_clock=by_clock,
    )
    length = place.draft_plan(0.05)
    together.n_drafting = load
    count = 0
    for _ in range(200):
        length.start(points=points)
        count = 0
        while length.goes_on() and length.takes(0.7):
            count += 1
        end_chain(length, count, min(count, 2))
    return count


def test_drafts_shrink_with_the_load() -> None:
    alone, *more = [drafted_at(load) for load in (1, 2, 4, 8)]
    assert alone > more[-1]
    assert [alone, *more] == sorted([alone, *more], reverse=True)


def test_under_a_lossy_rule_they_do_not() -> None:
    assert drafted_at(8, by_clock=False) == drafted_at(1, by_clock=False) == drafted_at(1)


def test_drawn_drafts_do_not() -> None:
    """Their number decides which text a seed gives, which must not depend on other texts."""
    assert drafted_at(8, points=False) == drafted_at(1, points=False) > 0


def test_a_text_of_drawn_drafts_of_any_length_is_that_of_it_alone(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a curve on which drafts pay, fewer the more conversations share an evaluation."""
    monkeypatch.setattr(environment, "known_curve", lambda *_: STEEPER)
    drafter = "draft(FILE:small)"
    wanted, _ = answers(files, drafter, DRAWN, 1)
    together, served = answers(files, drafter, DRAWN, 3)
    assert together == wanted
    assert served > 1.5, "drafts were not evaluated together"
    planned = DraftEnvironment._seconds

    def shared(own: DraftEnvironment, curve: CostCurve, text: Any, _: object) -> Any:
        return planned(own, curve, text, own.meeting)

    monkeypatch.setattr(DraftEnvironment, "_seconds", shared)
    assert answers(files, drafter, DRAWN, 3)[0] != wanted  # the control


def test_a_change_of_the_load_is_seen_at_once() -> None:
    together = batching.DraftMeeting(8)
    place = DraftEnvironment(
        target=BRANCHING,  # type: ignore[arg-type]
        context=ContextOptions(),
        costs=STEEPER,
        meeting=together,
    )
    length = place.draft_plan(0.05)

    def most() -> int:
        length.start(points=True)
        count = 0
        while length.goes_on() and length.takes(0.95):
            count += 1
        return count

    alone = most()
    together.n_drafting = 8
    assert most() < alone
