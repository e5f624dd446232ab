"""Invariant 1 of the compiled walk and draws: they give the target's law to 1e-12.

They decide by the branching source's own methods, so all their outcomes are enumerated; Python's
walk is not there to take over. The same C with something wrong in it fails.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from support.enumeration import (
    PROMPT,
    TOLERANCE,
    Propose,
    largest_error,
    law_with_drafter,
    mixed_tree,
    proposals,
)
from support.mutated_loops import Mutant, MutantBuilder
from support.row_tables import CUT, DEFAULT, RowTable, on_supports, row_bias, watch_walks
from support.row_tables import WatchedLoops as Watched
from support.scripted import LawTable, law_of
from support.tree_laws import fixed
from support.wrong_drafts import WRONG_DRAFTERS, DropsDuplicates, falsely_stated

from specrun.bench.prove.rules import BranchingNoise, RowsByPath, enumerate_law
from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import OptionError
from specrun.bindings.models.model import Model
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime.acceptance import BlockRule, ExactRule
from specrun.runtime.acceptance import rule as rule_module
from specrun.runtime.acceptance.rule import ShortLaws
from specrun.runtime.compiled import LOOPS
from specrun.runtime.drafters import draft as draft_module
from specrun.runtime.drafters.draft_model import model_drafter, state
from specrun.runtime.drafters.growing import GrowingDrafter
from specrun.runtime.drafters.source import HighestLogits, NodeRows
from specrun.runtime.laws import Law, SamplingParams
from specrun.runtime.laws import noise as noise_module
from specrun.runtime.laws.noise import NotedNoise
from specrun.runtime.round import Drafter, DraftRequest
from specrun.runtime.trees import ROOT, DraftTree, Topology, TreeBuilder, parse_topology

pytestmark = pytest.mark.skipif(LOOPS is None, reason="installed without a compiler")
RULES = {"exact": BlockRule(), "token": ExactRule()}  # kseq has no compiled walk
SETTINGS = {"top-k 3": CUT, "the default": DEFAULT}
GREEDY = DEFAULT.replace(temperature=0.0)
FEW = CUT.replace(top_k=2)
LENGTHS = {"plain": 3, "chain": 3, "point masses": 3, "wandering chain": 3}
POOL = 4  # tokens that the tables may say


def point_before_draws(drafts: LawTable) -> Propose:
    """A guess, a draw, a guess, a draw: each faces what the ones before it left."""

    def propose(request: DraftRequest) -> DraftTree:
        tree = TreeBuilder()
        if request.max_depth:
            law = law_of(drafts(request.tokens))
            for token in (0, 2):
                tree.add(ROOT, token)
                tree.add(ROOT, request.noise.choose(law), law)
        return tree.build()

    return propose


def trees(seed: int) -> dict[str, Propose | None]:
    """Trees of every kind, of laws on their supports: those that compiled code walks."""
    drafts = LawTable(POOL, seed + 1000)
    kinds = {name: on_supports(propose) for name, propose in proposals(POOL, seed).items()}
    for shape in ("3", "2x2"):
        kinds[f"siblings {shape}"] = fixed(drafts, parse_topology(shape), "without")
    return {**kinds, "points before draws": point_before_draws(drafts)}


# -- the walk --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(trees(0)))
@pytest.mark.parametrize("params", SETTINGS.values(), ids=list(SETTINGS))
@pytest.mark.parametrize("rule", list(RULES))
def test_the_compiled_walk_gives_the_targets_law(
    monkeypatch: pytest.MonkeyPatch, rule: str, params: SamplingParams, name: str
) -> None:
    watched = watch_walks(monkeypatch, LOOPS)
    for seed in range(3):
        propose, length = trees(seed)[name], LENGTHS.get(name, 2)
        assert row_bias(RULES[rule], propose, RowTable(seed, params), length) < TOLERANCE
    assert watched.answered["verify"] > 10
    assert not watched.refused


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("rule", list(RULES))
def test_arbitrary_trees_give_the_targets_law(
    monkeypatch: pytest.MonkeyPatch, rule: str, seed: int
) -> None:
    watched = watch_walks(monkeypatch, LOOPS)
    propose = on_supports(mixed_tree(LawTable(POOL, seed + 50), seed))
    assert row_bias(RULES[rule], propose, RowTable(seed), 2) < TOLERANCE
    assert watched.answered["verify"] > 5
    assert not watched.refused


@pytest.mark.parametrize("rule", list(RULES))
def test_the_compiled_walk_at_temperature_0_says_the_highest(
    monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    watched = watch_walks(monkeypatch, LOOPS)
    for seed in range(8):
        for name in ("plain", "point masses"):
            table = RowTable(seed, GREEDY)
            assert row_bias(RULES[rule], trees(seed)[name], table, 4) < TOLERANCE
    assert watched.answered["walk_highest"] > 20
    assert not watched.refused


def test_rows_in_a_matrix_are_walked_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = watch_walks(monkeypatch, LOOPS)
    table, propose = RowTable(3), trees(3)["siblings 2x2"]
    assert propose is not None

    def law_of_rounds(order: str) -> dict[object, float]:
        def program(noise: BranchingNoise) -> object:
            tree = propose(DraftRequest([*PROMPT], CUT, noise, 2, 9))
            paths = [[tree.tokens[i] for i in tree.path_to(node)] for node in range(-1, len(tree))]
            rows = np.array([table.row([*PROMPT, *path]) for path in paths])
            places = tuple(np.random.default_rng(4).permutation(len(rows)).tolist())
            moved = rows[np.argsort(places)].data  # row i lies at places[i]
            matrix = {"one by one": None, "in order": rows.data, "moved": (moved, places)}[order]
            laws = ShortLaws(rows.__getitem__, CUT, matrix)
            kept = ExactRule().accept(tree, laws, noise, 2)
            return [tree.tokens[node] for node in kept.path].__repr__(), kept.next_token

        return enumerate_law(program)

    assert law_of_rounds("in order") == law_of_rounds("moved") == law_of_rounds("one by one")
    assert not watched.refused


# -- where Python goes on --------------------------------------------------------------------------


def dense_below(drafts: LawTable) -> Propose:
    """Draws of which the deeper ones are from dense laws, which only Python reads."""

    def propose(request: DraftRequest) -> DraftTree:
        tree, law = TreeBuilder(), law_of(drafts(request.tokens))
        if not request.max_depth:
            return tree.build()
        nodes = {tree.add(ROOT, request.noise.choose(law), law) for _ in range(2)}
        for node in nodes if request.max_depth > 1 else ():
            dense = Law(drafts([*request.tokens, node]))
            tree.add(node, request.noise.choose(dense), dense)
        return tree.build()

    return propose


def test_a_walk_that_python_begins_again_is_decided_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(LOOPS)
    monkeypatch.setattr(rule_module, "LOOPS", watched)

    def biases() -> list[float]:
        return [
            row_bias(ExactRule(), dense_below(LawTable(POOL, seed + 9)), RowTable(seed, most=3), 3)
            for seed in range(3)
        ]

    assert max(biases()) < TOLERANCE
    assert min(watched.answered["verify"], watched.refused["verify"]) > 10
    # Control: decided anew, whatever was decided before.
    monkeypatch.setattr(NotedNoise, "again", lambda noted: noted._source)
    assert max(biases()) > 1e-3


# -- wrong rules and drafters ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["i.i.d. siblings", "two drafters"])
def test_dropped_duplicates_are_caught(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    watched = watch_walks(monkeypatch, LOOPS)
    assert row_bias(DropsDuplicates(), trees(2)[name], RowTable(2), 2) > 1e-3
    assert watched.answered["verify"] > 10


@pytest.mark.parametrize(
    "wrong", [*WRONG_DRAFTERS, falsely_stated], ids=lambda value: value.__name__
)
def test_wrong_drafters_are_caught(
    monkeypatch: pytest.MonkeyPatch, wrong: Callable[[LawTable], Propose]
) -> None:
    watched = watch_walks(monkeypatch, LOOPS)
    biases = [
        row_bias(ExactRule(), wrong(LawTable(POOL, seed + 9, 0.0)), RowTable(seed, zeros=0.0), 2)
        for seed in range(4)
    ]
    assert max(biases) > 1e-2
    assert watched.answered["verify"] > 10


# -- wrong C ---------------------------------------------------------------------------------------

SAME = "#define ROOT (-1)"
DROPPED = """        int result = read_draw(walk, drawn, i, &node, &law);
        if (result == DONE)
            result = token_of(walk, node, &token);
        if (result == DONE)
            result = open_draft(law, token, &draft);
