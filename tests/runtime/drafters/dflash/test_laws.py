"""The laws of block drafters: products of slots, Markov chains and lattices, verified exactly.

Blocks are tables here: of the text alone, as what llama.cpp evaluates is. Everything above them is
the shipped code: state, source, growth, rule and loop.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import pytest
from support.enumeration import PROMPT, TOLERANCE, drafter_bias, law_with_drafter
from support.scripted import PLAIN, LawTable, TableTarget, conversation_of

from specrun.bench.prove.rules import BranchingNoise, enumerate_law
from specrun.runtime.acceptance import build_rule, rule_names
from specrun.runtime.drafters.dflash.drafter import BlockCells, LatentMarkovHead
from specrun.runtime.drafters.dflash.file import Blocks
from specrun.runtime.drafters.dflash.rows import (
    BlockRows,
    LatentRows,
    LatticeRows,
    MarginalRows,
    MarkovRows,
)
from specrun.runtime.drafters.dflash.source import BlockSource, BlockState
from specrun.runtime.drafters.growing import GrowingDrafter
from specrun.runtime.heads import FloatRows, RowPiece
from specrun.runtime.laws import Law, SeededNoise
from specrun.runtime.planning import DraftPlan
from specrun.runtime.planning.curves import DraftCost
from specrun.runtime.round import Drafter, DraftRequest
from specrun.runtime.round.drafter import RoundOutcome
from specrun.runtime.round.loop import DecodeSettings, RoundLimits, decode_rounds
from specrun.runtime.round.target import EvaluatedRows
from specrun.runtime.trees import ROOT, DraftTree, DynamicShape, Topology, TreeSampling
from specrun.runtime.trees.topology import parse_topology
from specrun.runtime.trees.tree import Draw

EXACT_RULES = [name for name in rule_names() if build_rule(name).exact]
LATENT = {"DSpark, gated": "gated", "DSpark, rnn": "rnn"}
GENERATIONS = ("DFlash", "DFlash2", "DSpark", *LATENT)
SLOTS, SIZE, BEST, RANK, WIDTH = 3, 3, 2, 2, 2


class TableHead(LatentMarkovHead):
    """The shipped gate or state over tables; ggml's products of two matrices are numpy's."""

    def __init__(self, kind: str, size: int, seed: int) -> None:
        random = np.random.default_rng([seed, 2])
        parts, own = (1, 1) if kind == "gated" else (3, 2)
        shape = parts * RANK, own * RANK + WIDTH
        self._kind, self._rank, self.drafted = kind, RANK, None
        self._weight = (1.5 * random.normal(size=shape)).astype(np.float32)
        self._bias = random.normal(size=shape[0]).astype(np.float32)
        self.first, self.second = (1.5 * random.normal(size=(2, size, RANK))).astype(np.float32)

    def _embedded(self, token: int) -> FloatRows:
        return self.first[token]

    def shifts(self, tokens: Sequence[int], before: int, numbers: Any) -> FloatRows:
        return self.biases(self.first[list(tokens)], before, numbers)

    def biases(self, latents: FloatRows, before: int, numbers: Any) -> FloatRows:
        found = (latents - self.first[before]) @ self.second.T
        return found if numbers is None else found[:, numbers]

    def along(self, hidden: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
        """The bias after the last of a block's tokens, worked out apart from the rows.

        By its states [slots, width]: one slot before those that predict is of the first token.
        """
        state = np.zeros(RANK)
        for read, token in zip(hidden, [tokens[0], *tokens], strict=False):
            own = self.first[token]
            if self._kind == "gated":
                latent = own / (1 + np.exp(-self._weight @ [*read, *own] - self._bias))
            else:
                made = self._weight @ [*state, *own, *read] + self._bias
                kept = 1 / (1 + np.exp(-made[:RANK]))
                state = kept * state + (1 - kept) * np.tanh(made[RANK : 2 * RANK])
                latent = np.tanh(made[2 * RANK :])
        return self.second @ latent


class Table:
    """Blocks by text: rows of slots [slots, size], biases, candidates and scores."""

    def __init__(self, generation: str, seed: int, size: int = SIZE) -> None:
        self.generation, self.seed, self.size = generation, seed, size
        self.bias = np.random.default_rng([seed, 1]).normal(size=(size, size)).astype(np.float32)
        self.head: TableHead | None = None
        if generation in LATENT:
            self.head = TableHead(LATENT[generation], size, seed)
            self.bias = self.head.first @ self.head.second.T

    def rows(self, text: Sequence[int]) -> BlockRows:
        logits, named, scores = self._numbers(text)
        if self.generation == "DFlash":
            return MarginalRows(logits)
        if "DSpark" in self.generation:
            # As llama.cpp's graph has it: the biases of its own best chain are in the rows.
            before = last = text[-1]
            for row in logits:
                row += self.bias[before]
                before = int(row.argmax())
            if self.head is None:
                return MarkovRows(logits, last, self._shifts)
            hidden = self._hidden(text)
            state = self.head.started(last, hidden[:1])
            return LatentRows(logits, last, self.head, hidden[1:], state=state)
        return LatticeRows(named, scores, self.size)

    def _shifts(self, tokens: Sequence[int], before: int, numbers: Any) -> np.ndarray:
        shifts = self.bias[list(tokens)] - self.bias[before]
        return shifts if numbers is None else shifts[:, numbers]

    def _numbers(self, text: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        random = np.random.default_rng([self.seed, *text])
        logits = random.normal(size=(SLOTS, self.size)).astype(np.float32) * np.float32(1.5)
        named = np.array([random.permutation(self.size)[:BEST] for _ in range(SLOTS)], np.int32)
        scores = random.normal(size=(SLOTS, BEST, BEST)).astype(np.float32)
        scores[0] = scores[0, 0]  # all after the text's last token
        return logits, named, scores

    def _hidden(self, text: Sequence[int]) -> FloatRows:
        random = np.random.default_rng([self.seed, 3, *text])
        return random.normal(size=(1 + SLOTS, WIDTH)).astype(np.float32)

    def law(self, text: Sequence[int], path: Sequence[int]) -> np.ndarray:
        """The distribution after a path of drafted tokens, worked out apart from the rows."""
        rows, named, scores = self._numbers(text)
        slot = len(path)
        if self.generation == "DFlash2":
            above = named[slot - 1].tolist().index(path[-1]) if path else 0
            logits = np.full(self.size, -np.inf)
            logits[named[slot]] = scores[slot, above]
        else:
            logits = rows[slot]
            if self.head is not None:
                logits = logits + self.head.along(self._hidden(text)[: slot + 2], [text[-1], *path])
            elif self.generation == "DSpark":
                logits = logits + self.bias[[*text, *path][-1]]
        weights = np.exp(logits.astype(np.float64) - logits.max())
        return weights / weights.sum()


class TableCells:
    """Cells of a text, written piece by piece, whose blocks a table has."""

    native_seconds = 0.0
    part = None

    def __init__(self, table: Table) -> None:
        self._table, self.text = table, list[int]()
        self.n_slots, self.n_cells = SLOTS, 64

    def put(self, piece: RowPiece) -> bool:
        assert piece.position <= len(self.text)
        self.text[piece.position :] = piece.tokens
        return True

    def drop(self, _n: int, _position: int) -> None:
        raise NotImplementedError  # of a window, which the table has none of

    def block(self, last: int, position: int, n_slots: int) -> BlockRows:
        assert 1 <= n_slots <= SLOTS
        return self._table.rows([*self.text[:position], last])

    def close(self) -> None:
        pass


class TableSource(BlockSource):
    """The shipped source, over cells of a table; the target's features are zeros."""

    def __init__(self, table: Table, *, chooses: bool = False) -> None:
        blocks = Blocks("", SLOTS, 1, (0,), 0, 0.0, few_tokens=table.generation == "DFlash2")
        cells = cast("BlockCells", TableCells(table))
        super().__init__(blocks, BlockState(cells), chooses=chooses)

    def begin(self, tokens: Sequence[int]) -> None:
        super().begin(tokens)
        self.state.learn(0, np.zeros((len(tokens) - 1, 1), np.float32), tokens)

    def read_states(self, rows: EvaluatedRows, wanted: Sequence[int]) -> FloatRows:
        return np.zeros((len(wanted), 1), np.float32)


