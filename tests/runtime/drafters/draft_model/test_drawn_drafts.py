"""Drafts grown from rows alone: tokens, laws, cache and errors are those of all other drafts."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from support.tree_laws import drafted_bits

from specrun.bindings.contexts.batch import Batch
from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.direct_calls import CALLS
from specrun.bindings.errors import DecodeFailedError, OptionError
from specrun.bindings.models.model import Model
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime.drafters.draft_model import DraftModelSource
from specrun.runtime.drafters.growing import GrowingDrafter
from specrun.runtime.drafters.growing.source import NodeRows
from specrun.runtime.laws import SamplingParams, SeededNoise
from specrun.runtime.laws.transform import greedy_token
from specrun.runtime.round import DraftRequest
from specrun.runtime.trees import DraftTree, Topology, parse_topology

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
VOCAB = 300
GREEDY = SamplingParams(temperature=0.0)
SETTINGS = [
    SamplingParams(temperature=0.8, top_k=40),
    SamplingParams(temperature=1.3, top_k=128, top_p=1.0, min_p=0.0),
    SamplingParams(temperature=0.1, top_k=5, top_p=0.5),
    SamplingParams(temperature=1.0, top_k=1),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = tmp_path_factory.mktemp("chain") / "small.gguf"
    write_random_llama(path, RandomLlama(vocab_size=VOCAB, width=32, ffn=64, layers=2, scale=2.0))
    with Model(path) as opened:
        yield opened


@pytest.fixture
def context(model: Model) -> Iterator[Context]:
    options = ContextOptions(n_ctx=256, n_threads=1, n_threads_batch=1, n_sequences=8, n_outputs=8)
    with Context(model, options) as opened:
        yield opened


def drafter_of(context: Context, known: int = VOCAB, n: int = 6) -> GrowingDrafter:
    source = DraftModelSource(context, Topology.chain(n), target_vocab_size=known)
    return GrowingDrafter(source, Topology.chain(n), sampling="with")


def in_steps(drafter: GrowingDrafter) -> GrowingDrafter:
    """Let a drafter grow as it does if stops, rules or other conversations look at rows."""
    drafter._is_plain = False
    return drafter


def request(
    tokens: list[int], params: SamplingParams, seed: int, ends: frozenset[int] = frozenset()
) -> DraftRequest:
    noise = SeededNoise(seed).for_drafting(len(tokens))
    return DraftRequest(tokens, params, noise, 100, 100, ends)


@pytest.mark.parametrize("known", [VOCAB, 200])
@pytest.mark.parametrize("params", SETTINGS)
def test_draws_and_laws_are_those_of_other_drafts(context, params, known):
    drafted: dict[str, list[object]] = {"plain": [], "in steps": []}
    for way, trees in drafted.items():
        context.memory.clear()
        drafter, text = drafter_of(context, known), list(PROMPT)
        if way == "in steps":
            in_steps(drafter)
        for seed in range(12):
            # Some rounds begin with several tokens that are not cached, others with one.
            tree = drafter.propose(request(text, params, seed, frozenset({17, 40})))
            trees.append((drafted_bits(tree), list(drafter.source.cached)))
            assert context.memory.last_position() == len(drafter.source.cached) - 1
            text += [*tree.tokens[: seed % 3], seed]
            drafter.rewind(len(text) - 1)
    assert drafted["plain"] == drafted["in steps"]
    assert len({str(tokens) for tokens, _ in drafted["plain"]}) > 6


def test_a_chain_ends_behind_an_end_token(context):
    params = SamplingParams(temperature=1.0, top_k=100, top_p=1.0, min_p=0.0)
    whole = drafter_of(context).propose(request(PROMPT, params, 4)).tokens
    assert len(whole) == 6
    for end in set(whole):
        context.memory.clear()
        tree = drafter_of(context).propose(request(PROMPT, params, 4, frozenset({end})))
        assert tree.tokens == whole[: whole.index(end) + 1]


def break_rows(monkeypatch: pytest.MonkeyPatch, number: int, row: int = 0) -> None:
    """Write a NaN into a row of the evaluation that is read as the `number`-th from now."""
    read: list[int] = []
    rows_of = DraftModelSource.below

    def below(self: DraftModelSource, parents: Sequence[int], tokens: Sequence[int]) -> NodeRows:
        found = rows_of(self, parents, tokens)
        read.append(len(tokens))
        if len(read) == number:
            found.whole[row][17] = math.nan
        return found

    monkeypatch.setattr(DraftModelSource, "below", below)


@pytest.mark.parametrize("number", [1, 5])
@pytest.mark.parametrize("params", [GREEDY, SETTINGS[0]])
def test_a_row_that_is_no_law_is_refused(context, monkeypatch, number, params):
    drafter = drafter_of(context)
    break_rows(monkeypatch, number)
    with pytest.raises(DecodeFailedError, match="logits of nan"):
        drafter.propose(request(PROMPT, params, 1))


# -- greedy chains ---------------------------------------------------------------------------------


def step_by_step(context: Context, tokens: list[int], n: int, known: int) -> list[int]:
    """The most likely tokens in turn, each evaluated alone by the binding."""
    context.memory.clear()
    batch, drafted = Batch(context.n_batch, 1), list[int]()
    batch.fill_chain(tokens, 0, [0], 1)
    while True:
        drafted.append(greedy_token(context.decode(batch).logits(0)[:known], GREEDY))
        if len(drafted) == n:
            context.memory.clear()
            return drafted
        batch.fill_one(drafted[-1], len(tokens) + len(drafted) - 1)


@pytest.mark.parametrize("known", [VOCAB, 100])
def test_chains_are_those_of_single_steps(context, known):
    drafted = {n: step_by_step(context, PROMPT, n, known) for n in (1, 2, 7)}
    for n, wanted in drafted.items():
        drafter = drafter_of(context, known, n)
        tree = drafter.propose(request(PROMPT, GREEDY, 0))
        assert tree == DraftTree.chain(wanted)
        # All but the last token of the draft are cached, and the memory holds no more.
        assert drafter.source.cached == [*PROMPT, *wanted[:-1]]
        assert context.memory.last_position() == len(PROMPT) + n - 2
        context.memory.clear()
    # A control: the chain hangs on what was evaluated.
    assert drafted[7] != step_by_step(context, [*PROMPT[:-1], 7], 7, known)


def test_uncompiled_steps_give_the_same(context, monkeypatch):
    trees, steppers = [], list[object]()
    stepper = Context.stepper
    for makes in (lambda *args: steppers.append(stepper(*args)) or steppers[-1], lambda *_: None):
        monkeypatch.setattr(Context, "stepper", makes)
        drafter = drafter_of(context, VOCAB, 6)
        trees.append((drafter.propose(request(PROMPT, GREEDY, 0)), drafter.source.cached))
        context.memory.clear()
    assert trees[0] == trees[1]
    # One serves a whole chain, if there was a compiler.
    assert [step is None for step in steppers] == [CALLS is None]


def test_time_in_evaluations_is_counted(context):
    drafter = drafter_of(context, VOCAB, 6)
    drafter.propose(request(PROMPT[:-1], GREEDY, 0))
    before, started = context.native_seconds, time.perf_counter()
    drafter.propose(request(PROMPT, GREEDY, 0))
    assert 0.0 < context.native_seconds - before < time.perf_counter() - started


def test_what_stands_in_for_the_library_sees_every_evaluation(context):
    class Counting:
        def __init__(self, native: object) -> None:
            self.native, self.calls = native, 0

        def __getattr__(self, name: str) -> object:
            return getattr(self.native, name)

        def llama_decode(self, *args: object) -> int:
            self.calls += 1
            return self.native.llama_decode(*args)

    context._native = counting = Counting(context._native)
    drafter = drafter_of(context, VOCAB, 6)
    drafter.propose(request(PROMPT, GREEDY, 0))
    assert counting.calls == 6


# -- trees -----------------------------------------------------------------------------------------

TREES = ["4x2x2", "2x1x3", "2x1x1", "5", "0 1 2 10 20 21 100 210 211"]


def tree_drafter(context: Context, tree: str, known: int = VOCAB) -> GrowingDrafter:
    source = DraftModelSource(context, parse_topology(tree), target_vocab_size=known)
    return GrowingDrafter(source, parse_topology(tree), sampling="without")


def check_memory(context: Context, cache: DraftModelSource) -> None:
    """Assert that `main` holds the text, and every other sequence the beginning that is noted."""
    for sequence, held in enumerate(cache.nodes.synced):
        end = len(cache.cached) if sequence == cache.main else held
        assert context.memory.last_position(sequence) == end - 1
    assert cache.nodes.synced[cache.main] <= len(cache.cached)


@pytest.mark.parametrize("known", [VOCAB, 200])
@pytest.mark.parametrize("params", SETTINGS)
@pytest.mark.parametrize("shape", TREES)
def test_trees_are_those_of_other_drafts(context, shape, params, known):
    drafted: dict[str, list[object]] = {"plain": [], "in steps": []}
    for way, rounds in drafted.items():
        context.memory.clear()
        drafter, text = tree_drafter(context, shape, known), list(PROMPT)
        if way == "in steps":
            in_steps(drafter)
        cache, generator = drafter.source, np.random.default_rng(7)
        for seed in range(16):
            start = len(text)
            most = (100, 100) if seed % 4 else (2, 5)  # limits cut some of the shapes
            tree = drafter.propose(
                dataclasses.replace(
                    request(text, params, seed), max_depth=most[0], max_nodes=most[1]
                )
            )
            # Paths of every kind, down to leaves and off the tree; then the target's own token.
            path = tree.path_to(int(generator.integers(-1, len(tree))))
            text += [tree.tokens[node] for node in path[: int(generator.integers(0, 5))]]
            text.append(int(generator.integers(0, known)))
            cache.keep(text[start:])
            assert cache.cached == text[: len(cache.cached)]
            check_memory(context, cache)
            held = list(cache.cached), cache.main, list(cache.nodes.synced)
            rounds.append((drafted_bits(tree), *held))
    assert drafted["plain"] == drafted["in steps"]
    assert len({str(made[0][0]) for made in drafted["plain"]}) > 10


def test_a_tree_of_more_paths_than_sequences_is_refused(context):
    with pytest.raises(OptionError, match="more paths than the draft context's 8 sequences"):
        tree_drafter(context, "9x2").propose(request(PROMPT, SETTINGS[1], 1))


def test_a_tree_of_rows_that_are_no_laws_is_refused(context, monkeypatch):
    drafter = tree_drafter(context, "3x2x2")
    break_rows(monkeypatch, 1, row=2)
    with pytest.raises(DecodeFailedError, match="logits of nan"):
        drafter.propose(request(PROMPT, SETTINGS[0], 1))


@pytest.mark.parametrize("begun", [PROMPT, PROMPT[:-1]])
def test_an_interrupted_tree_leaves_nothing_behind(context, monkeypatch, begun):
    drafter = tree_drafter(context, "3x2x2")
    drafter.source.feed(begun[:-1])

    below, depths = DraftModelSource.below, list[int]()

    def interrupted(self: DraftModelSource, *depth: Sequence[int]) -> NodeRows:
        rows = below(self, *depth)
        depths.append(len(depth[1]))
        if len(depths) == 2:  # the last one that is evaluated
            raise KeyboardInterrupt
        return rows

    with monkeypatch.context() as patched:
        patched.setattr(DraftModelSource, "below", interrupted)
        with pytest.raises(KeyboardInterrupt):
            drafter.propose(request(PROMPT, SETTINGS[0], 1))
    drafter.rewind(len(PROMPT) - 1)
    check_memory(context, drafter.source)
    tree = drafter.propose(request(PROMPT, SETTINGS[0], 2))
    context.memory.clear()
    again = tree_drafter(context, "3x2x2").propose(request(PROMPT, SETTINGS[0], 2))
    assert again.tokens == tree.tokens
