"""Under a grammar every exact rule gives the masked target's law to 1e-12, whatever is drafted.

The loop runs under the branching source; what may follow is known from lists of all texts of small
languages, of which the tokens spell some in several ways. Wrong variants fail the same test.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support.enumeration import PROMPT, TOLERANCE, FixedTable, Propose, law_with_drafter, proposals
from support.scripted import LawTable, ScriptedDrafter
from support.tiny_grammars import FORCED, LAZY, SPELLINGS, STRICT, Language, guided

from specrun.runtime.acceptance import AcceptanceRule, ExactRule, build_rule, rule_names
from specrun.runtime.drafters.combinators.guided import GuidedDrafter
from specrun.runtime.grammar import GrammarError, GrammarState
from specrun.runtime.grammar.compiled import CompiledGrammar
from specrun.runtime.laws import Law, Logits, SamplingParams, transformed_law
from specrun.runtime.laws.samplers import FRESH, SamplerState
from specrun.runtime.round import Drafter, DraftRequest, NoDrafter, loop
from specrun.runtime.round.drafter import Keep
from specrun.runtime.trees import DraftTree

EXACT_RULES = [name for name in rule_names() if build_rule(name).exact]
LANGUAGES = {"spellings": SPELLINGS, "forced": FORCED, "lazy": LAZY, "strict": STRICT}
LENGTH = 3
ENDING = FixedTable(0.05, 0.1, 0.02, 0.004, 0.826)  # a model that would say nothing


def table(language: Language, seed: int = 1) -> LawTable:
    return LawTable(language.words.size, seed, zeros=0.0)


def drafter(propose: Propose | None, *, is_guided: bool) -> Drafter:
    if propose is None:
        propose = nothing
    return guided(propose) if is_guided else ScriptedDrafter(propose)


def nothing(_: DraftRequest) -> DraftTree:
    return DraftTree()


def error(
    language: Language,
    rule: AcceptanceRule,
    propose: Propose | None,
    *,
    is_guided: bool = True,
    params: SamplingParams | None = None,
    length: int = LENGTH,
) -> float:
    """The largest error of any text's probability."""
    laws = table(language)
    emitted = law_with_drafter(
        rule,
        lambda: drafter(propose, is_guided=is_guided),
        laws,
        length,
        language.words.end_of_generation,
        params or language.params,
        language.start(),
    )
    wanted = language.law(laws, length)
    return max(abs(emitted.get(text, 0.0) - wanted.get(text, 0.0)) for text in {*emitted, *wanted})


@pytest.mark.parametrize("name", list(proposals(5, 0)))
@pytest.mark.parametrize(
    ("language", "rule"),
    [*(("spellings", rule) for rule in EXACT_RULES), *((name, "exact") for name in LANGUAGES)],
)
def test_exact_rules_give_the_masked_law(language: str, rule: str, name: str) -> None:
    wide = name in (
        "without replacement",
        "i.i.d. siblings",
        "two drafters",
        "mixed",
    )
    grammar, length = LANGUAGES[language], 2 if wide or language != "spellings" else LENGTH
    if name == "two drafters" and grammar.after:
        pytest.skip("too many outcomes")
    propose = proposals(grammar.words.size, 3)[name]
    assert error(grammar, build_rule(rule), propose, length=length) < TOLERANCE


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("name", ["chain", "point masses", "wandering chain"])
def test_drafts_that_ignore_the_grammar_do_not_change_the_law(language: str, name: str) -> None:
    grammar = LANGUAGES[language]
    propose = proposals(grammar.words.size, 3)[name]
    assert error(grammar, ExactRule(), propose, is_guided=False) < TOLERANCE


def test_a_text_in_which_the_grammar_begins_inside_a_draft() -> None:
    """ "xy" is spelled by "x" and "y", or by "xya": its rest may begin a text of LAZY."""
    propose = proposals(LAZY.words.size, 3)["point masses"]
    for language, spans in ((LAZY, True), (STRICT, False)):
        texts = {language.words.spelled(text) for text in language.law(table(language), 4)}
        assert "xybb" in texts
        assert ("bbxyab" in texts) is spans
        assert error(language, ExactRule(), propose, length=4) < TOLERANCE


# -- what is drafted -------------------------------------------------------------------------------


def drafted(language: Language, propose: Propose, keep: Keep = "nothing") -> DraftTree:
    noise, state = loop.Conversation(NoDrafter(), PROMPT).noise, language.start()
    request = DraftRequest(PROMPT, language.params, noise, 8, 16, keep=keep, state=state)
    return GuidedDrafter(ScriptedDrafter(propose)).propose(request)


def test_what_the_grammar_forces_is_drafted() -> None:
    tree = drafted(FORCED, nothing)
    assert FORCED.words.spelled(tree.tokens) == "abca"[: len(FORCED.words.spelled(tree.tokens))]
    assert len(tree) >= 2
    assert all(draw.law is None for draws in tree.draws.values() for draw in draws)


def test_nothing_is_forced_under_rules_that_weigh_the_drafters_laws() -> None:
    """A forced token would stand for the drafter's law, of which such a rule states its own."""
    assert drafted(FORCED, nothing, keep="laws") == DraftTree()


