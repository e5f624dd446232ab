"""Tree size by optimal stopping: the best nodes by enumeration, and what the choice gains."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from operator import mul

import numpy as np
import pytest
from support.scripted import TableRows
from support.simulated_machine import Endless, draft_cost

from specrun.runtime.planning import CostCurve, DraftPlan, LiveCurve, draft_plan
from specrun.runtime.planning.curves import DraftCost
from specrun.runtime.round.drafter import RoundOutcome
from specrun.runtime.trees import ROOT, DraftTree

STEEP = CostCurve.flat([1.0, 1.3, 1.6, 1.8, 2.2, 2.5, 2.8, 3.1, 3.4])
STEPS = CostCurve.flat([1.0, 1.5, 1.52, 1.54, 2.4, 2.42, 2.44, 2.46, 4.0])
# Two children of the root, two below each of them.
PARENTS = [ROOT, ROOT, 0, 0, 1, 1]


def values_of(certainties: Sequence[float]) -> list[float]:
    values: list[float] = []
    for certainty, parent in zip(certainties, PARENTS, strict=True):
        values.append(certainty * (1.0 if parent == ROOT else values[parent]))
    return values


def tree_of(kept: Sequence[int]) -> DraftTree:
    places = {ROOT: ROOT} | {node: place for place, node in enumerate(kept)}
    return DraftTree.of_points(kept, tuple(places[PARENTS[node]] for node in kept))


class Rounds:
    """Rounds of a size, in which nodes are accepted with chances of their own."""

    def __init__(self, size: DraftPlan, seed: int = 1) -> None:
        self.size, self._random, self._text = size, random.Random(seed), [0]
        self.kept: list[int] = []
        self.asked = False

    def play(self, certainties: Sequence[float], chances: Sequence[float]) -> int:
        """Return how many tokens a round of these nodes gives."""
        self.kept, tree = [], DraftTree()
        self.asked = bool(self.size.depth_to_ask())
        if self.asked:
            self.kept = self.size.best(values_of(certainties), PARENTS, 6)
            tree = self.size.drafted(tree_of(self.kept))
        path: list[int] = []
        node = ROOT
        while True:
            # At most one of two siblings is right.
            draw, chosen = self._random.random(), None
            for child in (i for i, parent in enumerate(PARENTS) if parent == node):
                if draw < chances[child]:
                    chosen = child
                    break
                draw -= chances[child]
            if chosen is None or chosen not in self.kept:
                break
            path.append(chosen)
            node = chosen
        places = tuple(self.kept.index(node) for node in path)
        self._text += [*path, 99]
        self.size.observe(RoundOutcome(self._text, tree, places, 99, TableRows([])))  # type: ignore[arg-type]
        return len(path) + 1


def test_the_kept_nodes_are_the_best_of_all_trees() -> None:
    """By enumeration: no other connected choice has more expected tokens less what they cost."""
    random_ = random.Random(4)
    for curve in (STEEP, STEPS):
        for _ in range(60):
            size = DraftPlan(curve.seconds, draft_cost(0.1, of_any_depth=True), 8, depth=1)
            certainties = [random_.uniform(0.05, 0.95) for _ in PARENTS]
            kept = size.best(values_of(certainties), PARENTS, 6)
            chances: list[float] = []
            for certainty, parent in zip(certainties, PARENTS, strict=True):
                # The prior of `AcceptanceOdds` for chosen tokens: log-odds 0.4 above the drafter's.
                odds = np.exp(0.4) * certainty / (1.0 - certainty)
                chances.append(odds / (1.0 + odds) * (1.0 if parent == ROOT else chances[parent]))
            usual = [0.75**depth for depth in range(1, 9)]
            token = min(
                curve.seconds(1),
                *((0.1 + curve.seconds(n + 1)) / (1.0 + sum(usual[:n])) for n in range(1, 9)),
            )

            def worth(nodes: Sequence[int], chances: list[float] = chances) -> float:
                return token * sum(chances[node] for node in nodes) - curve.seconds(len(nodes) + 1)  # noqa: B023

            connected = [
                nodes
                for count in range(len(PARENTS) + 1)
                for nodes in itertools.combinations(range(len(PARENTS)), count)
                if all(PARENTS[node] in (ROOT, *nodes) for node in nodes)
            ]
            assert len(connected) == 25
            assert worth(kept) == pytest.approx(max(map(worth, connected)), abs=1e-12)


@pytest.mark.parametrize("curve", [STEEP, STEPS], ids=["steep", "steps"])
def test_a_chain_is_cut_by_the_rule_that_cuts_a_tree(curve: CostCurve) -> None:
    """Its beginning is kept, as long as the best tree of the same nodes; and all of it is asked for
    at once if its tokens are usually right."""
    random_, cost = random.Random(6), draft_cost(0.02)
    parents, lengths = [ROOT, *range(5)], set()
    for _ in range(60):
        chain = DraftPlan(curve.seconds, cost, 6)
        tree = DraftPlan(curve.seconds, cost, 6, depth=6)
        values = list(itertools.accumulate([random_.uniform(0.3, 0.99) for _ in parents], mul))
        assert chain.depth_to_ask() in (2, 4, 6)
        assert tree.depth_to_ask() == 6
        kept = chain.best(values, parents, 6)
        assert kept == tree.best(values, parents, 6) == list(range(len(kept)))
        lengths.add(len(kept))
    assert len(lengths) > 2


# Where the drafter's probabilities tell which rounds are easy.
EASY, HARD = [0.95, 0.03, 0.95, 0.03, 0.5, 0.1], [0.1, 0.05, 0.1, 0.05, 0.1, 0.05]


def speed(curve: CostCurve, *, fixed: int | None = None, told: bool = True) -> float:
    """Return tokens a second of rounds that are easy or hard, drafted for 0.1 of a plain one."""
    size = DraftPlan(curve.seconds, draft_cost(0.1, of_any_depth=True), 8, depth=1)
    rounds, random_ = Rounds(size), random.Random(2)
    if fixed is not None:
        rounds.size = FixedSize(fixed)  # type: ignore[assignment]
    tokens = seconds = 0.0
    for _ in range(1500):
        chances = random_.choice([EASY, HARD])
        tokens += rounds.play(chances if told else [0.5, 0.2, 0.5, 0.2, 0.5, 0.2], chances)
        seconds += curve.seconds(len(rounds.kept) + 1) + 0.1
    return tokens / seconds


class FixedSize:
    """The `count` nodes of highest value in every round."""

    def __init__(self, count: int) -> None:
        self._count = count

    def depth_to_ask(self) -> int:
        return 1

    def best(self, values: Sequence[float], parents: Sequence[int], most: int) -> list[int]:
        return sorted(sorted(range(6), key=lambda node: -values[node])[: self._count])

    def drafted(self, tree: DraftTree) -> DraftTree:
        return tree

    def observe(self, outcome: RoundOutcome) -> None:
        pass


@pytest.mark.parametrize("curve", [STEEP, STEPS], ids=["steep", "steps"])
def test_it_beats_the_best_fixed_size_where_probabilities_tell_rounds_apart(
    curve: CostCurve,
) -> None:
    best = max(speed(curve, fixed=n) for n in range(7))
    assert speed(curve) > 1.08 * best


@pytest.mark.parametrize("curve", [STEEP, STEPS], ids=["steep", "steps"])
def test_it_stays_near_the_best_fixed_size_where_they_tell_nothing(curve: CostCurve) -> None:
    best = max(speed(curve, fixed=n, told=False) for n in range(7))
    assert speed(curve, told=False) > 0.95 * best


def test_a_drafter_that_is_never_right_is_asked_ever_more_rarely() -> None:
    rounds = Rounds(DraftPlan(STEEP.seconds, draft_cost(0.1, of_any_depth=True), 8, depth=1))
    asked = []
    for _ in range(600):
        rounds.play([0.6, 0.3] * 3, [0.0] * 6)
        asked.append(bool(rounds.kept))
    assert sum(asked[:30]) > 0
    assert sum(asked[300:]) < 12


def lost(draft: float, share: float) -> float:
    """Return the share of time that is lost against plain decoding.

    The drafter takes `draft` rounds for a tree; its nodes are accepted in this `share` of the
    rounds that its certainties lead to expect, and it mistakes a tenth of the easy ones for hard.
    """
    size = DraftPlan(STEEP.seconds, draft_cost(draft, of_any_depth=True), 8, depth=1)
    rounds, random_ = Rounds(size), random.Random(3)
    tokens = seconds = 0.0
    for _ in range(10):
        size.begin()
        for _ in range(200):
            is_easy = random_.random() < 0.3
            seems_easy = (random_.random() < 0.1) != is_easy
            chances = [share * chance for chance in (EASY if is_easy else HARD)]
            tokens += rounds.play(EASY if seems_easy else HARD, chances)
            seconds += STEEP.seconds(len(rounds.kept) + 1) + draft * rounds.asked
    return seconds / tokens / STEEP.seconds(1) - 1.0


@pytest.mark.parametrize("draft", [0.1, 0.3, 0.5])
def test_a_drafter_that_loses_rests_before_it_loses_much(draft: float) -> None:
    assert 0.0 < lost(draft, 0.4) < 0.02


@pytest.mark.parametrize("draft", [0.1, 0.3, 0.5])
def test_a_drafter_that_may_lose_anything_does(
    draft: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: asked as often as its certainties let hope."""
    monkeypatch.setattr(draft_plan, "Account", Endless)
    assert lost(draft, 0.4) > 0.07