"""
WALKS = [
    (
        Mutant(
            "residual-not-renormalised",
            "verification.c",
            "if (scale_weights(left, remaining->size) > 0.0)",
            "if (sum_of(left, remaining->size) > 0.0)",
        ),
        "token",
        "i.i.d. siblings",
    ),
    (
        Mutant(
            "residual-not-clipped",
            "short_laws.h",
            "out[i] = left > 0.0 ? left : 0.0;",
            "out[i] = left;",
        ),
        "token",
        "chain",
    ),
    (
        Mutant("residual-forgotten", "verification.c", "reject(remaining, draft);", ";"),
        "token",
        "chain",
    ),
    (
        Mutant("p-not-divided-by-q", "verification.c", "target / drafted)", "target)"),
        "token",
        "chain",
    ),
    (
        Mutant(
            "point-mass-not-taken-out",
            "verification.c",
            "take_out(remaining->probs, remaining->ids, remaining->size, token);",
            ";",
        ),
        "token",
        "points before draws",
    ),
    (
        Mutant(
            "equal-draw-dropped",
            "verification.c",
            DROPPED,
            DROPPED.replace(
                "        if (result == DONE)\n            result = open_draft",
                "        static Py_ssize_t last;\n        if (i > 0 && node == last)\n"
                "            continue;\n        last = node;\n"
                "        if (result == DONE)\n            result = open_draft",
            ),
        ),
        "token",
        "i.i.d. siblings",
    ),
    (
        Mutant(
            "sibling-left-in-the-law",
            "verification.c",
            "            take_out(left, draft.ids, draft.size, token);",
            "            ;",
        ),
        "token",
        "siblings 3",
    ),
    (
        Mutant(
            "block-share-not-divided",
            "verification.c",
            "level->token) / drafted;",
            "level->token);",
        ),
        "exact",
        "chain",
    ),
    (
        Mutant(
            "block-residual-without-its-share",
            "verification.c",
            "draft.size, level->share, left);",
            "draft.size, 1.0, left);",
        ),
        "exact",
        "chain",
    ),
    (
        Mutant(
            "block-keeps-what-is-left",
            "verification.c",
            "double rest = total + (1.0 - level->share);",
            "double rest = total;",
        ),
        "exact",
        "chain",
    ),
    (
        Mutant(
            "block-token-not-renormalised", "verification.c", "left[i] /= total;", "left[i] /= 1.0;"
        ),
        "exact",
        "chain",
    ),
]


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> MutantBuilder:
    return MutantBuilder(tmp_path_factory.mktemp("mutants"))


@pytest.mark.parametrize(("mutant", "rule", "name"), WALKS, ids=lambda value: str(value))
def test_a_wrong_compiled_walk_is_caught(
    monkeypatch: pytest.MonkeyPatch, builder: MutantBuilder, mutant: Mutant, rule: str, name: str
) -> None:
    watched = watch_walks(monkeypatch, builder.build(mutant))
    length = 3 if name == "chain" else 2  # a chain of one token has no block
    biases = [row_bias(RULES[rule], trees(seed)[name], RowTable(seed), length) for seed in range(3)]
    assert max(biases) > 1e-3
    assert watched.answered["verify"] > 10


def test_an_unchanged_copy_passes(monkeypatch: pytest.MonkeyPatch, builder: MutantBuilder) -> None:
    """Controls differ from what is shipped by their one change, not by how they are built."""
    watched = watch_walks(monkeypatch, builder.build(Mutant("same", "verification.c", SAME, SAME)))
    assert row_bias(ExactRule(), trees(0)["i.i.d. siblings"], RowTable(0), 2) < TOLERANCE
    assert watched.answered["verify"] > 10


# -- draws -----------------------------------------------------------------------------------------


def whole(rows: list[np.ndarray]) -> NodeRows:
    """Whole rows, as a model has them."""
    return NodeRows(rows)


def highest(rows: list[np.ndarray]) -> NodeRows:
    """The highest of each row with their names, as a head has them: one more than top-k keeps."""
    order = [np.sort(np.argsort(-row, kind="stable")[: CUT.top_k + 1]) for row in rows]
    logits = [row[best] for row, best in zip(rows, order, strict=True)]
    return NodeRows(highest=HighestLogits(np.array(order, np.int32), np.array(logits)))


Said = Callable[[list[np.ndarray]], NodeRows]


def below_rows(drafts: RowTable, shape: str, said: Said) -> Propose:
    """Trees that compiled code draws depth by depth, from rows that a table has."""

    def propose(request: DraftRequest) -> DraftTree:
        source = RowsByPath(
            lambda paths: said([drafts.row([*request.tokens, *path]) for path in paths])
        )
        drafter = GrowingDrafter(source, parse_topology(shape), sampling="without")
        return drafter.propose(dataclasses.replace(request, params=drafts.params))

    return propose


def depths_bias(monkeypatch: pytest.MonkeyPatch, loops: object, said: Said = whole) -> float:
    """Return the largest error of texts whose drafts `drawn_depth` draws."""
    watched = Watched(loops)
    monkeypatch.setattr(draft_module, "LOOPS", watched)
    biases = [
        row_bias(
            ExactRule(),
            below_rows(RowTable(seed + 30, most=3), shape, said),
            RowTable(seed, most=3),
            3,
        )
        for seed in range(2)
        for shape in ("3", "2x2", "1x1")
    ]
    assert watched.answered["drawn_depth"] > 20
    assert not watched.refused
    return max(biases)


@pytest.mark.parametrize("said", [whole, highest])
def test_trees_drawn_below_rows_give_the_targets_law(
    monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    walks = watch_walks(monkeypatch, LOOPS)
    assert depths_bias(monkeypatch, LOOPS, said) < TOLERANCE
    assert walks.answered["verify"] > 20


def test_siblings_drawn_in_turn_are_drawn_by_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """As grammars, penalties and several conversations have it: a law at a time."""
    walks, watched = watch_walks(monkeypatch, LOOPS), Watched(LOOPS)
    monkeypatch.setattr(noise_module, "LOOPS", watched)
    assert row_bias(ExactRule(), trees(1)["siblings 2x2"], RowTable(1), 2) < TOLERANCE
    assert watched.answered["draw_distinct"] > 10
    assert walks.answered["verify"] > 10


VOCAB = 40


class ModelTable(RowTable):
    """A target whose rows are a model's own, moved: as its drafter it is right now and then."""

    def __init__(self, context: Context, seed: int) -> None:
        super().__init__(seed, FEW)
        context.memory.clear()
        self.size, self._state = VOCAB, state.DraftModelState(context, target_vocab_size=VOCAB)

    def row(self, prefix: Sequence[int]) -> np.ndarray:
        key = tuple(prefix)
        if key not in self._rows:
            self._state.rewind(0)
            generator = np.random.default_rng([self._seed, *key])
            moved = self._state.feed(key) + generator.standard_normal(VOCAB)
            self._rows[key] = moved.astype(np.float32)
        return self._rows[key]


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Context, Context]]:
    """A small model twice: for the drafter, and for the rows of its target."""
    path: Path = tmp_path_factory.mktemp("draws") / "small.gguf"
    write_random_llama(path, RandomLlama(vocab_size=VOCAB, width=16, ffn=32, layers=1, scale=2.0))
    options = ContextOptions(n_ctx=64, n_threads=1, n_threads_batch=1, n_sequences=4, n_outputs=4)
    with (
        Model(path) as model,
        Context(model, options) as first,
        Context(model, options) as second,
    ):
        yield first, second


