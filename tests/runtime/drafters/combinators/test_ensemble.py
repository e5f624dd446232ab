"""Several drafters merged: exact for any members, every draw kept, members told of what was not
their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.enumeration import PROMPT, TOLERANCE, Propose, bias
from support.scripted import PLAIN, LawTable, ScriptedDrafter, TableRows, law_of
from support.tree_laws import Grow, dynamic, fixed

from specrun.bindings.errors import OptionError
from specrun.runtime.acceptance import ExactRule
from specrun.runtime.drafters.combinators import EnsembleDrafter, merge_trees
from specrun.runtime.laws import Law, SeededNoise
from specrun.runtime.round import Drafter, DraftRequest, NoDrafter
from specrun.runtime.round.drafter import RoundOutcome
from specrun.runtime.trees import ROOT, DraftTree, DynamicShape, TreeBuilder, parse_topology

member = partial(ScriptedDrafter, max_nodes=8)


def together(*proposers: Grow) -> Propose:
    return lambda request: EnsembleDrafter([member(proposer) for proposer in proposers]).propose(
        request
    )


def hidden(request: DraftRequest) -> DraftTree:
    """A window that is only reported back, and a point mass below the root."""
    tree = TreeBuilder()
    if request.max_nodes >= 3 and request.max_depth >= 2:
        below = tree.add_hidden(ROOT, 0)
        tree.add_hidden(below, 1)
        tree.add(ROOT, 1)
    return tree.build()


def proposers(seed: int) -> dict[str, Grow]:
    a, b = LawTable(3, seed + 100), LawTable(3, seed + 200)
    return {
        "chain": fixed(a, parse_topology("1x1"), "with"),
        "other chain": fixed(b, parse_topology("1x1"), "without"),
        "siblings": fixed(b, parse_topology("2"), "without"),
        "i.i.d.": fixed(a, parse_topology("2"), "with"),
        "points": fixed(b, parse_topology("1x2"), "argmax"),
        "dynamic": dynamic(a, DynamicShape(2, 2, 3)),
        "hidden": hidden,
    }


@pytest.mark.parametrize(
    "names",
    [
        ("chain", "chain"),
        ("chain", "other chain"),
        ("siblings", "i.i.d."),
        ("points", "siblings"),
        ("siblings", "points"),
        ("dynamic", "chain"),
        ("hidden", "siblings", "points"),
    ],
)
@pytest.mark.parametrize("seed", range(2))
def test_ensembles_give_the_targets_law(names: tuple[str, ...], seed: int) -> None:
    propose = together(*(proposers(seed)[name] for name in names))
    assert bias(ExactRule(), propose, LawTable(3, seed), 2) < TOLERANCE


@settings(max_examples=40, derandomize=True, deadline=None, database=None)
@given(st.lists(st.sampled_from(list(proposers(0))), min_size=2, max_size=3), st.integers(0, 10**6))
def test_any_ensemble_gives_the_targets_law(names: list[str], seed: int) -> None:
    propose = together(*(proposers(seed)[name] for name in names))
    assert bias(ExactRule(), propose, LawTable(3, seed), 2) < TOLERANCE


def test_merged_draws_reduced_to_one_are_caught() -> None:
    def propose(request: DraftRequest) -> DraftTree:
        merged = together(proposers(0)["chain"], proposers(0)["i.i.d."])(request)
        draws = {
            parent: tuple({draw.node: draw for draw in reversed(all_draws)}.values())[::-1]
            for parent, all_draws in merged.draws.items()
        }
        return DraftTree(merged.tokens, merged.parents, merged.depths, merged.is_candidate, draws)

    assert max(bias(ExactRule(), propose, LawTable(3, seed, 0.0), 2) for seed in range(4)) > 1e-2


def test_a_member_that_looks_at_anothers_draws_is_caught() -> None:
    """b drafts only what a did not: its law given a's draw is no longer the one it states."""

    def propose(request: DraftRequest) -> DraftTree:
        tree, law = TreeBuilder(), law_of(LawTable(3, 100, 0.0)(request.tokens))
        if request.max_depth:
            first = request.noise.choose(law)
            tree.add(ROOT, first, law)
            tree.add(ROOT, request.noise.choose(law.without(first)), law)
        return tree.build()

    assert max(bias(ExactRule(), propose, LawTable(3, seed, 0.0), 2) for seed in range(4)) > 1e-2


def test_members_draw_from_different_numbers() -> None:
    """With one stream for both, two equal drafters would always draw the same: dependent, hence
    biased."""
    law = Law(np.full(1000, 1e-3))

    def one_draw(request: DraftRequest) -> DraftTree:
        request.noise.seek(len(request.tokens))
        tree = TreeBuilder()
        tree.add(ROOT, request.noise.choose(law), law)
        return tree.build()

    def drawn(make: Callable[[], Drafter], seed: int) -> tuple[int, ...]:
        noise = SeededNoise(seed).for_drafting(2)
        return make().propose(DraftRequest(list(PROMPT), PLAIN, noise, 3, 99)).tokens

    def flat() -> Drafter:
        return EnsembleDrafter([member(one_draw) for _ in range(3)])

    def nested() -> Drafter:
        return EnsembleDrafter(
            [EnsembleDrafter([member(one_draw), member(one_draw)]), member(one_draw)]
        )

    for make in (flat, nested):
        assert sum(len(set(drawn(make, seed))) == 3 for seed in range(50)) > 45
        assert drawn(make, 3) == drawn(make, 3)


