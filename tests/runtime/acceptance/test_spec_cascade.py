"""Speculative cascades: the shipped loop emits exactly the cascade's law, and that law is not the
target's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from support.enumeration import (
    PROMPT,
    TOLERANCE,
    FixedTable,
    Propose,
    bias,
    branching_tree,
    chain,
    emitted_law,
    top_k_points,
)
from support.scripted import PLAIN, LawTable, ScriptedDrafter, TableTarget, conversation_of, law_of

from specrun.bench.prove.rules import BranchingNoise, enumerate_law
from specrun.bindings.errors import OptionError
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.acceptance import (
    CASCADES,
    Acceptance,
    AcceptanceRule,
    ExactRule,
    LawAt,
    SpecCascadeRule,
    build_rule,
    rule_names,
)
from specrun.runtime.drafter import NoDrafter
from specrun.runtime.law import Law
from specrun.runtime.limits import RoundLimits
from specrun.runtime.loop import DecodeSettings, decode_rounds
from specrun.runtime.noise import NoiseSource, SeededNoise
from specrun.runtime.tree import DraftTree

KINDS = list(CASCADES)
ALPHA = {"cascade-chow": 0.4, "cascade-diff": 0.1, "cascade-opt": 0.3, "cascade-token": 0.4}
"""Where, over laws on three tokens, each rule defers at some places and not at others."""


# -- the laws, dense and by the paper's formulas ---------------------------------------------------


def cascade_law(kind: str, q: np.ndarray, p: np.ndarray, alpha: float) -> np.ndarray:
    distance = 0.5 * np.abs(p - q).sum()
    if kind == "cascade-token":
        r = (p < p.max() * (1 - alpha)).astype(float)
        return q * (1 - r) + p * (r * q).sum()
    defers = {
        "cascade-chow": q.max() < 1 - alpha,
        "cascade-diff": q.max() < p.max() - alpha,
        "cascade-opt": q.max() < p.max() - alpha * distance,
    }
    return p if defers[kind] else q


def law_by_formula(
    kind: str, drafts: LawTable, table: LawTable, length: int
) -> dict[tuple[int, ...], float]:
    """Return the law of a text of which every token but the last has a draft at its place, whatever
    was accepted."""
    found = {}
    for text in itertools.product(range(table.size), repeat=length):
        probability = 1.0
        for place, token in enumerate(text):
            prefix = [*PROMPT, *text[:place]]
            p = table(prefix)
            law = p if place == length - 1 else cascade_law(kind, drafts(prefix), p, ALPHA[kind])
            probability *= float(law[token])
        found[text] = probability
    return found


def distance(first: dict, other: dict) -> float:
    return max(abs(first.get(text, 0.0) - other.get(text, 0.0)) for text in {*first, *other})


def error(
    rule: AcceptanceRule,
    kind: str,
    propose: Propose,
    drafts: LawTable,
    table: LawTable,
    length: int,
) -> float:
    return distance(
        emitted_law(rule, propose, table, length, frozenset()),
        law_by_formula(kind, drafts, table, length),
    )


SHAPES: dict[str, Callable[[LawTable], Propose]] = {
    "chain": lambda drafts: chain(drafts, 3),
    "i.i.d. siblings": lambda drafts: branching_tree(drafts, [2, 1], replace=True),
    "without replacement": lambda drafts: branching_tree(drafts, [2, 1], replace=False),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_the_loop_emits_the_cascades_law(kind: str, shape: str, seed: int) -> None:
    drafts, table = LawTable(3, seed + 40), LawTable(3, seed)
    assert (
        error(SpecCascadeRule(kind, ALPHA[kind]), kind, SHAPES[shape](drafts), drafts, table, 3)
        < TOLERANCE
    )


@pytest.mark.parametrize("kind", KINDS)
def test_some_places_are_deferred_and_others_are_not(kind: str) -> None:
    """Else the test above would not see a rule that never, or always, defers."""
    found = set()
    for seed in range(3):
        q, p = LawTable(3, seed + 40), LawTable(3, seed)
        for prefix in ([*PROMPT], *([*PROMPT, token] for token in range(3))):
            law = cascade_law(kind, q(prefix), p(prefix), ALPHA[kind])
            found |= {(np.allclose(law, q(prefix)), np.allclose(law, p(prefix)))}
    # The law of single tokens is between the two.
    assert found >= (
        {(False, False)} if kind == "cascade-token" else {(True, False), (False, True)}
    )


def test_a_short_draft_ends_with_a_token_of_the_targets() -> None:
    """Algorithm 4 by hand for one draft: accepted with pi/q, replaced from what is left of pi, or
    followed by p."""
    drafts, table = FixedTable(0.6, 0.3, 0.1), FixedTable(0.5, 0.1, 0.4)
    pi = cascade_law("cascade-token", drafts(()), table(()), 0.2)

    def program(noise: BranchingNoise) -> tuple[int, ...]:
        tokens: list[int] = []
        while len(tokens) < 3:
            if len(tokens) == 2:  # no room for a draft and the token after it
                tokens.append(noise.choose(law_of(table(()))))
                break
            token = noise.choose(law_of(drafts(())))
            if noise.accept(pi[token] / drafts(())[token]):
                tokens += [token, noise.choose(law_of(table(())))]
            else:
                left = np.maximum(0.0, pi - drafts(()))
                tokens.append(noise.choose(law_of(left / left.sum())))
        return tuple(tokens)

    emitted = emitted_law(
        SpecCascadeRule("cascade-token", 0.2), chain(drafts, 1), table, 3, frozenset()
    )
    assert distance(emitted, enumerate_law(program)) < TOLERANCE  # type: ignore[arg-type]


def test_the_rules_by_hand() -> None:
    q, p = Law(np.array([0.5, 0.4, 0.1])), Law(np.array([0.1, 0.2, 0.7]))  # TV .6
    chosen = {
        (kind, alpha): CASCADES[kind](q, p, alpha)
        for kind in KINDS
        for alpha in (0.0, 0.1, 0.4, 0.55)
    }
    assert [chosen["cascade-chow", alpha] is p for alpha in (0.0, 0.4, 0.55)] == [True, True, False]
    assert [chosen["cascade-diff", alpha] is p for alpha in (0.1, 0.4)] == [
        True,
        False,
    ]  # .5 < .7 - alpha
    assert [chosen["cascade-opt", alpha] is p for alpha in (0.1, 0.4)] == [
        True,
        False,
    ]  # .5 < .7 - .6 alpha
    # Tokens 0 and 1 are deferred, .9 of Q: pi = P .9, and Q's .1 for token 2.
    assert chosen["cascade-token", 0.4].probs == pytest.approx([0.09, 0.18, 0.73])


def test_laws_on_different_tokens_meet() -> None:
    """After truncation each model has tokens of its own."""
    q, p = (
        Law(np.array([0.75, 0.25]), np.array([2, 9])),
        Law(np.array([0.5, 0.5]), np.array([2, 4])),
    )
    law = CASCADES["cascade-token"](q, p, 0.5)
    assert law.ids is not None
    assert (law.ids.tolist(), law.probs.tolist()) == ([2, 4, 9], [0.875, 0.125, 0.0])
    assert CASCADES["cascade-opt"](q, p, 1.0) is q
    assert CASCADES["cascade-opt"](p, q, 0.3) is q  # .5 < .75 - .3 * .5
    assert CASCADES["cascade-opt"](p, q, 0.6) is p


# -- what it costs, and where it costs nothing -----------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_law_is_not_the_targets(kind: str) -> None:
    drafts, table = LawTable(3, 41), LawTable(3, 1)
    assert bias(ExactRule(), chain(drafts, 2), table, 3) < TOLERANCE
    assert (
        max(
            bias(SpecCascadeRule(kind, 0.5), chain(LawTable(3, 40 + n), 2), table, 3)
            for n in range(4)
        )
        > 0.02
    )


@pytest.mark.parametrize(
    ("kind", "alpha", "of_drafter"), [("cascade-chow", 0.0, False), ("cascade-chow", 1.0, True)]
)
def test_the_ends_of_the_scale(kind: str, alpha: float, of_drafter: bool) -> None:
    """Chow's rule with 0 always defers, the target's law; with 1 never, and every draft is kept."""
    drafts, table = LawTable(3, 42), LawTable(3, 2)
    emitted = emitted_law(SpecCascadeRule(kind, alpha), chain(drafts, 3), table, 3, frozenset())
    wanted = {}
    for text in itertools.product(range(3), repeat=3):
        laws = [(drafts if of_drafter and i < 2 else table)([*PROMPT, *text[:i]]) for i in range(3)]
        wanted[text] = float(np.prod([law[token] for law, token in zip(laws, text, strict=True)]))
    assert distance(emitted, wanted) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_favourites_are_verified_exactly(kind: str) -> None:
    drafts, table = LawTable(3, 43), LawTable(3, 3)
    assert bias(SpecCascadeRule(kind, 0.5), top_k_points(drafts, 2, 2), table, 3) < TOLERANCE


CUTS = {"top-p": PLAIN.replace(top_p=0.9), "min-p": PLAIN.replace(min_p=0.1)}
"""Each leaves a target of .97 and .03 one token."""
SURE = {0: FixedTable(0.97, 0.03), 1: FixedTable(0.03, 0.97)}
LEANS = FixedTable(0.95, 0.05)


def first_token(rule: AcceptanceRule, sure_of: int, params: SamplingParams) -> np.ndarray:
    """The law of the first of two tokens, drafted from (.95, .05): the second is the target's."""
    texts = emitted_law(rule, chain(LEANS, 1), SURE[sure_of], 2, frozenset(), params)
    assert {text[1] for text in texts} == {sure_of}
    return np.array([texts.get((token, sure_of), 0.0) for token in range(2)])


