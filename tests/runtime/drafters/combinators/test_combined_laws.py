"""Combinators under rules that weigh their laws: what comes out is pi of who speaks at a place.

To 1e-12, by enumeration. A cascade's law is its draft model's, which depends on the text alone. In
a relay it depends on the depth, too, at which a place stands in its round: the law of a text is
then that of all ways in which rounds may have cut it, by a recursion of its own below.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from support.enumeration import (
    PROMPT,
    TOLERANCE,
    Propose,
    branching_tree,
    chain,
    law_with_drafter,
    top_k_points,
)
from support.law_pairs import (
    Pi,
    TableRowsBelow,
    TellingDrafter,
    deferral,
    distance,
    pi_at,
    texts_law,
    token_rule,
)
from support.scripted import PLAIN, LawTable, ScriptedDrafter, TableDraftModel

from specrun.runtime.acceptance import PairRule, build_rule
from specrun.runtime.drafters.combinators import CascadeDrafter, EnsembleDrafter, RelayDrafter
from specrun.runtime.laws import SeededNoise
from specrun.runtime.round import Drafter, DraftRequest, NoDrafter
from specrun.runtime.trees import ROOT, DraftTree

RULES = {
    "cascade-opt(alpha=0.3)": deferral("cascade-opt", 0.3),
    "cascade-token-v1(alpha=0.2)": token_rule("cascade-token-v1", 0.2),
    "cascade-token-v3(alpha=0.5)": token_rule("cascade-token-v3", 0.5),
}
SIZE = 3
TABLE, FIRST, SECOND = LawTable(SIZE, 1), LawTable(SIZE, 101), LawTable(SIZE, 201)


def rule_of(name: str) -> PairRule:
    built = build_rule(name)
    assert isinstance(built, PairRule)
    return built


def telling(propose: Propose, drafts: LawTable, most: int = 4) -> Drafter:
    drafter = TellingDrafter(propose, drafts)
    drafter.max_nodes = most
    return drafter


def error_of(name: str, make: Callable[[], Drafter], drafts: LawTable, length: int = 3) -> float:
    """The largest error against the product of pi, with q a law of the text alone."""
    found = law_with_drafter(rule_of(name), make, TABLE, length)
    law = pi_at(RULES[name], drafts, TABLE, PLAIN)
    return distance(found, texts_law(law, SIZE, length))


# -- cascades --------------------------------------------------------------------------------------


def cascade(inner: str, **options: object) -> Callable[[], Drafter]:
    guesses = LawTable(SIZE, 301)

    def make() -> Drafter:
        helper: Drafter = NoDrafter()
        if inner != "none":
            grow = chain(guesses, 1) if inner == "chain" else top_k_points(guesses, 2, 2)
            helper = ScriptedDrafter(grow, 8)
        return CascadeDrafter(TableDraftModel(FIRST), helper, num_draft_tokens=2, **options)  # type: ignore[arg-type]

    return make


@pytest.mark.parametrize("options", [{}, {"sampling": "argmax"}, {"max_rounds": 1}, {"p_min": 0.6}])
@pytest.mark.parametrize("inner", ["none", "chain", "points"])
@pytest.mark.parametrize("name", ["cascade-opt(alpha=0.3)", "cascade-token-v3(alpha=0.5)"])
def test_a_cascades_law_is_its_draft_models(
    name: str, inner: str, options: dict[str, object]
) -> None:
    assert error_of(name, cascade(inner, **options), FIRST) < TOLERANCE


def test_a_cascade_without_the_row_after_its_draft_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CascadeDrafter, "_row_after", lambda *_: None)
    assert all(error_of(name, cascade("chain"), FIRST) > 1e-2 for name in RULES)


# -- relays ----------------------------------------------------------------------------------------


def relay_law(pi: Pi, length: int) -> dict[tuple[int, ...], float]:
    """The law of texts where a round drafts one token of FIRST, then one of SECOND, as far as the
    answer's end allows."""
    laws = [pi_at(pi, drafts, TABLE, PLAIN) for drafts in (FIRST, SECOND)]
    found: dict[tuple[int, ...], float] = {}

    def go_on(text: tuple[int, ...], depth: int, most: int, chance: float) -> None:
        if len(text) == length:
            found[text] = found.get(text, 0.0) + chance
            return
        prefix, speaker = [*PROMPT, *text], min(depth, 1)
        law, q = laws[speaker](prefix), (FIRST, SECOND)[speaker](prefix)
        # Kept drafts go on in the round; what replaced one, or came after the last, begins another.
        kept = np.minimum(law, q) if depth < most else np.zeros(SIZE)
        for token in range(SIZE):
            if kept[token] > 0.0:
                go_on((*text, token), depth + 1, most, chance * float(kept[token]))
            rest = float(law[token] - kept[token])
            if rest > 0.0:
                longer = (*text, token)
                go_on(longer, 0, min(2, length - len(longer) - 1), chance * rest)

    go_on((), 0, min(2, length - 1), 1.0)
    return found


