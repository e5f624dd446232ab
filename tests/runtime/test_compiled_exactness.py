"""Invariant 1 of the walk and draws that are shipped: they give the target's law to 1e-12.

The branching source decides in place of an answer's own noise, so all outcomes are enumerated. The
same source with something wrong in it fails. `test_builds.py` runs this file a second time, with
no file replaced by what Cython made of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from support.enumeration import (
    TOLERANCE,
    Propose,
    largest_error,
    law_with_drafter,
    mixed_tree,
    proposals,
)
from support.mutated_source import IS_COMPILED, Mutant, mutated
from support.row_tables import CUT, DEFAULT, RowTable, on_supports, row_bias
from support.scripted import LawTable, law_of
from support.tree_laws import fixed
from support.wrong_drafts import WRONG_DRAFTERS, DropsDuplicates, falsely_stated

from specrun.bench.prove.rules import RowsByPath
from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import OptionError
from specrun.bindings.models.model import Model
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime.acceptance import BlockRule, ExactRule, exact
from specrun.runtime.drafters.draft_model import DraftModelSource
from specrun.runtime.drafters.growing import GrowingDrafter
from specrun.runtime.drafters.growing import drafter as growing
from specrun.runtime.drafters.growing.source import HighestLogits, NodeRows
from specrun.runtime.laws import Law, SamplingParams
from specrun.runtime.laws import law as law_module
from specrun.runtime.round import Drafter, DraftRequest
from specrun.runtime.trees import ROOT, DraftTree, Topology, TreeBuilder, growth, parse_topology
from specrun.runtime.trees import tree as tree_module

RULES = {"exact": BlockRule(), "token": ExactRule()}
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
    """Trees of every kind, of laws on their supports."""
    drafts = LawTable(POOL, seed + 1000)
    kinds = {name: on_supports(propose) for name, propose in proposals(POOL, seed).items()}
    for shape in ("3", "2x2"):
        kinds[f"siblings {shape}"] = fixed(drafts, parse_topology(shape), "without")
    return {**kinds, "points before draws": point_before_draws(drafts)}


def dense_below(drafts: LawTable) -> Propose:
    """Draws of which the deeper ones are from dense laws."""

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


# -- the walk --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(trees(0)))
@pytest.mark.parametrize("params", SETTINGS.values(), ids=list(SETTINGS))
@pytest.mark.parametrize("rule", list(RULES))
def test_the_walk_gives_the_targets_law(rule: str, params: SamplingParams, name: str) -> None:
    for seed in range(3):
        propose, length = trees(seed)[name], LENGTHS.get(name, 2)
        assert row_bias(RULES[rule], propose, RowTable(seed, params), length) < TOLERANCE


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("rule", list(RULES))
def test_arbitrary_trees_give_the_targets_law(rule: str, seed: int) -> None:
    propose = on_supports(mixed_tree(LawTable(POOL, seed + 50), seed))
    assert row_bias(RULES[rule], propose, RowTable(seed), 2) < TOLERANCE


@pytest.mark.parametrize("rule", list(RULES))
def test_the_walk_at_temperature_0_says_the_highest(rule: str) -> None:
    for seed in range(8):
        for name in ("plain", "point masses"):
            table = RowTable(seed, GREEDY)
            assert row_bias(RULES[rule], trees(seed)[name], table, 4) < TOLERANCE


@pytest.mark.parametrize("rule", list(RULES))
def test_draws_from_dense_laws_below_others_give_the_targets_law(rule: str) -> None:
    for seed in range(3):
        propose = dense_below(LawTable(POOL, seed + 9))
        assert row_bias(RULES[rule], propose, RowTable(seed, most=3), 3) < TOLERANCE


# -- wrong rules and drafters ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["i.i.d. siblings", "two drafters"])
def test_dropped_duplicates_are_caught(name: str) -> None:
    assert row_bias(DropsDuplicates(), trees(2)[name], RowTable(2), 2) > 1e-3


@pytest.mark.parametrize(
    "wrong", [*WRONG_DRAFTERS, falsely_stated], ids=lambda value: value.__name__
)
def test_wrong_drafters_are_caught(wrong: Callable[[LawTable], Propose]) -> None:
    biases = [
        row_bias(ExactRule(), wrong(LawTable(POOL, seed + 9, 0.0)), RowTable(seed, zeros=0.0), 2)
        for seed in range(4)
    ]
    assert max(biases) > 1e-2


# -- the one source, wrong -------------------------------------------------------------------------

LOOP = "    for draw in islice(draws, n_tested):\n"
WALKS = [
    (
        Mutant("residual-forgotten", exact, "else remaining.residual(draw.law)", "else remaining"),
        "token",
        "chain",
    ),
    (
        Mutant(
            "p-not-divided-by-q", exact, "accept(target_prob / draft_prob)", "accept(target_prob)"
        ),
        "token",
        "chain",
    ),
    (
        Mutant(
            "point-mass-not-taken-out",
            exact,
            "remaining.without(token) if draw.law is None",
            "remaining if draw.law is None",
        ),
        "token",
        "points before draws",
    ),
    (
        Mutant(
            "equal-draw-dropped",
            exact,
            LOOP,
            "    known = {draw.node: draw for draw in draws[:n_tested]}\n"
            "    for draw in known.values():\n",
        ),
        "token",
        "i.i.d. siblings",
    ),
    (
        Mutant("sibling-left-in-the-law", tree_module, "law = law.without(token)", "law = law"),
        "token",
        "siblings 3",
    ),
    (
        Mutant(
            "block-share-not-divided",
            exact,
            "share * law.probability(token) / draft_prob",
            "share * law.probability(token)",
        ),
        "exact",
        "chain",
    ),
    (
        Mutant(
            "block-residual-without-its-share",
            exact,
            "self.law.left_over(self.draft, self.share)",
            "self.law.left_over(self.draft)",
        ),
        "exact",
        "chain",
    ),
    (
        Mutant(
            "block-keeps-what-is-left",
            exact,
            "rest = self.total + (1.0 - self.share)",
            "rest = self.total",
        ),
        "exact",
        "chain",
    ),
    (
        Mutant(
            "block-token-not-renormalised",
            exact,
            "self._total = scale_to_one(self._left)",
            "self._total = float(self._left.sum())",
        ),
        "exact",
        "chain",
    ),
    (
        Mutant(
            "residual-not-renormalised",
            law_module,
            "self._with(left) if scale_to_one(left) > 0.0 else self\n\n    def left_over",
            "self._with(left) if left.sum() > 0.0 else self\n\n    def left_over",
        ),
        "token",
        "i.i.d. siblings",
    ),
    (
        Mutant(
            "residual-not-clipped",
            law_module,
            "out[i] = over if over > 0.0 else 0.0",
            "out[i] = over",
        ),
        "token",
        "chain",
    ),
    (
        Mutant(
            "less-than-top-p-kept",
            law_module,
            "wanted = share * total",
            "wanted = share * share * total",
        ),
        "token",
        "plain",
    ),
    (
        Mutant("not-tempered", law_module, "value / self._temperature", "value"),
        "token",
        "plain",
    ),
]


def plant(monkeypatch: pytest.MonkeyPatch, wrong: ModuleType, name: str) -> None:
    """Let the loop and the drafters use a wrong module's parts."""
    if name == "tree":
        monkeypatch.setattr(tree_module.Siblings, "__iter__", wrong.Siblings.__iter__)
    elif name == "law":
        for method in ("residual", "left_over"):
            monkeypatch.setattr(Law, method, getattr(wrong.Law, method))
        for method in ("law", "_cut"):
            monkeypatch.setattr(law_module.Truncation, method, getattr(wrong.Truncation, method))