def test_point_masses_are_pruned_where_the_grammar_ends_them() -> None:
    a, b, ab, c, end = range(5)
    chain = drafted(SPELLINGS, lambda _: DraftTree.chain([ab, c, c, a]))
    assert chain.tokens == (ab, c)
    tree = DraftTree.of_points([a, b, c, a, end, ab], (-1, -1, 0, 1, 3, 4))
    # "ac" is no beginning; "ba" is a text, which ends there.
    assert drafted(SPELLINGS, lambda _: tree).tokens == (a, b, a, end)


def test_a_draft_of_allowed_tokens_is_left_as_it_is() -> None:
    chain = DraftTree.chain([2, 3])
    assert drafted(SPELLINGS, lambda _: chain) is chain


def test_a_forbidden_draw_stays_and_nothing_below_it() -> None:
    law = Law(np.full(5, 0.2))
    tree = drafted(SPELLINGS, lambda _: DraftTree.chain([3, 3, 1], [law, law, law]))
    assert tree.tokens == (3, 3)
    assert [len(draws) for draws in tree.draws.values()] == [1, 1]


def test_nodes_that_are_no_candidates_stay_with_what_they_hang_from() -> None:
    tree = DraftTree(
        (3, 9, 9, 3, 9), (-1, 0, -1, 0, 3), (1, 2, 1, 2, 3), (True, False, False, True, False), {}
    )
    draws = DraftTree.of_points([3, 3], (-1, 0)).draws
    moved = {-1: draws[-1], 0: (draws[0][0]._replace(node=3),)}
    whole = DraftTree(tree.tokens, tree.parents, tree.depths, tree.is_candidate, moved)
    assert drafted(SPELLINGS, lambda _: whole).tokens == (3, 9, 9)


# -- negative controls -----------------------------------------------------------------------------


def test_a_mask_after_truncation_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SPELLINGS.params.replace(min_p=0.05)
    wanted = law_of_plain(params)
    assert max(wanted.values()) < 1.0

    def too_late(
        logits: Logits,
        params: SamplingParams,
        window: Sequence[int] = (),
        state: SamplerState = FRESH,
    ) -> Law:
        cut = transformed_law(logits, params.replace(grammar=None))
        assert state.grammar is not None
        ids = np.arange(len(cut.probs)) if cut.ids is None else cut.ids
        after = state.grammar.after(window[state.grammar.length :])
        kept = np.where(after.allowed(ids), cut.probs, 0.0)
        return (
            Law(kept / kept.sum(), ids)
            if kept.any()
            else transformed_law(logits, params, window, state)
        )

    monkeypatch.setattr(loop, "transformed_law", too_late)
    got = law_of_plain(params)
    assert max(abs(got.get(text, 0.0) - wanted.get(text, 0.0)) for text in {*got, *wanted}) > 0.01


def law_of_plain(params: SamplingParams) -> dict[tuple[int, ...], float]:
    ends = SPELLINGS.words.end_of_generation
    return law_with_drafter(ExactRule(), NoDrafter, ENDING, LENGTH, ends, params, SPELLINGS.start())


def test_truncation_comes_after_the_mask() -> None:
    """min-p compares with the likeliest of the tokens that are allowed."""
    params = SPELLINGS.params.replace(min_p=0.05)
    emitted = law_of_plain(params)
    first = SPELLINGS.masked(ENDING(PROMPT), ())
    kept = np.where(first >= 0.05 * first.max(), first, 0.0)
    for token in range(5):
        mass = sum(p for text, p in emitted.items() if text[0] == token)
        assert mass == pytest.approx(kept[token] / kept.sum(), abs=TOLERANCE)


class NeverTakenBack:
    """A matcher that only ever goes on."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def ask(self, name: str, seconds: float, back: int, *arguments: Any) -> None:
        del back
        self._matcher.ask(name, seconds, 0, *arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)


def test_a_matcher_that_is_not_taken_back_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = CompiledGrammar.start

    def started(self: CompiledGrammar, length: int) -> GrammarState:
        place = begin(self, length)
        place._cursor._matcher = NeverTakenBack(place._cursor._matcher)
        return place

    monkeypatch.setattr(CompiledGrammar, "start", started)
    propose = proposals(5, 3)["point masses"]
    try:
        wrong = error(SPELLINGS, ExactRule(), propose)
    except GrammarError:
        return
    assert wrong > 0.01


def test_forced_tokens_that_are_not_tested_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """ "ab" may be one token or two: to take what is forced for granted decides that."""

    def certain(self: GrammarState, logits: np.ndarray, text: Sequence[int]) -> np.ndarray:
        place = self.after(text[self.length :])
        forced = place.forced(1)
        row = masked(self, logits, text)
        if forced:
            row = np.full_like(row, -np.inf)
            row[forced] = 0.0
        return row

    masked = GrammarState.masked
    monkeypatch.setattr(GrammarState, "masked", certain)
    assert error(FORCED, ExactRule(), None) > 0.01
