"""A prefix that another slot has read is shared with the states that heads have read of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.every_drafter import HEADS, named
from support.tiny_models import F32

from specrun.bindings.contexts.context_options import ContextOptions
from specrun.runtime import SamplingParams
from specrun.runtime.drafters.growing.drafter import GrowingDrafter
from specrun.runtime.drafters.states_source import StatesSource
from specrun.runtime.engine import Engine
from specrun.runtime.round.drafter import Drafter, DraftRequest
from specrun.runtime.trees import DraftTree

GREEDY = SamplingParams(temperature=0.0)
SYSTEM = [(11 * place) % 90 for place in range(100)]
PROMPTS = [[*SYSTEM, 1 + row, *[2] * (5 * row)] for row in range(3)]
# Not those whose size follows from the load.
SHARED = [
    *((target, drafter) for target, drafter in HEADS if "auto" not in drafter),
    ("hybrid", "mtp(n=3)"),
    ("hybrid", "dflash(FILE:dspark for hybrids, n=3)"),
    ("shallow", "ensemble(eagle(FILE:eagle, n=3), hydra(FILE:hydra++, n=2))"),
]
Drafts = dict[tuple[int, ...], tuple[Sequence[int], Sequence[int]]]
"""By the tokens of a text the tokens and parents of the tree that was drafted below it."""


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> Drafts:
    """What was drafted below which text, since it was last cleared."""
    found: Drafts = {}
    propose = GrowingDrafter.propose

    def noting(drafter: GrowingDrafter, request: DraftRequest) -> DraftTree:
        text = (*request.tokens,)
        tree = propose(drafter, request)
        found[text] = tree.tokens, tree.parents
        return tree

    monkeypatch.setattr(GrowingDrafter, "propose", noting)
    return found


def answers(
    files: dict[str, Path], target: str, drafter: str, *, beside: bool
) -> tuple[list[Sequence[int]], list[int], int]:
    """Return texts, cached tokens of the prompts, and how many tokens slots shared.

    `beside` another conversation with the same system prompt, whose answer does not end meanwhile.
    """
    slots = 3 if beside else 1
    options = ContextOptions(**{**F32, "n_ctx": 400 * slots, "n_batch": 64})
    with Engine(files[target], named(drafter, files), slots=slots, context=options) as engine:
        never = dict.fromkeys(engine.vocabulary.end_of_generation, float("-inf"))
        first = engine.submit([*SYSTEM, 5], GREEDY.replace(logit_bias=never)) if beside else None
        if first is not None:
            next(first)
        results = [engine.submit(prompt, GREEDY, max_tokens=12).result for prompt in PROMPTS]
        if first is not None:
            assert not first.done, "the first answer ended before the others began"
            first.cancel()
        shared = engine.statistics().load.shared_prompt_tokens
    texts = [each.token_ids for each in results]
    return texts, [each.usage.cached_tokens for each in results], shared


@pytest.mark.parametrize(("target", "drafter"), SHARED)
def test_drafts_are_those_of_a_slot_that_read_the_whole_prompt(
    files: dict[str, Path], drafts: Drafts, target: str, drafter: str
) -> None:
    wanted, _, _ = answers(files, target, drafter, beside=False)
    alone = dict(drafts)
    drafts.clear()
    texts, cached, shared = answers(files, target, drafter, beside=True)
    assert texts == wanted
    if (target, drafter) == ("hybrid", "mtp(n=3)"):  # it has no checkpoint one token earlier
        assert shared == 0
    else:
        assert shared >= cached[0] >= (90 if "window" in drafter else 98)
    if target == "hybrid":  # the first round lacks the result after the last cached token
        del drafts[(*PROMPTS[0],)]
    same = {text: drafts[text] for text in alone if text in drafts}
    assert len(same) > 10
    assert same == {text: alone[text] for text in same}


@pytest.mark.parametrize(
    ("target", "drafter"),
    [
        ("shallow", "eagle(FILE:eagle, n=4)"),
        ("shallow", "hydra(FILE:hydra++, n=3)"),
        ("shallow", "dflash(FILE:dflash, n=4)"),
        ("nextn", "mtp(n=4)"),
    ],
)
def test_drafts_without_the_cells_of_the_prefix_are_seen(
    files: dict[str, Path],
    drafts: Drafts,
    target: str,
    drafter: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers(files, target, drafter, beside=False)
    alone = dict(drafts)
    drafts.clear()
    for kind in _kinds(StatesSource):
        monkeypatch.setattr(kind, "copy_cells", lambda *_: True)
    answers(files, target, drafter, beside=True)
    assert any(drafts[text] != alone[text] for text in alone if text in drafts)


def _kinds(base: type[Any]) -> list[type[Any]]:
    return [base, *(each for kind in base.__subclasses__() for each in _kinds(kind))]


def test_a_slot_with_a_text_keeps_it_if_a_recurrent_state_cannot_go_back(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its drafter has read would be lost, and nothing gained."""
    taken: list[int] = []
    take_over = GrowingDrafter.take_over

    def noting(drafter: GrowingDrafter, other: Drafter, length: int) -> int:
        taken.append(length)
        return take_over(drafter, other, length)

    monkeypatch.setattr(GrowingDrafter, "take_over", noting)
    options = ContextOptions(**{**F32, "n_ctx": 800, "n_batch": 64})
    with Engine(files["hybrid"], "mtp(n=3)", slots=2, context=options) as engine:
        engine.submit([7, 7, 7, 7], GREEDY, max_tokens=4).drain()
        engine.submit([8, 8, 8, 8], GREEDY, max_tokens=4).drain()
        never = dict.fromkeys(engine.vocabulary.end_of_generation, float("-inf"))
        first = engine.submit([*SYSTEM, 5], GREEDY.replace(logit_bias=never))
        next(first)
        engine.submit([*SYSTEM, 6], GREEDY, max_tokens=4).drain()
        assert not first.done
        first.cancel()
    assert not taken