@pytest.mark.parametrize(("mutant", "rule", "name"), WALKS, ids=lambda value: str(value))
def test_a_wrong_source_is_caught(
    monkeypatch: pytest.MonkeyPatch, mutant: Mutant, rule: str, name: str
) -> None:
    if mutant.module is law_module and IS_COMPILED:
        pytest.skip("compiled classes do not change: run interpreted by test_builds.py")
    wrong = mutated(mutant)
    plant(monkeypatch, wrong, mutant.module.__name__.rpartition(".")[2])
    rules = (wrong if mutant.module is exact else exact).__dict__
    decides = rules["BlockRule" if rule == "exact" else "ExactRule"]()
    length = 3 if name == "chain" else 2  # a chain of one token has no block
    params = DEFAULT.replace(temperature=0.6, top_p=0.8) if name == "plain" else CUT
    biases = [
        wrongness(
            lambda seed=seed: row_bias(decides, trees(seed)[name], RowTable(seed, params), length)
        )
        for seed in range(3)
    ]
    assert max(biases) > 1e-3


def test_an_unchanged_copy_passes() -> None:
    """Controls differ from what is shipped by their one change, not by how they are loaded."""
    for name, rule in (("ExactRule", "token"), ("BlockRule", "exact")):
        copy = mutated(Mutant("same", exact, LOOP, LOOP))
        assert row_bias(getattr(copy, name)(), trees(0)["chain"], RowTable(0), 3) < TOLERANCE
        assert RULES[rule].name == getattr(copy, name).name


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
    """Trees that are drawn depth by depth, from rows that a table has."""

    def propose(request: DraftRequest) -> DraftTree:
        source = RowsByPath(
            lambda paths: said([drafts.row([*request.tokens, *path]) for path in paths])
        )
        drafter = GrowingDrafter(source, parse_topology(shape), sampling="without")
        return drafter.propose(dataclasses.replace(request, params=drafts.params))

    return propose