SHAPES: dict[str, tuple[Topology | DynamicShape, TreeSampling]] = {
    "chain, drawn": (Topology.chain(SLOTS), "with"),
    "tree, drawn with replacement": (parse_topology("2x1"), "with"),
    "tree, drawn without replacement": (parse_topology("2x2"), "without"),
    "chain of points": (Topology.chain(SLOTS), "argmax"),
    "tree of points": (parse_topology("2x2"), "argmax"),
    "tree by path probability": (DynamicShape(SLOTS, 2, 5), "argmax"),
}


def maker(
    generation: str, seed: int, shape: str, *, p_min: float = 0.0, plan: bool = False
) -> Callable[[], GrowingDrafter]:
    topology, sampling = SHAPES[shape]

    def planned() -> DraftPlan | None:
        cost = DraftCost(lambda n: 0.1 * min(n, 1), lambda: 1.0)
        return DraftPlan(lambda n: 1.0 + 0.05 * n, cost, 5, depth=1) if plan else None

    return lambda: GrowingDrafter(
        TableSource(Table(generation, seed + 100), chooses=sampling == "argmax"),
        topology,
        sampling=sampling,
        p_min=p_min,
        plan=planned(),
    )


@pytest.mark.parametrize(
    ("generation", "shape", "rule"),
    [
        pytest.param(generation, shape, rule, id=f"{generation}-{shape}-{rule}")
        for generation, shape in itertools.product(GENERATIONS, SHAPES)
        for rule in (EXACT_RULES if generation == "DSpark" else ["exact"])
    ],
)
def test_every_law_and_tree_gives_the_targets_law(generation: str, shape: str, rule: str) -> None:
    length = 2 if "tree, drawn" in shape else 3
    for seed in range(2):
        make = maker(generation, seed, shape)
        assert drafter_bias(build_rule(rule), make, LawTable(SIZE, seed), length) < TOLERANCE


