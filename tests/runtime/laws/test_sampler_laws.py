"""Samplers under speculation: the law of whole answers equals plain sampling's to 1e-12.

What is wanted is written out here text by text: each token's law by `transformed_law`, which the
tests beside this one hold to llama.cpp's, after all tokens before it, with mu moved by their
surprises. The shipped loop runs under a noise source that enumerates every outcome. What a hurried
implementation gets wrong (mu frozen for a round or forgotten after it, DRY from the root's tokens,
one number of XTC for a round) must fail the same test.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from support.enumeration import PROMPT, TOLERANCE, Propose, emitted_law, proposals, top_k_points
from support.scripted import LawTable, ScriptedDrafter, TableTarget, conversation_of

from specrun.bindings.errors import OptionError
from specrun.runtime.acceptance import Acceptance, build_rule, rule_names
from specrun.runtime.laws import NoiseSource, SamplingParams, SeededNoise, transformed_law
from specrun.runtime.laws.samplers import FRESH, SamplerState
from specrun.runtime.round import NoDrafter, loop
from specrun.runtime.round.loop import (
    AdaptiveLaws,
    DecodeSettings,
    RoundLimits,
    decode_rounds,
    require_rule,
)
from specrun.runtime.round.target import EvaluatedRows
from specrun.runtime.trees import DraftTree

LawOfTexts = dict[tuple[int, ...], float]
EXACT_RULES = [name for name in rule_names() if build_rule(name).exact]
OFF = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
LENGTH = 3
SETTINGS = {
    "mirostat 2": OFF.replace(mirostat=2, mirostat_ent=0.9, mirostat_lr=0.8),
    "mirostat 1": OFF.replace(mirostat=1, mirostat_ent=0.4, mirostat_lr=0.9),
    "DRY": OFF.replace(dry_multiplier=1.3, dry_allowed_length=1, dry_base=1.5),
    "DRY and penalties": OFF.replace(
        dry_multiplier=0.9, dry_allowed_length=1, dry_penalty_last_n=4, presence_penalty=0.4
    ),
    "XTC": OFF.replace(xtc_probability=0.4, xtc_threshold=0.2),
    "bias": OFF.replace(logit_bias={0: 1.2, 2: -2.0}),
    "typical": OFF.replace(typical_p=0.6, temperature=0.8),
    "dynamic temperature": OFF.replace(dynatemp_range=0.8, dynatemp_exp=1.5),
    "many, turned round": OFF.replace(
        top_n_sigma=1.5,
        min_p=0.05,
        dry_multiplier=0.5,
        dry_allowed_length=1,
        xtc_probability=0.3,
        xtc_threshold=0.25,
        temperature=0.9,
        samplers=("temperature", "xtc", "dry", "min_p", "top_n_sigma"),
    ),
    "penalties after the temperature": OFF.replace(
        temperature=0.6, repeat_penalty=1.6, repeat_last_n=2, samplers=("temperature", "penalties")
    ),
    "XTC at temperature 0": OFF.replace(temperature=0.0, xtc_probability=0.4, xtc_threshold=0.2),
}
BREAKERS = SamplerState(breakers={2: [()]})
TABLE = LawTable(3, 5, zeros=0.1)


def wanted_law(params: SamplingParams, state: SamplerState, table: LawTable) -> LawOfTexts:
    """Plain sampling's law of texts of `LENGTH` tokens."""
    laws: dict[tuple[int, ...], tuple[float, float]] = {(): (1.0, 2.0 * params.mirostat_ent)}
    for _ in range(LENGTH):
        longer = {}
        for text, (probability, mu) in laws.items():
            before = [*PROMPT, *text]
            with np.errstate(divide="ignore"):
                row = np.log(table(before))
            law = transformed_law(row, params, before, state.with_mu(mu))
            for token in range(table.size):
                share = law.probability(token)
                if share:
                    surprise = -math.log2(share)
                    moved = mu - params.mirostat_lr * (surprise - params.mirostat_ent)
                    longer[*text, token] = probability * share, moved
        laws = longer
    return {text: probability for text, (probability, _) in laws.items()}


def error(
    rule: str,
    propose: Propose | None,
    params: SamplingParams,
    state: SamplerState = FRESH,
    table: LawTable = TABLE,
) -> float:
    emitted = emitted_law(build_rule(rule), propose, table, LENGTH, frozenset(), params, state)
    wanted = wanted_law(params, state, table)
    return max(abs(emitted.get(text, 0.0) - wanted.get(text, 0.0)) for text in {*emitted, *wanted})


KINDS = ["plain", "chain", "point masses"]


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_law_of_an_answer_is_plain_samplings(name: str, kind: str) -> None:
    assert error("token", proposals(3, 5)[kind], SETTINGS[name]) < TOLERANCE


@pytest.mark.parametrize("kind", ["without replacement", "mixed"])
@pytest.mark.parametrize("name", ["mirostat 2", "DRY"])
def test_so_it_is_for_trees(name: str, kind: str) -> None:
    assert error("token", proposals(3, 5)[kind], SETTINGS[name]) < TOLERANCE


@pytest.mark.parametrize("rule", EXACT_RULES)
@pytest.mark.parametrize("name", ["mirostat 2", "DRY", "XTC"])
def test_so_it_is_under_every_exact_rule(rule: str, name: str) -> None:
    assert error(rule, proposals(3, 5)["chain"], SETTINGS[name]) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS[1:])
def test_drys_breakers_hold_at_every_node(kind: str) -> None:
    params = SETTINGS["DRY"]
    assert error("token", proposals(3, 5)[kind], params, BREAKERS) < TOLERANCE
    assert wanted_law(params, FRESH, TABLE) != wanted_law(params, BREAKERS, TABLE)