def drafter_of_model(context: Context, shape: str) -> Drafter:
    """A chain, or a tree of such a shape; what is cached is forgotten."""
    context.memory.clear()
    if shape == "chain":
        cache = state.DraftModelState(context, target_vocab_size=VOCAB)
        return model_drafter(cache, Topology.chain(3))
    tree_cache = state.DraftModelState(context, target_vocab_size=VOCAB)
    return model_drafter(tree_cache, parse_topology(shape), sampling="without")


def model_bias(
    monkeypatch: pytest.MonkeyPatch, contexts: tuple[Context, Context], shape: str, loops: object
) -> float:
    """Return the largest error of texts that a model's chains or trees draft."""
    watched = Watched(loops)
    for module in (state, state):
        monkeypatch.setattr(module, "LOOPS", watched)
    drafter, table = drafter_of_model(contexts[0], shape), ModelTable(contexts[1], 5)
    emitted = law_with_drafter(ExactRule(), lambda: drafter, table, 3, params=FEW)
    drawn = "drawn_chain" if shape == "chain" else "drawn_tree"
    assert watched.answered[drawn] > 20
    return largest_error(emitted, table, 3)


@pytest.mark.parametrize("shape", ["chain", "2x1", "1x2", "2x2"])
def test_drafts_that_a_model_draws_give_the_targets_law(
    monkeypatch: pytest.MonkeyPatch, contexts: tuple[Context, Context], shape: str
) -> None:
    walks = watch_walks(monkeypatch, LOOPS)
    assert model_bias(monkeypatch, contexts, shape, LOOPS) < TOLERANCE
    assert walks.answered["verify"] > 20