@pytest.mark.parametrize("shape", ["chain, drawn", "tree by path probability"])
@pytest.mark.parametrize("generation", GENERATIONS)
def test_stops_leave_the_law(generation: str, shape: str) -> None:
    for seed in range(3):
        table, rule = LawTable(SIZE, seed), build_rule("exact")
        make = maker(generation, seed, shape, p_min=0.5)
        assert drafter_bias(rule, make, table) < TOLERANCE
        assert drafter_bias(rule, maker(generation, seed, shape, plan=True), table) < TOLERANCE


# -- the law of what is drafted --------------------------------------------------------------------


def drafted(make: Callable[[], Drafter], what: Callable[[DraftTree], Any]) -> dict[Any, float]:
    """The exact law of something about the first draft after the prompt."""

    def program(noise: BranchingNoise) -> object:
        drafter = make()
        drafter.begin(PROMPT)
        tree = drafter.propose(DraftRequest(PROMPT, PLAIN, noise, SLOTS, 8))
        return what(tree)

    return enumerate_law(program)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_chain_is_drawn_from_the_product_of_its_laws(generation: str) -> None:
    """Along any path: after tokens, too, that are not the drafter's favourites."""
    for seed in range(4):
        found = drafted(maker(generation, seed, "chain, drawn"), lambda tree: tree.tokens)
        table, wanted = Table(generation, seed + 100), dict[tuple[int, ...], float]()
        for path in itertools.product(range(SIZE), repeat=SLOTS):
            probability = 1.0
            for depth, token in enumerate(path):
                if probability:
                    probability *= table.law(PROMPT, path[:depth])[token]
            if probability:
                wanted[path] = probability
        assert found.keys() == wanted.keys()
        for path, probability in wanted.items():
            assert found[path] == pytest.approx(probability, abs=1e-6)


def stated_laws(generation: str) -> Callable[[DraftTree], Any]:
    """A check that draws state the distributions after their paths."""

    def laws(tree: DraftTree) -> tuple[Any, ...]:
        table, noted = Table(generation, 100), []
        for parent, draws in tree.draws.items():
            path = [tree.tokens[node] for node in tree.path_to(parent)] if parent != ROOT else []
            for draw in draws:
                assert draw.law is not None
                stated = [draw.law.probability(token) for token in range(SIZE)]
                assert np.abs(stated - table.law(PROMPT, path)).max() < 1e-6
                noted.append((parent, draw.node))
        assert len(noted) >= SLOTS - 1
        return tuple(noted)

    return laws


