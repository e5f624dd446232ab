"""Greedy chains by compiled code: tokens, cache and errors are those of one step after another."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from specrun.bindings.contexts.batch import Batch
from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import DecodeError, DecodeFailedError
from specrun.bindings.models.model import Model
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime.compiled import LOOPS
from specrun.runtime.drafters.draft_model import model_drafter, state
from specrun.runtime.drafters.growing import GrowingDrafter
from specrun.runtime.laws import SamplingParams, SeededNoise
from specrun.runtime.laws.transform import greedy_token
from specrun.runtime.round import DraftRequest
from specrun.runtime.trees import DraftTree, Topology

pytestmark = pytest.mark.skipif(LOOPS is None, reason="installed without a compiler")
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


def test_compiled_code_is_asked_and_python_says_the_same(context, monkeypatch):
    asked = []
    repeat = Context.repeat
    monkeypatch.setattr(Context, "repeat", lambda *args: asked.append(args) or repeat(*args))
    trees = []
    for loops in (LOOPS, None):
        monkeypatch.setattr(state, "LOOPS", loops)
        drafter = drafter_of(context, VOCAB, 6)
        trees.append((drafter.propose(request(PROMPT)), drafter.source.state.cached, len(asked)))
        context.memory.clear()
    compiled, python = trees
    assert compiled[:2] == python[:2]
    assert (compiled[2], python[2]) == (1, 1)


def test_a_chain_ends_behind_an_end_token(context):
    wanted = step_by_step(context, PROMPT, 7, VOCAB)
    for end in set(wanted):
        drafter = drafter_of(context, VOCAB, 7)
        tree = drafter.propose(request(PROMPT, frozenset({end, VOCAB + 1})))
        assert list(tree.tokens) == wanted[: wanted.index(end) + 1]
        context.memory.clear()


def test_time_in_evaluations_is_counted(context):
    drafter = drafter_of(context, VOCAB, 6)
    seconds: list[float] = []
    repeat = Context.repeat

    def repeating(self: Context, *args: object) -> object:
        before = self.native_seconds
        done = repeat(self, *args)
        seconds.append(self.native_seconds - before)
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Context, "repeat", repeating)
        drafter.propose(request(PROMPT))
    assert 0.0 < seconds[0] < math.inf


def test_a_failed_evaluation_leaves_a_state_that_drafts_as_a_new_one(context):
    own = drafter_of(context, VOCAB, 4)
    wanted = own.propose(request(PROMPT))
    kept = own.source.state
    # More than there are cells: llama.cpp finds no slot in the midst of the chain.
    with pytest.raises(DecodeError, match="no room for 1 more tokens"):
        kept.feed_likeliest(5, 2 * context.n_ctx, frozenset())
    own.begin(PROMPT)
    assert own.propose(request(PROMPT)) == wanted
    assert context.memory.last_position() == len(PROMPT) + 2


def test_a_row_that_is_no_law_is_refused(model, context, monkeypatch):
    drafter = drafter_of(context, VOCAB, 4)
    drafter.propose(request(PROMPT))

    def broken(addresses: tuple[int, ...], *rest: object) -> tuple[int, float, list[int]]:
        code, seconds, tokens = LOOPS.greedy_chain(addresses, *rest)
        rows = context._buffers.logits(1)
        rows[0][17] = math.nan
        return code, seconds, [*tokens[:-1], -1]

    class Broken:
        BATCH_BYTES = LOOPS.BATCH_BYTES
        greedy_chain = staticmethod(broken)

    monkeypatch.setattr(state, "LOOPS", Broken)
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
