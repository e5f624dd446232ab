"""Greedy chains: tokens, cache and errors are those of one evaluation after another."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import numpy as np
import pytest

from specrun.bindings.contexts.batch import Batch
from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.direct_calls import CALLS
from specrun.bindings.errors import DecodeError, DecodeFailedError
from specrun.bindings.models.model import Model
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime.drafters.draft_model import model_drafter, state
from specrun.runtime.drafters.growing import GrowingDrafter
from specrun.runtime.laws import SamplingParams, SeededNoise
from specrun.runtime.laws.transform import greedy_token
from specrun.runtime.round import DraftRequest
from specrun.runtime.trees import DraftTree, Topology

GREEDY = SamplingParams(temperature=0.0)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
VOCAB = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = tmp_path_factory.mktemp("chain") / "small.gguf"
    write_random_llama(path, RandomLlama(vocab_size=VOCAB, width=32, ffn=64, layers=2, scale=2.0))
    with Model(path) as opened:
        yield opened


@pytest.fixture
def context(model: Model) -> Iterator[Context]:
    options = ContextOptions(n_ctx=256, n_threads=1, n_threads_batch=1)
    with Context(model, options) as opened:
        yield opened


def drafter_of(context: Context, known: int, n: int) -> GrowingDrafter:
    cache = state.DraftModelState(context, target_vocab_size=known)
    return model_drafter(cache, Topology.chain(n))


def request(tokens: list[int], ends: frozenset[int] = frozenset()) -> DraftRequest:
    return DraftRequest(tokens, GREEDY, SeededNoise(0), 100, 100, ends)


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
        tree = drafter.propose(request(PROMPT))
        assert tree == DraftTree.chain(wanted)
        # All but the last token of the draft are cached, and the memory holds no more.
        assert drafter.source.state.cached == [*PROMPT, *wanted[:-1]]
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
        trees.append((drafter.propose(request(PROMPT)), drafter.source.state.cached))
        context.memory.clear()
    assert trees[0] == trees[1]
    # One serves a whole chain, if there was a compiler.
    assert [step is None for step in steppers] == [CALLS is None]


def test_a_chain_ends_behind_an_end_token(context):
    wanted = step_by_step(context, PROMPT, 7, VOCAB)
    for end in set(wanted):
        drafter = drafter_of(context, VOCAB, 7)
        tree = drafter.propose(request(PROMPT, frozenset({end, VOCAB + 1})))
        assert list(tree.tokens) == wanted[: wanted.index(end) + 1]
        context.memory.clear()


def test_time_in_evaluations_is_counted(context):
    drafter = drafter_of(context, VOCAB, 6)
    drafter.propose(request(PROMPT[:-1]))
    before, started = context.native_seconds, time.perf_counter()
    drafter.propose(request(PROMPT))
    assert 0.0 < context.native_seconds - before < time.perf_counter() - started


def test_a_failed_evaluation_leaves_a_state_that_drafts_as_a_new_one(context):
    own = drafter_of(context, VOCAB, 4)
    wanted = own.propose(request(PROMPT))
    kept = own.source.state
    # More than there are cells: llama.cpp finds no slot in the midst of the chain.
    with pytest.raises(DecodeError, match="no room for 1 more tokens"):
        for _ in range(2 * context.n_ctx):
            kept.feed_one(5)
    own.begin(PROMPT)
    assert own.propose(request(PROMPT)) == wanted
    assert context.memory.last_position() == len(PROMPT) + 2


def test_a_row_that_is_no_law_is_refused(model, context, monkeypatch):
    drafter = drafter_of(context, VOCAB, 4)
    drafter.propose(request(PROMPT))

    feed_one = state.DraftModelState.feed_one

    def broken(self: state.DraftModelState, token: int) -> np.ndarray:
        row = feed_one(self, token)
        row[17] = math.nan
        return row

    monkeypatch.setattr(state.DraftModelState, "feed_one", broken)
    drafter.begin(PROMPT)
    with pytest.raises(DecodeFailedError, match="logits of nan"):
        drafter.propose(request(PROMPT))


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
    drafter.propose(request(PROMPT))
    assert counting.calls == 6