class SureTargetsStay(SpecCascadeRule):
    """Keeps a target of one token as temperature 0 would, whatever made it so."""

    def _law(self, tree: DraftTree, node: int, target: Law) -> Law:
        return target if len(target.probs) == 1 else super()._law(tree, node, target)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_target_that_truncation_leaves_one_token_is_traded_as_any_other(
    kind: str, cut: str
) -> None:
    errors: dict[type[SpecCascadeRule], list[float]] = {SpecCascadeRule: [], SureTargetsStay: []}
    for alpha, sure_of in itertools.product((0.1, 1.0), SURE):
        pi = cascade_law(kind, LEANS(()), np.eye(2)[sure_of], alpha)
        for rule, found in errors.items():
            emitted = first_token(rule(kind, alpha), sure_of, CUTS[cut])
            found.append(float(np.abs(emitted - pi).max()))
    assert max(errors[SpecCascadeRule]) < TOLERANCE
    assert max(errors[SureTargetsStay]) > 0.04  # Chow's: token 1 has .05 by the formula, and got 0


@pytest.mark.parametrize("sure_of", SURE)
@pytest.mark.parametrize("kind", KINDS)
def test_at_temperature_0_nothing_is_traded_whatever_was_drafted(kind: str, sure_of: int) -> None:
    """Even where a drafter draws from a law of its own, and the rule would keep every draft."""
    greedy = PLAIN.replace(temperature=0.0)
    emitted = first_token(SpecCascadeRule(kind, 1.0), sure_of, greedy)
    assert emitted.tolist() == np.eye(2)[sure_of].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_at_temperature_0_the_text_is_plain_decodings(kind: str) -> None:
    def text(propose: Propose | None) -> list[int]:
        drafter = NoDrafter() if propose is None else ScriptedDrafter(propose)
        limits = RoundLimits(n_ctx=64, max_nodes=32, max_tokens=20)
        conversation = conversation_of(drafter, PROMPT, SeededNoise(0))
        settings = DecodeSettings(
            SpecCascadeRule(kind, 0.9), SamplingParams(temperature=0.0), limits
        )
        list(decode_rounds(TableTarget(LawTable(3, 4)), conversation, settings))
        return conversation.tokens

    assert text(chain(LawTable(3, 44), 3)) == text(None)