@pytest.mark.parametrize("said", [whole, highest])
def test_trees_drawn_below_rows_give_the_targets_law(said: Said) -> None:
    for seed in range(2):
        for shape in ("3", "2x2", "1x1"):
            propose = below_rows(RowTable(seed + 30, most=3), shape, said)
            assert row_bias(ExactRule(), propose, RowTable(seed, most=3), 3) < TOLERANCE


VOCAB = 40


class ModelTable(RowTable):
    """A target whose rows are a model's own, moved: as its drafter it is right now and then."""

    def __init__(self, context: Context, seed: int) -> None:
        super().__init__(seed, FEW)
        context.memory.clear()
        self.size, chain = VOCAB, Topology.chain(1)
        self._model = DraftModelSource(context, chain, target_vocab_size=VOCAB)

    def row(self, prefix: Sequence[int]) -> np.ndarray:
        key = tuple(prefix)
        if key not in self._rows:
            self._model.rewind(0)
            generator = np.random.default_rng([self._seed, *key])
            moved = self._model.feed(key) + generator.standard_normal(VOCAB)
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
    topology = Topology.chain(3) if shape == "chain" else parse_topology(shape)
    source = DraftModelSource(context, topology, target_vocab_size=VOCAB)
    sampling = "with" if shape == "chain" else "without"
    return GrowingDrafter(source, topology, sampling=sampling)


def model_bias(contexts: tuple[Context, Context], shape: str) -> float:
    """Return the largest error of texts that a model's chains or trees draft."""
    drafts: list[DraftTree] = []
    draft = GrowingDrafter._plain_draft
    drafter, table = drafter_of_model(contexts[0], shape), ModelTable(contexts[1], 5)
    with pytest.MonkeyPatch.context() as patch:
        noted = lambda *args: drafts.append(draft(*args)) or drafts[-1]  # noqa: E731
        patch.setattr(GrowingDrafter, "_plain_draft", noted)
        emitted = law_with_drafter(ExactRule(), lambda: drafter, table, 3, params=FEW)
    assert len(drafts) > 20
    return largest_error(emitted, table, 3)


@pytest.mark.parametrize("shape", ["chain", "2x1", "1x2", "2x2"])
def test_drafts_that_a_model_draws_give_the_targets_law(
    contexts: tuple[Context, Context], shape: str
) -> None:
    assert model_bias(contexts, shape) < TOLERANCE


DRAWS = [
    (
        Mutant(
            "drawn-from-the-whole-law-again",
            growth,
            "tokens = choose_in_turn(noise, law, count)",
            "tokens = [noise.choose(law) for _ in range(count)]",
        ),
        "2x2",
    ),
    (
        Mutant(
            "law-of-other-draws",
            growth,
            "builder.add_siblings(parent, tokens, law)",
            "builder.add_siblings(parent, tokens, Law.normalised(law.probs**2, law.ids))",
        ),
        "2x2",
    ),
    (
        Mutant(
            "law-of-other-draws-in-chains",
            growth,
            "return [(builder.add(parent, token, law), token)]",
            "return [(builder.add(parent, token, Law.normalised(law.probs**2, law.ids)), token)]",
        ),
        "chain",
    ),
    (
        Mutant(
            "first-for-drawn",
            growth,
            "builder.add_siblings(parent, tokens, law))]",
            "builder.add_siblings(parent, law.ids[: len(tokens)].tolist(), law))]",
        ),
        "2x2",
    ),
    (
        Mutant(
            "first-for-drawn-in-chains",
            growth,
            "return [(builder.add(parent, token, law), token)]",
            "return [(builder.add(parent, int(law.ids[0]), law), int(law.ids[0]))]",
        ),
        "chain",
    ),
]


@pytest.mark.parametrize(("mutant", "shape"), DRAWS, ids=lambda value: str(value))
def test_wrong_draws_of_a_model_are_caught(
    monkeypatch: pytest.MonkeyPatch,
    contexts: tuple[Context, Context],
    mutant: Mutant,
    shape: str,
) -> None:
    wrong = mutated(mutant)
    for name in ("tree_steps", "proposal_scheme"):
        monkeypatch.setattr(growing, name, getattr(wrong, name))
    assert wrongness(lambda: model_bias(contexts, shape)) > 1e-3


def test_an_unchanged_copy_of_growth_passes(
    monkeypatch: pytest.MonkeyPatch, contexts: tuple[Context, Context]
) -> None:
    same = mutated(Mutant("same", growth, "propose(builder, node", "propose(builder, node"))
    for name in ("tree_steps", "proposal_scheme"):
        monkeypatch.setattr(growing, name, getattr(same, name))
    assert model_bias(contexts, "2x2") < TOLERANCE


def wrongness(bias: Callable[[], float]) -> float:
    """Return a bias; infinite where a token was drawn that its stated law does not have."""
    try:
        return bias()
    except OptionError:
        return math.inf