def test_a_merged_node_keeps_the_draws_of_its_members_in_order() -> None:
    law_a, law_b = Law(np.array([0.5, 0.5])), Law(np.array([0.9, 0.1]))
    a, b, c = TreeBuilder(), TreeBuilder(), TreeBuilder()
    a.add(a.add(ROOT, 1, law_a), 0, law_a)
    b.add(ROOT, 0, law_b)
    b.add(b.add(ROOT, 1, law_b), 0)
    c.add(ROOT, 1)
    merged, places = merge_trees([a.build(), b.build(), c.build()])
    assert merged.tokens == (1, 0, 0)
    assert merged.parents == (ROOT, 0, ROOT)
    assert [(draw.node, draw.law) for draw in merged.draws[ROOT]] == [
        (0, law_a),
        (2, law_b),
        (0, law_b),
        (0, None),
    ]
    assert [(draw.node, draw.law) for draw in merged.draws[0]] == [(1, law_a), (1, None)]
    assert places == [{ROOT: ROOT, 0: 0, 1: 1}, {ROOT: ROOT, 0: 2, 1: 0, 2: 1}, {ROOT: ROOT, 0: 0}]


@dataclass
class Witness(Drafter):
    """Proposes one tree and writes down what it is told."""

    tree: DraftTree
    told: list[str] = field(default_factory=list)
    outcome: RoundOutcome | None = None
    fails: bool = False

    def __post_init__(self) -> None:
        self.name, self.max_leaves, self.max_nodes = "witness", 2, len(self.tree)
        self.n_params = 10

    def begin(self, tokens: Sequence[int]) -> None:
        self.told.append("begin")

    def propose(self, request: DraftRequest) -> DraftTree:
        assert request.max_nodes <= self.max_nodes
        return self.tree if request.max_nodes == self.max_nodes else DraftTree()

    def observe(self, outcome: RoundOutcome) -> None:
        self.outcome = outcome

    @property
    def native_seconds(self) -> float:
        return 1.5

    def close(self) -> None:
        self.told.append("close")
        if self.fails:
            raise RuntimeError("stuck")


def ask(drafter: Drafter, max_nodes: int = 99) -> DraftTree:
    return drafter.propose(DraftRequest([7], PLAIN, SeededNoise(0), 9, max_nodes))


def test_each_member_sees_the_outcome_in_its_own_nodes() -> None:
    a, b = TreeBuilder(), TreeBuilder()
    a.add_hidden(ROOT, 9)
    a.add(ROOT, 4)
    b.add(b.add(b.add(ROOT, 4), 5), 6)
    first, two = Witness(a.build()), Witness(b.build())
    ensemble = EnsembleDrafter([first, two])
    merged = ask(ensemble)
    by_tokens = {
        tuple(merged.tokens[i] for i in merged.path_to(node)): node for node in range(len(merged))
    }
    rows = TableRows(
        [np.full(2, 1 / 2), *(np.array([1.0, float(node)]) for node in range(len(merged)))]
    )
    path = (by_tokens[4,], by_tokens[4, 5])
    ensemble.observe(RoundOutcome([7, 4, 5, 1], merged, path, 1, rows))  # type: ignore[arg-type]
    assert first.outcome is not None
    assert two.outcome is not None
    assert first.outcome.tree.tokens == (
        9,
        4,
        5,
    )  # its own two nodes, and the accepted one it lacked
    assert first.outcome.path == (1, 2)
    assert [first.outcome.tree.tokens[node] for node in first.outcome.tree.path_to(2)] == [4, 5]
    assert two.outcome.tree is two.tree
    assert two.outcome.path == (0, 1)
    for outcome in (first.outcome, two.outcome):
        for node in range(len(outcome.tree)):
            name = tuple(outcome.tree.tokens[i] for i in outcome.tree.path_to(node))
            np.testing.assert_array_equal(
                outcome.rows.logits(node + 1), rows.logits(by_tokens[name] + 1)
            )
        np.testing.assert_array_equal(outcome.rows.logits(0), rows.logits(0))
        assert (outcome.tokens, outcome.next_token) == ([7, 4, 5, 1], 1)


def test_what_an_ensemble_passes_on_and_adds_up() -> None:
    tree = DraftTree.chain([1, 2])
    first, two = Witness(tree), Witness(tree, fails=True)
    ensemble = EnsembleDrafter([first, two])
    assert (ensemble.max_nodes, ensemble.max_leaves) == (4, 4)
    assert (ensemble.native_seconds, ensemble.n_params) == (3.0, 20)
    ensemble.begin([7])
    ensemble.observe(RoundOutcome([7, 8], DraftTree(), (), 8, TableRows([])))  # type: ignore[arg-type]
    assert first.outcome is not None
    with pytest.raises(RuntimeError, match="stuck"):
        EnsembleDrafter([two, first]).close()
    assert first.told == ["begin", "close"]


def test_a_short_round_shares_its_nodes_beforehand() -> None:
    tree = DraftTree.chain([1, 2])
    ensemble = EnsembleDrafter([Witness(tree), Witness(tree)])
    assert len(ask(ensemble, 4)) == 2
    assert len(ask(ensemble, 3)) == 0
    ensemble = EnsembleDrafter(
        [ScriptedDrafter(proposers(0)["siblings"], 2), ScriptedDrafter(proposers(0)["i.i.d."], 6)]
    )
    for max_nodes in range(9):
        assert len(ask(ensemble, max_nodes)) <= max_nodes


def test_an_ensemble_of_one_is_refused() -> None:
    with pytest.raises(OptionError, match="at least two drafters"):
        EnsembleDrafter([NoDrafter()])
