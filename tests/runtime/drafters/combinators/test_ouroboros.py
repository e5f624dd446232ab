"""Ouroboros: phrases extend drafts, verification makes phrases, and the text keeps the target's
law."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.enumeration import PROMPT, TOLERANCE, chain, drafter_bias
from support.scripted import PLAIN, LawTable, ScriptedDrafter, TableDraftModel, TableRows
from support.tiny_models import F32

from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.acceptance import ExactRule
from specrun.runtime.drafters.combinators import (
    CascadeDrafter,
    OuroborosDrafter,
    PhraseDrafter,
    matched_phrases,
    phrase_tree,
    refined_phrases,
)
from specrun.runtime.drafters.lookahead import NgramPool, NgramStore, WindowGuard
from specrun.runtime.language import quoted
from specrun.runtime.laws import SeededNoise
from specrun.runtime.planning import TYPICAL_GPU, CostCurve
from specrun.runtime.round import Drafter, DraftRequest
from specrun.runtime.round.drafter import RoundOutcome
from specrun.runtime.trees import DraftTree

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def ids(text: str) -> list[int]:
    return [LETTERS.index(letter) for letter in text]


def pool_of(*phrases: str, n: int = 4) -> NgramPool:
    pool = NgramPool(n)
    for phrase in phrases:
        pool.add(ids(phrase))
    return pool


def answers(text: str) -> TableRows:
    """Rows whose most likely tokens spell a text, the root's first."""
    return TableRows([np.eye(26)[LETTERS.index(letter)] + 1e-9 for letter in text])


# -- the paper's own example -----------------------------------------------------------------------


def test_phrases_are_refined_by_the_targets_answers() -> None:
    """NOXQ and NRSY become NOPQ and NOPT."""
    tree = phrase_tree(pool_of("NRSY", "NOXQ"), ids("N")[0], 3, 9, 9)
    assert tree.tokens == tuple(ids("OXQRSY"))
    refined = refined_phrases(tree, ids("N")[0], answers("OPQZPTZ"))  # after N, O, X, Q, R, S, Y
    assert [*refined] == [(ids("NOXQ"), ids("NOPQ")), (ids("NRSY"), ids("NOPT"))]


def test_refinement_deletes_then_adds() -> None:
    """The pool holds what the target would say in the place of what it would not: no more phrases
    than before, the corrected ones the latest."""
    drafts = LawTable(3, 0)
    store = NgramStore(pool_of("NRSY", "NOXQ", "NOWW", "KLMN"))
    drafter = OuroborosDrafter(ScriptedDrafter(chain(drafts, 0)), store, count=2, length=3)
    tokens = ids("N")
    drafter.begin(tokens)
    tree = drafter.propose(DraftRequest(tokens, PLAIN, SeededNoise(0), 9, 9))
    assert tree.tokens == tuple(ids("OWWXQ"))
    # The root says O, O says P, its W says Q; X is never right, its row says Z.
    outcome = RoundOutcome([*tokens, *ids("OP")], tree, (0,), ids("P")[0], answers("OPQAZA"))
    drafter.observe(outcome)
    phrases = {"".join(LETTERS[token] for token in phrase) for phrase in store.pool}
    assert phrases == {"NRSY", "KLMN", "NOPQ", "NOPZ"}
    rests = store.pool.guesses(ids("N")[0])
    assert rests[:2] == [tuple(ids("OPZ")), tuple(ids("OPQ"))]


def test_a_phrase_that_was_right_keeps_what_was_not_drafted_of_it() -> None:
    store = NgramStore(pool_of("ABCD"))
    drafter = OuroborosDrafter(ScriptedDrafter(chain(LawTable(3, 0), 0)), store, count=1, length=3)
    tokens = ids("A")
    drafter.begin(tokens)
    tree = drafter.propose(DraftRequest(tokens, PLAIN, SeededNoise(0), 2, 9))  # room for two
    assert tree.tokens == tuple(ids("BC"))
    outcome = RoundOutcome([*tokens, *ids("BCE")], tree, (0, 1), ids("E")[0], answers("BCE"))
    drafter.observe(outcome)
    assert tuple(ids("BCD")) in store.pool.guesses(0)


