"""Typical acceptance: the shipped loop computes the law that the formula says, and that law is not
the target's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from support.enumeration import (
    PROMPT,
    TOLERANCE,
    FixedTable,
    Propose,
    bias,
    chain,
    emitted_law,
    numbers_used,
    proposals,
    top_k_points,
)
from support.scripted import PLAIN, LawTable, ScriptedDrafter, TableTarget, conversation_of, law_of

from specrun.bench.prove.rules import BranchingNoise, enumerate_law
from specrun.bindings.errors import OptionError
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.acceptance import (
    Acceptance,
    AcceptanceRule,
    ExactRule,
    LawAt,
    TypicalRule,
    build_rule,
    rule_names,
    typical_threshold,
)
from specrun.runtime.laws import Law, NoiseSource, SeededNoise
from specrun.runtime.round import DraftRequest, NoDrafter
from specrun.runtime.round.loop import DecodeSettings, RoundLimits, decode_rounds
from specrun.runtime.trees import ROOT, DraftTree, TreeBuilder

EPS, DELTA = 0.3, 0.5  # of the order of laws over three tokens, so that both thresholds are at work
KINDS = ["chain", "i.i.d. siblings", "without replacement", "point masses", "mixed", "two drafters"]


# -- the formula, by brute force over all paths ----------------------------------------------------


def typical(probs: np.ndarray, token: int, eps: float, delta: float) -> bool:
    entropy = -sum(p * math.log(p) for p in probs.tolist() if p > 0.0)
    return bool(probs[token] >= min(eps, delta * math.exp(-entropy)))


def longest_typical_path(
    tree: DraftTree, table: LawTable, prefix: Sequence[int], eps: float, delta: float
) -> list[int]:
    """Every node is the end of a candidate path: keep those that are typical throughout, then the
    best of them."""
    best: tuple[int, float, int, list[int]] = (0, 0.0, 1, [])
    for node in range(len(tree)):
        path = tree.path_to(node)
        tokens = [tree.tokens[ancestor] for ancestor in path]
        laws = [table([*prefix, *tokens[:index]]) for index in range(len(path))]
        fits = all(typical(law, token, eps, delta) for law, token in zip(laws, tokens, strict=True))
        if fits and all(tree.is_candidate[ancestor] for ancestor in path):
            likelihood = sum(math.log(law[token]) for law, token in zip(laws, tokens, strict=True))
            best = max(best, (len(path), likelihood, -node, path), key=lambda entry: entry[:3])
    return best[3]


def law_by_formula(
    propose: Propose, table: LawTable, length: int, eps: float = EPS, delta: float = DELTA
) -> dict[tuple[int, ...], float]:
    """Return the law of a text of rounds that keep the longest typical path and then draw from the
    target."""

    def program(noise: BranchingNoise) -> tuple[int, ...]:
        tokens = list(PROMPT)
        while (left := length - (len(tokens) - len(PROMPT))) > 0:
            tree = propose(DraftRequest(tokens, PLAIN, noise, left - 1, 32))
            path = longest_typical_path(tree, table, tokens, eps, delta)
            tokens += [tree.tokens[node] for node in path]
            tokens.append(noise.choose(law_of(table(tokens))))
        return tuple(tokens[len(PROMPT) :])

    return enumerate_law(program)  # type: ignore[return-value]


def error(rule: AcceptanceRule, propose: Propose, table: LawTable, length: int) -> float:
    """Return how far the shipped loop's law is from the formula's."""
    emitted = emitted_law(rule, propose, table, length, frozenset())
    wanted = law_by_formula(propose, table, length)
    return max(abs(emitted.get(text, 0.0) - wanted.get(text, 0.0)) for text in {*emitted, *wanted})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_the_loop_computes_the_law_of_the_formula(kind: str, seed: int) -> None:
    propose = proposals(3, seed)[kind]
    assert propose is not None
    length = 2 if kind in ("i.i.d. siblings", "without replacement", "two drafters") else 3
    assert error(TypicalRule(EPS, DELTA), propose, LawTable(3, seed), length) < TOLERANCE


def test_the_law_is_not_the_targets() -> None:
    """What the mark says: the same enumeration that shows exactness shows how far this rule is from
    it."""
    propose, table = top_k_points(LawTable(3, 11), 2, 2), LawTable(3, 1, zeros=0.0)
    assert bias(ExactRule(), propose, table, 3) < TOLERANCE
    assert bias(TypicalRule(EPS, DELTA), propose, table, 3) > 0.05
    assert bias(TypicalRule(), chain(LawTable(3, 11), 2), table, 3) > 0.05


def test_a_case_by_hand() -> None:
    """P = (.5, .3, .2), entropy 1.0297 nats: with eps .09 all three are typical, so the draft is
    the text."""
    table = FixedTable(0.5, 0.3, 0.2)
    law = Law(table(()))
    assert typical_threshold(law, 0.09, 0.3) == 0.09
    assert typical_threshold(law, 1.0, 0.3) == pytest.approx(0.3 * math.exp(-1.02965), abs=1e-5)
    assert typical_threshold(Law.point(3), 0.09, 0.3) == 0.09
    propose = top_k_points(FixedTable(0.0, 0.0, 1.0), 1, 1)  # always drafts token 2
    emitted = emitted_law(TypicalRule(), propose, table, 2, frozenset())
    assert emitted == pytest.approx({(2, 0): 0.5, (2, 1): 0.3, (2, 2): 0.2})


def test_of_equally_long_paths_the_likelier_is_kept_and_of_equal_ones_the_first() -> None:
    builder = TreeBuilder()
    for token in range(3):
        builder.add(ROOT, token)
    for probs, kept in (((0.4, 0.5, 0.1), (1,)), ((0.4, 0.2, 0.4), (0,)), ((0.2, 0.3, 0.5), (2,))):
        law = Law(np.array(probs))
        assert (
            TypicalRule().accept(builder.build(), lambda _, law=law: law, SeededNoise(0), 0).path
            == kept
        )


def test_laws_are_computed_only_where_a_path_leads() -> None:
    """A law costs a pass over the vocabulary: none below a token that is not typical, none
    twice."""
    asked: list[int] = []

    def law_at(node: int) -> Law:
        asked.append(node)
        return Law(np.array([0.97, 0.01, 0.02]))

    builder = TreeBuilder()
    first, second = builder.add(ROOT, 1), builder.add(ROOT, 0)
    builder.add(first, 0)
    below = builder.add(second, 0)
    assert TypicalRule().accept(builder.build(), law_at, SeededNoise(0), 0).path == (second, below)
    assert sorted(asked) == [ROOT, second, below]


@pytest.mark.parametrize("seed", range(4))
def test_at_temperature_0_the_text_is_plain_decodings(seed: int) -> None:
    def text(propose: Propose | None) -> list[int]:
        drafter = NoDrafter() if propose is None else ScriptedDrafter(propose)
        limits = RoundLimits(n_ctx=64, max_nodes=32, max_tokens=20)
        conversation = conversation_of(drafter, PROMPT, SeededNoise(0))
        settings = DecodeSettings(TypicalRule(), SamplingParams(temperature=0.0), limits)
        list(decode_rounds(TableTarget(LawTable(3, seed)), conversation, settings))
        return conversation.tokens

    assert (
        text(top_k_points(LawTable(3, seed), 2, 3))
        == text(top_k_points(LawTable(3, seed + 9), 1, 2))
        == text(None)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_no_number_decides_twice(kind: str) -> None:
    for seed in range(3):
        used = numbers_used(TypicalRule(), proposals(3, seed)[kind], seed)
        assert len(used) == len(set(used)) > 0


# -- what must not pass ----------------------------------------------------------------------------


class KeepsTheLikeliestChild(TypicalRule):
    """Walks down by the likeliest typical child, which need not lead to the longest path."""

    def accept(
        self, tree: DraftTree, law_at: LawAt, noise: NoiseSource, position: int
    ) -> Acceptance:
        path: list[int] = []
        node = ROOT
        while True:
            law = law_at(node)
            least = typical_threshold(law, self.eps, self.delta)
            children = {
                draw.node: law.probability(tree.tokens[draw.node])
                for draw in tree.draws.get(node, ())
            }
            best = max(children, key=children.__getitem__, default=None)
            if best is None or children[best] < least:
                return Acceptance(tuple(path), noise.choose(law), bool(children))
            path.append(best)
            node = best


class DrawsFromTheResidual(TypicalRule):
    """Removes what was not typical from the law of the next token, as exact rules do."""

    def accept(
        self, tree: DraftTree, law_at: LawAt, noise: NoiseSource, position: int
    ) -> Acceptance:
        kept = super().accept(tree, law_at, SeededNoise(0), position)
        last = kept.path[-1] if kept.path else ROOT
        law = law_at(last)
        for draw in tree.draws.get(last, ()):
            law = law.without(tree.tokens[draw.node])
        return Acceptance(kept.path, noise.choose(law), kept.rejected)


class HardThreshold(TypicalRule):
    """Forgets the threshold that falls with the entropy: a delta so large that eps is always the
    smaller one."""

    def __init__(self, eps: float, delta: float) -> None:
        super().__init__(eps, 1.0)
        self.delta = 1e9


def one_token(drafts: LawTable) -> Propose:
    return top_k_points(drafts, 1, 2)


def ragged(drafts: LawTable) -> Propose:
    """Only the less likely token has a child, so that the longest path is not the likeliest
    child's."""

    def propose(request: DraftRequest) -> DraftTree:
        builder = TreeBuilder()
        if request.max_depth >= 1:
            order = np.argsort(-drafts(request.tokens)).tolist()
            builder.add(ROOT, order[0])
            second = builder.add(ROOT, order[1])
            if request.max_depth >= 2:
                for token in range(3):
                    builder.add(second, token)
        return builder.build()

    return propose