@pytest.mark.parametrize("name", SETTINGS)
def test_point_masses_keep_plain_samplings_text(name: str) -> None:
    """For the same seed, whatever the sampler; the laws are the same, and so are the numbers."""
    texts = [
        [seeded_text(seed, propose, SETTINGS[name]) for seed in range(12)]
        for propose in (None, top_k_points(LawTable(3, 77), 2, 2))
    ]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1


def seeded_text(seed: int, propose: Propose | None, params: SamplingParams) -> tuple[int, ...]:
    drafter = NoDrafter() if propose is None else ScriptedDrafter(propose)
    conversation = conversation_of(drafter, PROMPT, SeededNoise(seed))
    limits = RoundLimits(n_ctx=64, max_nodes=32, max_tokens=16)
    settings = DecodeSettings(build_rule("token"), params, limits)
    list(decode_rounds(TableTarget(TABLE), conversation, settings))
    return tuple(conversation.tokens)


@pytest.mark.parametrize("rule", ["typical", "lossy"])
def test_mirostat_is_refused_under_a_rule_that_is_not_exact(rule: str) -> None:
    made = build_rule(rule)
    with pytest.raises(
        OptionError, match=r"^mirostat needs tokens of the target's own distribution"
    ):
        require_rule(made, SETTINGS["mirostat 2"])
    require_rule(made, SETTINGS["mirostat 2"].replace(temperature=0.0))
    require_rule(made, SETTINGS["XTC"])


# -- negative controls: what must not pass ---------------------------------------------------------


class FrozenForTheRound(AdaptiveLaws):
    """Every node's law with the root's mu; moved only when the round is over."""

    def _mu(self, node: int) -> float:
        return self._mus[-1]

    def state_after(self, accepted: Acceptance) -> SamplerState:
        mu, before = self._mus[-1], -1
        for node in accepted.path:
            mu = self._step(mu, before, self._tree.tokens[node])
            before = node
        return self._state.with_mu(self._step(mu, before, accepted.next_token))

    def _step(self, mu: float, node: int, token: int) -> float:
        surprise = -math.log2(self(node).probability(token))
        return mu - self._params.mirostat_lr * (surprise - self._params.mirostat_ent)


class ForgottenAfterTheRound(AdaptiveLaws):
    """Moves mu down the tree, and starts the next round from where this one started."""

    def state_after(self, accepted: Acceptance) -> SamplerState:
        return self._state


class WithoutTheLastToken(AdaptiveLaws):
    """Keeps mu of the accepted path, and forgets the target's own token after it."""

    def state_after(self, accepted: Acceptance) -> SamplerState:
        return self._state.with_mu(self._mu(accepted.path[-1] if accepted.path else -1))


WRONG = [FrozenForTheRound, ForgottenAfterTheRound, WithoutTheLastToken]


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("kind", ["chain", "point masses"])
def test_a_wrong_mu_fails(
    wrong: type[AdaptiveLaws], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "AdaptiveLaws", wrong)
    assert error("token", proposals(3, 5)[kind], SETTINGS["mirostat 2"]) > 1e-3


def roots_window(tokens: Sequence[int], path: Sequence[int], params: SamplingParams) -> list[int]:
    return list(tokens)


@pytest.mark.parametrize("kind", ["chain", "point masses"])
def test_dry_of_the_roots_tokens_alone_fails(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "penalty_window", roots_window)
    assert error("token", proposals(3, 5)[kind], SETTINGS["DRY"]) > 1e-3


def cuts_whole_rounds(
    settings: DecodeSettings,
    state: SamplerState,
    tokens: Sequence[int],
    tree: DraftTree,
    rows: EvaluatedRows,
    noise: NoiseSource,
) -> tuple[Acceptance, SamplerState]:
    """XTC with llama.cpp's procedure, its number drawn once a round."""
    is_cut = noise.accept(settings.params.xtc_probability)
    params = settings.params.replace(xtc_probability=float(is_cut))
    laws = loop.target_laws(tokens, tree, rows, params, state)
    return settings.rule.accept(tree, laws, noise, len(tokens)), state  # type: ignore[arg-type]


def test_xtcs_number_drawn_once_a_round_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a round is a token it is llama.cpp's procedure, and its law is the mixture; where it is
    several, tokens of a round would be cut together."""
    monkeypatch.setattr(loop, "_accept", cuts_whole_rounds)
    assert error("token", None, SETTINGS["XTC"]) < TOLERANCE
    assert error("token", None, SETTINGS["XTC at temperature 0"]) < TOLERANCE
    for kind in ("chain", "point masses"):
        assert error("token", proposals(3, 5)[kind], SETTINGS["XTC"]) > 1e-3


def adaptive_laws(tokens: list[int]) -> AdaptiveLaws:
    """Laws after a chain of drafted tokens, of which 0 is never said."""

    def logits(row: int) -> np.ndarray:
        return np.array([-math.inf, 0.0, 1.0])

    return AdaptiveLaws((), DraftTree.chain(tokens), logits, SETTINGS["mirostat 2"], FRESH)  # type: ignore[arg-type]


def test_rules_may_ask_for_laws_that_no_text_reaches() -> None:
    assert math.isclose(sum(adaptive_laws([0, 1, 0])(2).probs), 1.0)


def test_the_end_of_a_long_chain_may_be_asked_for_first() -> None:
    tokens = [1, 2] * 600
    laws, in_turn = adaptive_laws(tokens), adaptive_laws(tokens)
    last = laws(1199)
    for node in range(1199):
        in_turn(node)
    assert in_turn(1199).probs.tolist() == last.probs.tolist()