# -- how deep the drafter is asked -----------------------------------------------------------------

DEEPEST = 4
GENTLE = CostCurve.flat([1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8])
SHALLOW, EVER = [0.8, 0.05, 0.05, 0.05], [0.9] * DEEPEST


def depths_asked(size: DraftPlan, chances: Sequence[float], rounds: int = 300) -> list[int]:
    """Return how deep each round asked a drafter of chains, whose certainties are its chances."""
    random_, text, asked = random.Random(5), [0], []
    for _ in range(rounds):
        depth = size.depth_to_ask()
        asked.append(depth)
        tree, kept = DraftTree(), []
        if depth:
            values = [math.prod(chances[: n + 1]) for n in range(depth)]
            kept = size.best(values, [ROOT, *range(depth - 1)], 8)
            tree = size.drafted(DraftTree.chain([1] * len(kept)))
        right = itertools.takewhile(lambda node: random_.random() < chances[node], kept)
        path = tuple(right)
        text += [*([1] * len(path)), 99]
        size.observe(RoundOutcome(text, tree, path, 99, TableRows([])))  # type: ignore[arg-type]
    return asked


def test_it_asks_as_deep_as_pays() -> None:
    size = DraftPlan(GENTLE.seconds, draft_cost(0.1), 8, depth=DEEPEST)
    assert depths_asked(size, SHALLOW)[0] == DEEPEST  # what was never tried is hoped for
    shallow = depths_asked(size, SHALLOW)
    assert shallow.count(1) > 0.8 * len(shallow)
    assert max(shallow) > 1  # and so is what was not tried for long
    assert min(depths_asked(size, EVER)[-100:]) == DEEPEST


def test_depths_that_cost_nothing_are_all_asked_for() -> None:
    """Negative control: where every depth takes as long as one, more than one is asked for."""
    size = DraftPlan(GENTLE.seconds, draft_cost(0.1, of_any_depth=True), 8, depth=DEEPEST)
    depths_asked(size, SHALLOW)
    assert min(depths_asked(size, SHALLOW)) > 1


@pytest.mark.parametrize("learnt", [True, False], ids=["learnt", "control"])
def test_what_a_draft_takes_keeps_pace_with_what_a_round_takes(*, learnt: bool) -> None:
    """A curve begins in rounds of one second and is told rounds of 50 ms: a draft that is a tenth
    of a round is then 5 ms. Control: as it was reckoned at first it would be two rounds."""
    live = LiveCurve(GENTLE)
    cost = DraftCost(lambda depth: 0.1 * depth, (lambda: live.seconds(1)) if learnt else lambda: 1)
    size = DraftPlan(live.seconds, cost, 8, depth=DEEPEST)
    for _ in range(3):
        for width in (1, 2, 4, 8):
            live.learn(width, 0.05 * GENTLE.seconds(width))
    assert (min(depths_asked(size, EVER)[-100:]) == DEEPEST) is learnt