def test_what_is_right_behind_a_rejected_token_becomes_phrases() -> None:
    """The target rejects W; after it, it agrees with KLMN and goes on with O."""
    phrases = list(matched_phrases(ids("WKLMN"), [4, 5, 6, 7, 8], 4, answers("AAAAAKLMNO")))
    assert ids("KLMN") in phrases
    assert ids("LMNO") in phrases
    assert not list(matched_phrases(ids("WKL"), [0, 1, 2], 4, answers("AZZZ")))


def test_phrases_share_prefixes_and_keep_limits() -> None:
    pool = pool_of("ABCD", "ABCE", "ABF")
    assert phrase_tree(pool, 0, 3, 9, 9).parents == (-1, 0, 0, 2, 2)
    assert phrase_tree(pool, 0, 1, 9, 9).tokens == tuple(ids("BF"))
    assert phrase_tree(pool, 0, 3, 1, 9).tokens == tuple(ids("B"))
    assert len(phrase_tree(pool, 0, 3, 9, 2)) == 2
    assert len(phrase_tree(pool, 0, 3, 0, 9)) == len(phrase_tree(pool, 0, 3, -1, 9)) == 0
    assert len(phrase_tree(pool, 7, 3, 9, 9)) == 0


# -- exactness -------------------------------------------------------------------------------------


def ouroboros(drafts: LawTable, n: int = 1) -> Drafter:
    store = NgramStore(NgramPool(3))
    inner = PhraseDrafter(store, count=2, length=2)
    draft = CascadeDrafter(TableDraftModel(drafts), inner, num_draft_tokens=n)
    return OuroborosDrafter(draft, store, count=2, length=2)


@pytest.mark.parametrize("seed", range(3))
def test_the_law_is_the_targets_while_the_pool_learns(seed: int) -> None:
    assert (
        drafter_bias(ExactRule(), lambda: ouroboros(LawTable(3, seed + 9)), LawTable(3, seed), 4)
        < TOLERANCE
    )


@pytest.mark.parametrize("seed", range(2))
def test_longer_drafts_over_two_tokens(seed: int) -> None:
    make = lambda: ouroboros(LawTable(2, seed + 9), n=2)  # noqa: E731
    assert drafter_bias(ExactRule(), make, LawTable(2, seed, 0.0), 5) < TOLERANCE


def test_phrases_pruned_by_what_was_drawn_beside_them_are_no_bias_but_dropped_drafts_are() -> None:
    """Negative control: the drawn token is left out where a phrase begins with it."""

    class Drops(OuroborosDrafter):
        def propose(self, request: DraftRequest) -> DraftTree:
            tree = super().propose(request)
            known = self._store.pool.guesses(request.tokens[-1])
            return (
                DraftTree()
                if len(tree) and any(rest[0] == tree.tokens[0] for rest in known)
                else tree
            )

    def make() -> Drafter:
        store = NgramStore(NgramPool(3))
        draft = ScriptedDrafter(chain(LawTable(3, 9, 0.0), 1), 1)
        store.add([1, 2])
        return Drops(draft, store, count=1, length=1)

    assert (
        max(drafter_bias(ExactRule(), make, LawTable(3, seed, 0.0), 2) for seed in range(4)) > 1e-2
    )


# -- what flows back -------------------------------------------------------------------------------