@pytest.mark.parametrize(
    ("wrong", "propose"),
    [
        (KeepsTheLikeliestChild, ragged),
        (DrawsFromTheResidual, one_token),
        (HardThreshold, one_token),
    ],
)
def test_wrong_rules_are_caught(wrong: type[TypicalRule], propose: type[Propose]) -> None:
    errors = [
        error(
            wrong(EPS, DELTA), propose(LawTable(3, seed + 30, 0.0)), LawTable(3, seed, 0.0, 0.7), 3
        )  # type: ignore[call-arg]
        for seed in range(6)
    ]
    assert max(errors) > 1e-2


# -- from its name to the mark ---------------------------------------------------------------------


def test_the_rule_is_built_by_name_with_its_values() -> None:
    assert "typical" in rule_names()
    rule = build_rule("typical")
    assert (rule.name, rule.exact) == ("typical(eps=0.09, delta=0.3)", False)
    assert build_rule("typical(delta=0.5, eps=.25)").name == "typical(eps=0.25, delta=0.5)"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("typical(eps=0)", "eps is 0: give more than 0 and at most 1"),
        ("typical(eps=1.5)", "eps is 1.5"),
        ("typical(eps=nan)", "eps is nan"),
        ("typical(delta=-1)", "delta is -1"),
        ("typical(delta=x)", "'x', which is not a number"),
        ("typical(epsilon=.1)", "did you mean 'eps'"),
        ("typical(0.09)", "unnamed arguments"),
        ("typicle", "did you mean 'typical'"),
        ("typical@2", "did you mean 'typical'"),
    ],
)
def test_values_that_make_no_sense_are_refused(text: str, problem: str) -> None:
    with pytest.raises(OptionError, match=problem):
        build_rule(text)


def test_statistics_say_that_it_is_not_exact(tiny_model: Path) -> None:
    with Runtime(
        tiny_model, drafter="prompt-lookup", accept="typical(eps=0.2)", n_ctx=256, n_threads=1
    ) as runtime:
        stats = runtime.generate(
            [5, 6, 7, 5, 6, 7, 5, 6], SamplingParams(seed=1), max_tokens=8
        ).stats.to_dict()
    assert (stats["rule"], stats["exact"]) == ("typical(eps=0.2, delta=0.3)", False)
