"""Invariant 1: every exact rule, run through the shipped loop, gives the target's law to 1e-12.

The loop runs under a noise source that enumerates every outcome with its probability, so nothing here is
sampled: a bias of one part in a million million fails. Known wrong variants run through the same test and
must fail it, which is what shows that the test can see a bias.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from branching import BranchingNoise, enumerate_law
from scripted import PLAIN, LawTable, ScriptedDrafter, TableTarget, law_of

from specrun.runtime.acceptance.build import build_rule, rule_names
from specrun.runtime.acceptance.exact import ExactRule
from specrun.runtime.acceptance.rule import Acceptance, AcceptanceRule, LawAt
from specrun.runtime.drafters.drafter import DraftRequest, NoDrafter
from specrun.runtime.law import Law
from specrun.runtime.loop import decode_rounds
from specrun.runtime.noise import NoiseSource
from specrun.runtime.planning.limits import RoundLimits
from specrun.runtime.tree import ROOT, DraftTree, TreeBuilder

PROMPT = (0, 1)
TOLERANCE = 1e-12
Propose = Callable[[DraftRequest], DraftTree]


# -- drafters: every kind of tree -------------------------------------------------------------------------


def chain(drafts: LawTable, length: int) -> Propose:
    """A chain of draws, each from the draft law of its own prefix."""

    def propose(request: DraftRequest) -> DraftTree:
        tree, prefix, parent = TreeBuilder(), list(request.tokens), ROOT
        for _ in range(min(length, request.max_depth)):
            law = law_of(drafts(prefix))
            token = request.noise.choose(law)
            parent = tree.add(parent, token, law)
            prefix.append(token)
        return tree.build()

    return propose


def branching_tree(drafts: LawTable, widths: Sequence[int], replace: bool) -> Propose:
    """SpecInfer's i.i.d. siblings, or Sequoia's draws without replacement."""

    def propose(request: DraftRequest) -> DraftTree:
        tree = TreeBuilder()
        grow(tree, ROOT, list(request.tokens), 0, request)
        return tree.build()

    def grow(tree: TreeBuilder, parent: int, prefix: list[int], depth: int, request: DraftRequest) -> None:
        if depth >= min(len(widths), request.max_depth):
            return
        law = law_of(drafts(prefix))
        children: dict[int, int] = {}
        for _ in range(widths[depth]):
            token = request.noise.choose(law)
            children[tree.add(parent, token, law)] = token
            if not replace:
                if len(np.flatnonzero(law.probs)) == 1:
                    break
                law = law.without(token)
        for node, token in children.items():
            grow(tree, node, [*prefix, token], depth + 1, request)

    return propose


def top_k_points(drafts: LawTable, k: int, depth: int) -> Propose:
    """Medusa's and EAGLE-2's trees: the most likely words as point masses."""

    def propose(request: DraftRequest) -> DraftTree:
        tree = TreeBuilder()
        frontier = [(ROOT, list(request.tokens))]
        for _ in range(min(depth, request.max_depth)):
            frontier = [
                (tree.add(parent, int(token)), [*prefix, int(token)])
                for parent, prefix in frontier
                for token in np.argsort(-drafts(prefix))[:k]
            ]
        return tree.build()

    return propose


def mixed_tree(drafts: LawTable, seed: int) -> Propose:
    """Arbitrary trees: point masses between draws of several laws, duplicates, hidden nodes, zero masses.

    The shape depends on the prefix only, never on what was drawn beside it.
    """

    def propose(request: DraftRequest) -> DraftTree:
        generator = np.random.default_rng([seed, *request.tokens])
        tree = TreeBuilder()
        size = drafts.size
        other = LawTable(size, seed + 77)
        parents = [(ROOT, list(request.tokens))]
        for _ in range(min(2, request.max_depth)):
            parent, prefix = parents[0]
            parents = []
            for _ in range(int(generator.integers(1, 4))):
                kind = int(generator.integers(4))
                if kind == 0:
                    token = int(generator.integers(size))
                    node = tree.add(parent, token)
                elif kind == 1:
                    tree.add_hidden(parent, int(generator.integers(size)))
                    continue
                else:
                    probs = (drafts if kind == 2 else other)(prefix)
                    law = Law(probs) if generator.random() < 0.5 else law_of(probs)
                    token = request.noise.choose(law)
                    node = tree.add(parent, token, law)
                parents.append((node, [*prefix, token]))
            if not parents:
                break
        return tree.build()

    return propose


# -- the test itself ---------------------------------------------------------------------------------------


def emitted_law(
    rule: AcceptanceRule, propose: Propose | None, table: LawTable, length: int, end_tokens: frozenset[int]
) -> dict[tuple[int, ...], float]:
    """Return the exact law of what the shipped loop emits after the prompt."""

    def program(noise: BranchingNoise) -> tuple[int, ...]:
        tokens = list(PROMPT)
        drafter = NoDrafter() if propose is None else ScriptedDrafter(propose)
        limits = RoundLimits(n_ctx=64, max_nodes=32, max_tokens=length)
        target = TableTarget(table, PROMPT)
        for _ in decode_rounds(target, drafter, rule, noise, PLAIN, tokens, limits, end_tokens):
            pass
        return tuple(tokens[len(PROMPT) :])

    return enumerate_law(program)


def target_law(table: LawTable, length: int, end_tokens: frozenset[int]) -> dict[tuple[int, ...], float]:
    """Return the product of the target's conditional laws, texts ending at the first end token."""
    laws = {(): 1.0}
    for _ in range(length):
        longer: dict[tuple[int, ...], float] = {}
        for text, probability in laws.items():
            if text and text[-1] in end_tokens:
                longer[text] = probability
                continue
            for token, conditional in enumerate(table([*PROMPT, *text])):
                if conditional:
                    longer[*text, token] = probability * conditional
        laws = longer
    return laws