@pytest.mark.parametrize("generation", GENERATIONS)
def test_draws_carry_the_law_that_they_came_from(generation: str) -> None:
    assert drafted(maker(generation, 0, "tree, drawn with replacement"), stated_laws(generation))


def test_a_state_of_another_parent_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the third depth on, nodes have states of their own above them."""
    monkeypatch.setitem(SHAPES, "deep", (parse_topology("2x1x1"), "with"))
    make, after = maker("DSpark, rnn", 0, "deep"), LatentRows.after
    assert drafted(make, stated_laws("DSpark, rnn"))

    def newest(self: LatentRows, slot: int, tokens: Sequence[int], **given: Any) -> Any:
        return after(self, slot, tokens, points=given["points"])

    monkeypatch.setattr(LatentRows, "after", newest)
    with pytest.raises(AssertionError):
        drafted(make, stated_laws("DSpark, rnn"))


@pytest.mark.parametrize("generation", GENERATIONS)
def test_trees_of_points_are_the_paths_of_the_highest_probability(generation: str) -> None:
    """As DFlash2's and DSpark's laws depend on the path, products of slots are not enough."""
    made = drafted(
        maker(generation, 1, "tree by path probability"),
        lambda tree: tuple(
            tuple(tree.tokens[above] for above in tree.path_to(node)) for node in range(len(tree))
        ),
    )
    [paths] = made
    table = Table(generation, 101)
    values = {(): 1.0}
    for path in sorted(itertools.chain(*map(_paths, range(1, SLOTS + 1))), key=len):
        above = values.get(path[:-1], 0.0)
        values[path] = above * table.law(PROMPT, path[:-1])[path[-1]] if above else 0.0
    # Two nodes of each depth are expanded, so the best two paths of each depth must be there.
    first = sorted(_paths(1), key=values.__getitem__, reverse=True)[:2]
    assert set(first) <= set(paths)
    kept = sorted((values[path] for path in paths), reverse=True)
    assert len(paths) == 5
    everything = sorted(
        (values[path] for path in values if path and values[path[:-1]]), reverse=True
    )
    assert kept[:3] == pytest.approx(everything[:3])


def _paths(length: int) -> list[tuple[int, ...]]:
    return [*itertools.product(range(SIZE), repeat=length)]


# -- negative controls -----------------------------------------------------------------------------


class CountsTopKAsDraws(Drafter):
    """Says of its likeliest children that they were drawn: a public engine accepted too many so."""

    def __init__(self, inner: GrowingDrafter, table: Table) -> None:
        self._inner, self._table, self.name = inner, table, "wrong"

    def begin(self, tokens: Sequence[int]) -> None:
        self._inner.begin(tokens)

    def observe(self, outcome: RoundOutcome) -> None:
        self._inner.observe(outcome)

    def propose(self, request: DraftRequest) -> DraftTree:
        tree = self._inner.propose(request)
        draws = {}
        for parent, points in tree.draws.items():
            path = [tree.tokens[node] for node in tree.path_to(parent)] if parent != ROOT else []
            left = self._table.law(request.tokens, path)
            stated = []
            for point in points:
                stated.append(Draw(point.node, Law(left / left.sum())))
                left = left.copy()
                left[tree.tokens[point.node]] = 0.0
            draws[parent] = tuple(stated)
        return dataclasses.replace(tree, draws=draws, is_of_points=False)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_top_k_children_counted_as_draws_are_caught(generation: str) -> None:
    """A drafter that knows a little: such a rule accepts more than the target's law allows."""
    for seed in range(2):
        table = Table(generation, seed + 100)
        make = maker(generation, seed, "tree of points")
        wrong = lambda: CountsTopKAsDraws(make(), table)  # noqa: B023, E731
        target = LawTable(SIZE, seed)
        assert drafter_bias(build_rule("exact"), wrong, target, 2) > 0.01
        assert drafter_bias(build_rule("exact"), make, target, 2) < TOLERANCE