# -- what must not pass ----------------------------------------------------------------------------


class AcceptsAgainstTheTarget(SpecCascadeRule):
    """Forgets the cascade."""

    def accept(
        self, tree: DraftTree, law_at: LawAt, noise: NoiseSource, position: int
    ) -> Acceptance:
        return ExactRule().accept(tree, law_at, noise, position)


class ReplacesFromTheTarget(SpecCascadeRule):
    """Accepts with pi / q, but after a rejection draws from what is left of the target's law."""

    def accept(
        self, tree: DraftTree, law_at: LawAt, noise: NoiseSource, position: int
    ) -> Acceptance:
        path: list[int] = []
        node = -1
        while draws := tree.draws.get(node, ()):
            draft, target = draws[0].law, law_at(node)
            token = tree.tokens[draws[0].node]
            assert draft is not None
            if not noise.accept(
                self._law(tree, node, target).probability(token) / draft.probability(token)
            ):
                return Acceptance(tuple(path), noise.choose(target.residual(draft)), True)
            node = draws[0].node
            path.append(node)
        return Acceptance(tuple(path), noise.choose(law_at(node)), False)


class DefersTheOtherWay(SpecCascadeRule):
    """Takes the drafter's law where the target's is due."""

    def _law(self, tree: DraftTree, node: int, target: Law) -> Law:
        draws: Sequence = tree.draws.get(node, ())
        if not draws:
            return target
        return target if super()._law(tree, node, target) is not target else draws[0].law


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        (AcceptsAgainstTheTarget, "cascade-opt"),
        (AcceptsAgainstTheTarget, "cascade-token"),
        (ReplacesFromTheTarget, "cascade-token"),
        (DefersTheOtherWay, "cascade-diff"),
        (DefersTheOtherWay, "cascade-chow"),
    ],
)
def test_wrong_rules_are_caught(wrong: type[SpecCascadeRule], kind: str) -> None:
    errors = []
    for seed in range(4):
        drafts, table = LawTable(3, seed + 40), LawTable(3, seed)
        errors.append(error(wrong(kind, ALPHA[kind]), kind, chain(drafts, 3), drafts, table, 3))
    assert max(errors) > 1e-2