def bias(
    rule: AcceptanceRule,
    propose: Propose | None,
    table: LawTable,
    length: int = 3,
    end_tokens: frozenset[int] = frozenset(),
) -> float:
    """Return the largest error of any text's probability."""
    emitted = emitted_law(rule, propose, table, length, end_tokens)
    wanted = target_law(table, length, end_tokens)
    return max(abs(emitted.get(text, 0.0) - wanted.get(text, 0.0)) for text in {*emitted, *wanted})


def proposals(size: int, seed: int) -> dict[str, Propose | None]:
    drafts = LawTable(size, seed + 1000)
    return {
        "plain": None,
        "chain": chain(drafts, 2),
        "i.i.d. siblings": branching_tree(drafts, (3, 1), True),
        "without replacement": branching_tree(drafts, (2, 2), False),
        "point masses": top_k_points(drafts, 2, 2),
        "mixed": mixed_tree(drafts, seed),
    }


@pytest.mark.parametrize("name", list(proposals(3, 0)))
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rule", [name for name in rule_names() if build_rule(name).exact])
def test_exact_rules_give_the_targets_law(rule: str, name: str, seed: int) -> None:
    length = 2 if name in ("without replacement", "i.i.d. siblings") else 3
    assert bias(build_rule(rule), proposals(3, seed)[name], LawTable(3, seed), length) < TOLERANCE


@pytest.mark.parametrize("seed", range(12))
def test_arbitrary_trees_give_the_targets_law(seed: int) -> None:
    assert bias(ExactRule(), mixed_tree(LawTable(4, seed + 50), seed), LawTable(4, seed), length=2) < TOLERANCE


@pytest.mark.parametrize("name", ["chain", "point masses", "mixed"])
def test_an_end_token_inside_an_accepted_path_ends_the_text(name: str) -> None:
    assert bias(ExactRule(), proposals(3, 5)[name], LawTable(3, 5), 3, frozenset({2})) < TOLERANCE


def test_a_drafter_that_equals_its_target_is_always_accepted() -> None:
    table = LawTable(3, 1)

    def program(noise: BranchingNoise) -> int:
        tokens = list(PROMPT)
        limits = RoundLimits(n_ctx=64, max_nodes=32, max_tokens=3)
        drafter = ScriptedDrafter(chain(table, 2))
        rounds = decode_rounds(
            TableTarget(table, PROMPT), drafter, ExactRule(), noise, PLAIN, tokens, limits, frozenset()
        )
        return len(next(rounds).path)

    assert enumerate_law(program) == pytest.approx({2: 1.0})


# -- negative controls: what must not pass -----------------------------------------------------------------


class DropsDuplicates(ExactRule):
    """Tests every child once, however often it was drawn."""

    def accept(self, tree: DraftTree, law_at: LawAt, noise: NoiseSource, position: int) -> Acceptance:
        draws = {
            parent: tuple({draw.node: draw for draw in reversed(draws)}.values())[::-1]
            for parent, draws in tree.draws.items()
        }
        trimmed = DraftTree(tree.tokens, tree.parents, tree.depths, tree.is_candidate, draws)
        return super().accept(trimmed, law_at, noise, position)


class ForgetsTheResidual(ExactRule):
    """Draws from the target's law, not from the residual, after a rejection."""

    def accept(self, tree: DraftTree, law_at: LawAt, noise: NoiseSource, position: int) -> Acceptance:
        path: list[int] = []
        node = ROOT
        while True:
            law = law_at(node)
            for draw in tree.draws.get(node, ()):
                token = tree.tokens[draw.node]
                chance = law.probability(token) / (draw.law.probability(token) if draw.law else 1.0)
                if noise.accept(min(1.0, chance)):
                    path.append(draw.node)
                    node = draw.node
                    break
            else:
                return Acceptance(tuple(path), noise.choose(law), True)