class ForgetsTheParent(MarkovRows):
    """States the row of llama.cpp's own chain after every token."""

    def after(
        self,
        slot: int,
        tokens: Sequence[int],
        *,
        points: bool = False,
        parents: Sequence[int] | None = None,
    ) -> Any:
        return super().after(slot, [self._before(slot)] * len(tokens), points=points)


def test_a_markov_head_that_forgets_its_parent_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact all the same, as it draws from what it states, but not from the drafter's law."""
    rows = Table.rows

    def forgetting(self: Table, text: Sequence[int]) -> BlockRows:
        made = rows(self, text)
        assert isinstance(made, MarkovRows)
        return ForgetsTheParent(made._logits, text[-1], made._shifts)

    monkeypatch.setattr(Table, "rows", forgetting)
    make = maker("DSpark", 0, "chain, drawn")
    assert drafter_bias(build_rule("exact"), make, LawTable(SIZE, 0)) < TOLERANCE
    found, table = drafted(make, lambda tree: tree.tokens), Table("DSpark", 100)
    wrong = [
        path
        for path, probability in found.items()
        if probability
        != pytest.approx(
            np.prod([table.law(PROMPT, path[:depth])[path[depth]] for depth in range(SLOTS)]),
            abs=1e-4,
        )
    ]
    assert wrong


def test_point_masses_keep_the_law_with_any_history() -> None:
    """The length of what was accepted before decides which cells are written next."""
    make = maker("DSpark", 3, "tree by path probability")
    emitted = law_with_drafter(build_rule("exact"), make, LawTable(SIZE, 3), 4)
    assert sum(emitted.values()) == pytest.approx(1.0)


# -- sizes that pay --------------------------------------------------------------------------------


def asked_slots(seconds: Callable[[int], float], draft: Callable[[int], float]) -> list[int]:
    """The slots of each round's block, 0 without one, of a tree planned with these costs."""
    table, seen = LawTable(SIZE, 0), list[int]()

    class Counting(TableCells):
        def block(self, last: int, position: int, n_slots: int) -> BlockRows:
            seen.append(n_slots)
            return super().block(last, position, n_slots)

    source = TableSource(Table("DSpark", 100))
    counting = Counting(Table("DSpark", 100))
    source.state = BlockState(cast("BlockCells", counting))
    plan = DraftPlan(seconds, DraftCost(draft, lambda: 1.0), 6, depth=SLOTS)
    drafter = GrowingDrafter(source, DynamicShape(SLOTS, 2, 6), plan=plan)
    conversation = conversation_of(drafter, PROMPT, SeededNoise(1))
    drafter.begin(PROMPT)
    settings = DecodeSettings(
        build_rule("exact"), PLAIN, RoundLimits(n_ctx=64, max_nodes=32, max_tokens=40)
    )
    for _ in decode_rounds(TableTarget(table), conversation, settings):
        pass
    return seen


def test_a_block_is_no_larger_than_pays() -> None:
    """Width by the target's curve, depth by what the drafter's own block costs."""
    free = asked_slots(lambda n: 1.0 + 0.01 * n, lambda n: 0.05)
    assert max(free) == SLOTS
    # What is dear is tried, and then left.
    dear = asked_slots(lambda n: 1.0 + 0.01 * n, lambda n: (0.05, 0.05, 0.7, 1.4)[n])
    assert sum(dear) < sum(free) / 2
    vain = asked_slots(lambda n: float(n) ** 2, lambda n: 0.5)
    assert set(vain) <= {1}
    assert len(vain) < 8  # of 40 rounds


def test_a_drawn_chain_pays_for_its_block_once() -> None:
    """The first distribution costs the whole block, and the others nothing more."""

    def length(depth: int | None, draft: Callable[[int], float]) -> int:
        plan = DraftPlan(lambda n: 1.0 + 0.05 * n, DraftCost(draft, lambda: 1.0), 8, depth=depth)
        plan.start(points=False)
        n = 0
        while plan.goes_on() and plan.takes(0.8):
            n += 1
        return n

    assert length(1, lambda n: 0.6) == 8
    assert length(None, lambda n: 0.6 * n) < 4
