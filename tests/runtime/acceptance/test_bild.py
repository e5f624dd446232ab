"""The Big Little Decoder: its stated law by enumeration, and where its drafts end.

The law of a place depends on how many tokens the small model has said since the large one was last
asked: the expected law of a text is summed over that number, by recursion, apart from the loop.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
from support.enumeration import PROMPT, TOLERANCE
from support.scripted import PLAIN, LawTable, ScriptedDrafter, TableTarget, conversation_of, law_of
from support.tiny_models import F32

from specrun.bench.prove.rules import BranchingNoise, enumerate_law, prove_rule
from specrun.bindings.errors import OptionError
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.acceptance import BildRule, LawPair, RawLaw, build_rule
from specrun.runtime.language import quoted
from specrun.runtime.laws import Law, transformed_law
from specrun.runtime.round import DraftRequest
from specrun.runtime.round.loop import DecodeSettings, RoundLimits, decode_rounds
from specrun.runtime.trees import DraftTree

SIZE, LENGTH, WINDOW = 4, 4, 2
CUT = PLAIN.replace(temperature=1.3, top_p=0.8)
GREEDY = PLAIN.replace(temperature=0.0)


def tables(seed: int) -> tuple[LawTable, LawTable]:
    return LawTable(SIZE, seed + 1000, zeros=0.0), LawTable(SIZE, seed, zeros=0.0)


def logits(table: LawTable, prefix) -> np.ndarray:
    return np.log(table(prefix))


def dense(law: Law) -> np.ndarray:
    return law.aligned_to(Law(np.zeros(SIZE)))


def chain_of(drafts: LawTable, params):
    """Draft as a small model does: while its raw law is sure enough, at most WINDOW tokens."""

    def propose(request: DraftRequest) -> DraftTree:
        tokens: list[int] = []
        laws: list[Law] = []
        while len(tokens) < min(WINDOW, request.max_depth):
            prefix = [*request.tokens, *tokens]
            if drafts(prefix).max() < request.fallback:
                break
            law = transformed_law(logits(drafts, prefix), params)
            laws.append(law)
            tokens.append(request.noise.choose(law))
        return DraftTree.chain(tokens, None if params.is_greedy else laws)

    return propose


def emitted(rule, seed: int, params) -> dict[tuple[int, ...], float]:
    drafts, targets = tables(seed)

    def program(noise: BranchingNoise) -> tuple[int, ...]:
        conversation = conversation_of(ScriptedDrafter(chain_of(drafts, params)), PROMPT, noise)
        limits = RoundLimits(n_ctx=64, max_nodes=32, max_tokens=LENGTH)
        settings = DecodeSettings(rule, params, limits)
        for _ in decode_rounds(TableTarget(targets), conversation, settings):
            pass
        return tuple(conversation.tokens[len(PROMPT) :])

    return enumerate_law(program)  # type: ignore[return-value]


def stated(seed: int, fallback: float, rollback: float, params, *, raw: bool = True):
    """Return the law of all texts; without `raw` the wrong one, which compares transformed laws."""
    drafts, targets = tables(seed)

    @functools.cache
    def law(text: tuple[int, ...], said: int) -> dict[tuple[int, ...], float]:
        if len(text) == LENGTH:
            return {text: 1.0}
        prefix = [*PROMPT, *text]
        q = dense(transformed_law(logits(drafts, prefix), params))
        p = dense(transformed_law(logits(targets, prefix), params))
        speaks = said < WINDOW and len(text) < LENGTH - 1 and drafts(prefix).max() >= fallback
        with np.errstate(divide="ignore"):
            near = -np.log(targets(prefix) if raw else p) <= rollback
        own = q * near if speaks else np.zeros(SIZE)
        total: dict[tuple[int, ...], float] = {}
        for token in range(SIZE):
            for weight, after in (
                (own[token], said + 1),
                ((1.0 - own.sum()) * p[token], 0),
            ):
                if weight:
                    for whole, chance in law((*text, token), after).items():
                        total[whole] = total.get(whole, 0.0) + weight * chance
        return total

    return law((), 0)


def error(law, wanted) -> float:
    return max(abs(law.get(text, 0.0) - wanted.get(text, 0.0)) for text in {*law, *wanted})


@pytest.mark.parametrize("params", [PLAIN, CUT, GREEDY], ids=["1", "top-p", "0"])
@pytest.mark.parametrize(("fallback", "rollback"), [(0.5, 1.0), (0.0, 2.0), (0.7, 0.0), (1.0, 1.0)])
def test_what_comes_out_has_the_stated_law(fallback, rollback, params):
    # Of whole laws a second table takes three times as long as all others together.
    for seed in (1,) if params is PLAIN else (0, 1):
        law = emitted(BildRule(fallback, rollback), seed, params)
        assert error(law, stated(seed, fallback, rollback, params)) < TOLERANCE


def test_a_distance_of_transformed_laws_is_seen():
    law = emitted(BildRule(0.0, 1.0), 0, CUT)
    assert error(law, stated(0, 0.0, 1.0, CUT, raw=False)) > 0.01


def test_a_fallback_that_nobody_heeds_is_seen():
    law = emitted(BildRule(0.7, 1.0), 0, PLAIN)
    assert error(law, stated(0, 0.0, 1.0, PLAIN)) > 0.01


def test_at_temperature_0_it_is_exact_only_where_nothing_but_the_best_may_stay():
    """Rollback 0 keeps certain tokens only; a large one keeps all that was drafted."""
    _, targets = tables(5)
    law = emitted(BildRule(0.0, 0.0), 5, GREEDY)
    best: list[int] = []
    for _ in range(LENGTH):
        best.append(int(targets([*PROMPT, *best]).argmax()))
    assert law == {tuple(best): 1.0}
    loose = [emitted(BildRule(0.0, 50.0), seed, GREEDY) for seed in range(6)]
    exact = [emitted(BildRule(0.0, 0.0), seed, GREEDY) for seed in range(6)]
    assert loose != exact


def pair(draft: list[float], target: list[float]) -> LawPair:
    q, p = (np.log(np.array(probs)) for probs in (draft, target))
    return LawPair(RawLaw(q), RawLaw(p), law_of(np.exp(q)), law_of(np.exp(p)))


def test_the_star_asks_how_likely_the_favourite_is():
    rule = build_rule("bild-star(rollback=1)")
    near = pair([0.5, 0.3, 0.2], [0.4, 0.1, 0.5])  # -log 0.4 is 0.92
    far = pair([0.3, 0.5, 0.2], [0.4, 0.1, 0.5])  # -log 0.1 is 2.3
    assert rule.law(near) is near.draft
    assert rule.law(far) is far.target
    assert build_rule("bild-star(rollback=3)").law(far) is far.draft


def test_the_star_emits_its_law_and_a_rule_that_forgets_it_does_not():
    for rollback in (0.5, 1.5):
        assert prove_rule(f"bild-star(rollback={rollback})", times=25).sound
    with pytest.raises(OptionError, match="has another distribution at the end of a draft"):
        prove_rule("bild")


# -- with models -----------------------------------------------------------------------------------

TEXT = list(b"the quick brown fox, the quick")
WARM = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=5)


def answer(target, small, accept: str, params=WARM):
    with Runtime(target, f"draft({quoted(str(small))}, n=6)", accept=accept, **F32) as runtime:
        return runtime.generate(TEXT, params, max_tokens=40)


@pytest.mark.parametrize("params", [WARM, WARM.replace(temperature=0.0)], ids=["1", "0"])
def test_a_draft_model_stops_where_it_is_not_sure(tiny_model, tiny_flat_twin, params):
    lengths = {}
    for fallback in (0.05, 0.3, 1.0):
        result = answer(tiny_model, tiny_flat_twin, f"bild(fallback={fallback})", params)
        lengths[fallback] = result.stats.drafted / result.stats.rounds
    assert lengths[0.05] > lengths[0.3] > lengths[1.0] == 0.0


def test_answers_repeat_and_differ_from_the_targets_own(tiny_model, tiny_flat_twin):
    accept = "bild(fallback=0, rollback=4)"
    first, again = (answer(tiny_model, tiny_flat_twin, accept) for _ in range(2))
    assert first.token_ids == again.token_ids
    assert first.token_ids != answer(tiny_model, tiny_flat_twin, "exact").token_ids
    assert (first.stats.exact, first.stats.rule) == (False, "bild(fallback=0, rollback=4)")


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("bild(fallback=2)", "bild: fallback is 2: give a probability, 0 to 1"),
        ("bild(rollback=-1)", "bild: rollback is -1: give 0 nats or more"),
        ("bild-star(rollback=inf)", "bild-star: rollback is inf: give 0 nats or more"),
        ("bild(rolback=1)", "did you mean 'rollback'"),
    ],
)
def test_bad_settings_are_refused_in_one_sentence(text, problem):
    with pytest.raises(OptionError, match=problem):
        build_rule(text)


@pytest.mark.parametrize(
    ("drafter", "problem"),
    [("prompt-lookup", "name one: -md SMALL"), ("none", "name one"), ("tree", "give a chain")],
)
def test_drafters_that_it_cannot_ask_are_refused(tiny_model, tiny_flat_twin, drafter, problem):
    small = f"draft({quoted(str(tiny_flat_twin))}, tree=2x2)"
    with pytest.raises(OptionError, match=problem):
        Runtime(tiny_model, small if drafter == "tree" else drafter, accept="bild", **F32)


def test_names_build_the_same_again():
    for text in ("bild(fallback=0.25, rollback=2)", "bild-star(rollback=1.5)"):
        assert build_rule(text).name == text
    assert math.isclose(build_rule("bild").rollback, 3.0)