class TakesDrawsForPointMasses(ExactRule):
    """Accepts a drawn token with the target's probability and then removes it (sampled drafts as points)."""

    def accept(self, tree: DraftTree, law_at: LawAt, noise: NoiseSource, position: int) -> Acceptance:
        draws = {parent: tuple(type(draw)(draw.node) for draw in draws) for parent, draws in tree.draws.items()}
        points = DraftTree(tree.tokens, tree.parents, tree.depths, tree.is_candidate, draws)
        return super().accept(points, law_at, noise, position)


def sorted_siblings(drafts: LawTable) -> Propose:
    """Re-sorts sampled siblings by their own probability: which is tested first depends on its value."""

    def propose(request: DraftRequest) -> DraftTree:
        if request.max_depth < 1:
            return DraftTree()
        law = law_of(drafts(request.tokens))
        tokens = sorted((request.noise.choose(law) for _ in range(2)), key=law.probability)
        tree = TreeBuilder()
        for token in tokens:
            tree.add(ROOT, token, law)
        return tree.build()

    return propose


def pruned_siblings(drafts: LawTable) -> Propose:
    """Keeps only the likelier of two sampled children."""

    def propose(request: DraftRequest) -> DraftTree:
        if request.max_depth < 1:
            return DraftTree()
        law = law_of(drafts(request.tokens))
        tokens = [request.noise.choose(law) for _ in range(2)]
        tree = TreeBuilder()
        tree.add(ROOT, max(tokens, key=law.probability), law)
        return tree.build()

    return propose


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        (DropsDuplicates(), "i.i.d. siblings"),
        (ForgetsTheResidual(), "chain"),
        (ForgetsTheResidual(), "point masses"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_wrong_rules_are_caught(rule: AcceptanceRule, name: str) -> None:
    assert bias(rule, proposals(3, 2)[name], LawTable(3, 2), 2) > 1e-3


@pytest.mark.parametrize("wrong", [sorted_siblings, pruned_siblings], ids=lambda one: one.__name__)
def test_wrong_drafters_are_caught(wrong: Callable[[LawTable], Propose]) -> None:
    biases = [bias(ExactRule(), wrong(LawTable(3, seed + 9, 0.0)), LawTable(3, seed, 0.0), 2) for seed in range(4)]
    assert max(biases) > 1e-2


def test_a_draw_that_is_not_from_its_stated_law_is_caught() -> None:
    """The stored law must be the one the token was drawn from: a drafter that lies biases the text."""
    drafts = LawTable(3, 21, 0.0)

    def propose(request: DraftRequest) -> DraftTree:
        tree = TreeBuilder()
        if request.max_depth < 1:
            return tree.build()
        token = request.noise.choose(law_of(drafts(request.tokens)))
        tree.add(ROOT, token, Law(np.full(3, 1 / 3)))
        return tree.build()

    assert bias(ExactRule(), propose, LawTable(3, 3, 0.0), 2) > 1e-2


def test_a_sampled_draft_taken_for_a_point_mass_is_exact_but_accepts_less() -> None:
    """Sample-and-match is unbiased; what it loses is acceptance, which min(1, p/q) keeps."""
    table, drafts = LawTable(3, 8, 0.0), LawTable(3, 9, 0.0)
    propose = chain(drafts, 1)
    assert bias(TakesDrawsForPointMasses(), propose, table, 2) < TOLERANCE

    def accepted(rule: AcceptanceRule) -> float:
        def program(noise: BranchingNoise) -> int:
            tokens = list(PROMPT)
            limits = RoundLimits(n_ctx=64, max_nodes=8, max_tokens=2)
            target = TableTarget(table, PROMPT)
            drafter = ScriptedDrafter(propose)
            rounds = decode_rounds(target, drafter, rule, noise, PLAIN, tokens, limits, frozenset())
            return len(next(rounds).path)

        return enumerate_law(program).get(1, 0.0)

    target_probs, draft_probs = table(PROMPT), drafts(PROMPT)
    assert accepted(ExactRule()) == pytest.approx(np.minimum(target_probs, draft_probs).sum(), abs=1e-12)
    assert accepted(TakesDrawsForPointMasses()) == pytest.approx((target_probs * draft_probs).sum(), abs=1e-12)


def test_the_enumeration_itself_is_complete() -> None:
    """A program of two coins and a die has the product law, and every outcome once."""

    def program(noise: BranchingNoise) -> tuple[bool, int, bool]:
        first = noise.accept(0.25)
        return first, noise.choose(Law(np.array([0.5, 0.0, 0.5]))), noise.accept(0.5)

    wanted = {
        (a, b, c): (0.25 if a else 0.75) * 0.5 * 0.5
        for a, b, c in itertools.product((True, False), (0, 2), (True, False))
    }
    assert enumerate_law(program) == pytest.approx(wanted)