def test_a_round_feeds_the_pool() -> None:
    """The paper's figure: draft EFGHIWKLMN with NOXQ below, of which the target keeps EFGHI and
    says J."""
    store = NgramStore(pool_of("NOXQ"))
    draft = ScriptedDrafter(lambda _: DraftTree.chain(ids("EFGHIWKLMN")), 10)
    drafter = OuroborosDrafter(draft, store, count=2, length=3)
    tokens = ids("ABCD")
    drafter.begin(tokens)
    tree = drafter.propose(DraftRequest(tokens, PLAIN, SeededNoise(0), 20, 20))
    assert tree.tokens == tuple(ids("EFGHIWKLMNOXQ"))
    rows = answers("EFGHIJ" + "KLMNO" + "PQZ")
    tokens = ids("ABCDEFGHIJ")
    drafter.observe(RoundOutcome(tokens, tree, (0, 1, 2, 3, 4), ids("J")[0], rows))  # type: ignore[arg-type]
    for phrase in ("KLMN", "LMNO", "NOPQ", "ABCD", "GHIJ"):
        assert tuple(ids(phrase)[1:]) in store.pool.guesses(ids(phrase)[0])
    assert drafter.report()["phrases"] == {"pool": len(store.pool), "drafted": 1, "used": 0}
    drafter.begin(())
    assert list(store.pool) == [tuple(ids("NOXQ"))]


def test_a_foreign_outcome_teaches_the_text_only() -> None:
    store = NgramStore(pool_of("NOXQ"))
    drafter = OuroborosDrafter(ScriptedDrafter(lambda _: DraftTree()), store, count=2, length=3)
    drafter.begin(list(PROMPT))
    drafter.propose(DraftRequest(list(PROMPT), PLAIN, SeededNoise(0), 9, 9))
    outcome = RoundOutcome([*PROMPT, 5, 6], DraftTree.chain([5]), (0,), 6, TableRows([]))  # type: ignore[arg-type]
    drafter.observe(outcome)
    assert (1, 5, 6) in store.pool.guesses(0)


def test_phrases_that_never_pay_are_no_longer_evaluated() -> None:
    """Two tokens of phrases a round, for half a token's time, that are never right: soon only the
    draft is drafted."""
    store = NgramStore(pool_of("NOX"))
    draft = ScriptedDrafter(lambda _: DraftTree.chain(ids("N")), 1)
    guard = WindowGuard(CostCurve.flat([1.0 + 0.25 * n for n in range(9)]))
    drafter = OuroborosDrafter(draft, store, count=1, length=2, guard=guard)
    tokens = ids("AN")
    drafter.begin(tokens)
    sizes = []
    for _ in range(60):
        tree = drafter.propose(DraftRequest(tokens, PLAIN, SeededNoise(0), 9, 9))
        sizes.append(len(tree))
        tokens += ids("NZ")
        drafter.observe(RoundOutcome(tokens, tree, (0,), tokens[-1], answers("N" * 9)))  # type: ignore[arg-type]
    assert sizes[0] == 3
    assert sizes[-20:].count(1) >= 18
    assert sum(0.25 * (size - 1) for size in sizes) < 8 + 0.02 * 120 + 1


def test_a_pool_in_a_file_starts_warm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second process drafts phrases from its first round on, and needs fewer rounds; the text
    is the same.

    Where an evaluation of many nodes costs little more than one of few: else phrases are soon left
    out.
    """
    monkeypatch.setattr("specrun.runtime.drafters.environment.known_curve", lambda *_: TYPICAL_GPU)
    write_random_llama(tmp_path / "target.gguf", RandomLlama(vocab_size=400, seed=1, scale=4.0))
    write_random_llama(
        tmp_path / "drafter.gguf", RandomLlama(vocab_size=400, seed=1, layers=1, scale=2.5)
    )
    file, pool = quoted(str(tmp_path / "drafter.gguf")), quoted(str(tmp_path / "a pool"))
    expression = f"ouroboros(draft({file}, n=3), pool={pool}, phrases=4)"
    prompt, params = [3, 1, 4, 1, 5, 9, 2, 6], SamplingParams(temperature=0.0)

    def run() -> tuple[list[int], int, int]:
        with Runtime(tmp_path / "target.gguf", drafter=expression, **F32) as runtime:
            result = runtime.generate(prompt, params, max_tokens=60)
            return result.token_ids, result.stats.rounds, result.stats.drafting["phrases"]["used"]

    cold, warm = run(), run()
    assert cold[0] == warm[0]
    assert warm[1] < cold[1]
    assert warm[2] > cold[2]