def relay(kind: type[RelayDrafter] = RelayDrafter) -> Callable[[], Drafter]:
    return lambda: kind(
        [telling(chain(FIRST, 1), FIRST), telling(chain(SECOND, 1), SECOND)], [1, 1]
    )


class _AlwaysTheFirst(RelayDrafter):
    """Wrong: tells the first member's rows alone."""

    def propose(self, request: DraftRequest) -> DraftTree:
        tree = super().propose(request)
        return dataclasses.replace(tree, rows=TableRowsBelow(FIRST, request.tokens, tree))


@pytest.mark.parametrize("name", RULES)
def test_in_a_relay_who_drafts_at_a_depth_speaks_there(name: str) -> None:
    length = 3
    found = law_with_drafter(rule_of(name), relay(), TABLE, length)
    assert distance(found, relay_law(RULES[name], length)) < TOLERANCE


def test_a_relay_that_tells_other_rows_is_seen() -> None:
    name = "cascade-token-v1(alpha=0.2)"
    found = law_with_drafter(rule_of(name), relay(_AlwaysTheFirst), TABLE, 3)
    assert distance(found, relay_law(RULES[name], 3)) > 1e-3


@pytest.mark.parametrize("name", RULES)
def test_members_that_say_the_same_are_one_drafter(name: str) -> None:
    """Chains, siblings and favourites of one table, one after the other or side by side."""

    def members() -> list[Drafter]:
        grown = (chain(FIRST, 1), branching_tree(FIRST, (2,), True), top_k_points(FIRST, 2, 1))
        return [telling(propose, FIRST) for propose in grown]

    assert error_of(name, lambda: RelayDrafter(members()[:2], [None] * 2), FIRST) < TOLERANCE
    assert error_of(name, lambda: RelayDrafter(members()[1:], [None] * 2), FIRST) < TOLERANCE
    assert error_of(name, lambda: EnsembleDrafter(members()[:2]), FIRST) < TOLERANCE
    assert error_of(name, lambda: EnsembleDrafter(members()[1:]), FIRST) < TOLERANCE


# -- ensembles -------------------------------------------------------------------------------------


def ask(drafter: Drafter, seed: int = 3) -> DraftTree:
    return drafter.propose(DraftRequest(list(PROMPT), PLAIN, SeededNoise(seed), 4, 16, keep="rows"))


def logits_after(drafts: LawTable, path: Sequence[int]) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(drafts([*PROMPT, *path]))


def test_in_an_ensemble_the_member_whose_law_decides_speaks() -> None:
    """Favourites first, draws second: at the root the draws' law stands for q, and below it who
    drafted there; a leaf is its drafter's."""
    ensemble = EnsembleDrafter(
        [telling(top_k_points(FIRST, 3, 1), FIRST), telling(chain(SECOND, 2), SECOND)]
    )
    tree = ask(ensemble)
    assert tree.rows is not None
    drawn = tree.draws[ROOT][-1].node
    assert tree.draws[ROOT][0].law is None
    assert tree.draws[ROOT][-1].law is not None
    speakers = {ROOT: SECOND, drawn: SECOND}
    for node in range(len(tree)):
        if tree.parents[node] == ROOT:
            speakers.setdefault(node, FIRST)
        else:
            speakers[node] = SECOND
    assert len(set(map(id, speakers.values()))) == 2
    for node, drafts in speakers.items():
        path = [tree.tokens[above] for above in tree.path_to(node)]
        np.testing.assert_array_equal(tree.rows.logits(node), logits_after(drafts, path))


def test_one_member_that_tells_none_is_enough_to_tell_none() -> None:
    silent = ScriptedDrafter(chain(FIRST, 1), 1)
    for kind in (lambda parts: RelayDrafter(parts, [None, None]), EnsembleDrafter):
        assert not kind([telling(chain(FIRST, 1), FIRST), silent]).keeps_rows
        assert kind([telling(chain(FIRST, 1), FIRST), NoDrafter()]).keeps_rows