# -- from its name to the mark ---------------------------------------------------------------------


def test_the_rules_are_built_by_name() -> None:
    assert set(KINDS) <= set(rule_names())
    rule = build_rule("cascade-opt")
    assert (rule.name, rule.exact) == ("cascade-opt(alpha=0.1)", False)
    assert build_rule("cascade-token(alpha=.25)").name == "cascade-token(alpha=0.25)"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("cascade-opt(alpha=-0.1)", "cascade-opt: alpha is -0.1: give 0 to 1"),
        ("cascade-diff(alpha=1.5)", "alpha is 1.5"),
        ("cascade-chow(alpha=nan)", "alpha is nan"),
        ("cascade-chow(alpha=x)", "'x', which is not a number"),
        ("cascade-opt(beta=.1)", "beta"),
        ("cascade-opt(0.1)", "unnamed arguments"),
        ("cascade-best", "did you mean 'cascade-"),
    ],
)
def test_values_that_make_no_sense_are_refused(text: str, problem: str) -> None:
    with pytest.raises(OptionError, match=problem):
        build_rule(text)


def test_statistics_say_that_it_is_not_exact(tiny_model: Path) -> None:
    drafter = f'draft("{tiny_model}", n=3)'
    with Runtime(
        tiny_model, drafter=drafter, accept="cascade-diff", n_ctx=256, n_threads=1
    ) as runtime:
        stats = runtime.generate([5, 6, 7], SamplingParams(seed=1), max_tokens=8).stats.to_dict()
    assert (stats["rule"], stats["exact"]) == ("cascade-diff(alpha=0.1)", False)