ANOTHER = Mutant(
    "law-of-another-node", "law_room.h", "room->count - 1, room->k", "(Py_ssize_t)0, room->k"
)
DRAWS = [
    (Mutant("drawn-twice", "noise.h", "left[place] = 0.0;", ";"), "2x2"),
    (ANOTHER, "2x2"),
    (ANOTHER, "chain"),
    (
        Mutant("first-for-drawn", "tree.c", "tokens[i] = ids[places[i]];", "tokens[i] = ids[i];"),
        "2x2",
    ),
    (
        Mutant("first-for-drawn-in-chains", "chain.c", "place : ids[place];", "place : ids[0];"),
        "chain",
    ),
]


@pytest.mark.parametrize(("mutant", "shape"), DRAWS, ids=lambda value: str(value))
def test_wrong_compiled_draws_are_caught(
    monkeypatch: pytest.MonkeyPatch,
    builder: MutantBuilder,
    contexts: tuple[Context, Context],
    mutant: Mutant,
    shape: str,
) -> None:
    wrong = builder.build(mutant)
    assert wrongness(lambda: model_bias(monkeypatch, contexts, shape, wrong)) > 1e-3
    if shape != "chain":
        assert wrongness(lambda: depths_bias(monkeypatch, wrong)) > 1e-3


def wrongness(bias: Callable[[], float]) -> float:
    """Return a bias; infinite where a token was drawn that its stated law does not have."""
    try:
        return bias()
    except OptionError:
        return math.inf
