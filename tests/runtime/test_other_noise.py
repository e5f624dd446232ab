"""Rules and drafts decide by any noise source: its errors, and what they leave behind."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from support.random_rounds import random_round
from support.tree_laws import drafted_bits

from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.models.model import Model
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime.acceptance import BlockRule, ExactRule
from specrun.runtime.drafters.draft_model import DraftModelSource
from specrun.runtime.drafters.growing import GrowingDrafter
from specrun.runtime.laws import Law, NoiseSource, SamplingParams, SeededNoise
from specrun.runtime.laws.law import RowLaws
from specrun.runtime.laws.transform import row_cuts
from specrun.runtime.round import DraftRequest
from specrun.runtime.trees import DraftTree, Topology, parse_topology

RULES = {"exact": BlockRule(), "token": ExactRule()}


class Recorded:
    """Another source's decisions, every call written down; the one numbered `fails` raises."""

    def __init__(self, source: NoiseSource, fails: int = -1, error: type[BaseException] = OSError):
        self._source, self._fails, self._error = source, fails, error
        self.calls: list[tuple[object, ...]] = []

    def _note(self, *call: object) -> None:
        if len(self.calls) == self._fails:
            if self._error is KeyboardInterrupt:
                signal.raise_signal(signal.SIGINT)
            raise self._error(f"call {self._fails}")
        self.calls.append(call)

    def seek(self, position: int) -> None:
        self._note("seek", position)
        self._source.seek(position)

    def accept(self, probability: float) -> bool:
        self._note("accept", probability)
        return self._source.accept(probability)

    def choose(self, law: Law) -> int:
        ids = range(len(law.probs)) if law.ids is None else law.ids.tolist()
        self._note("choose", law.probs.tobytes(), tuple(ids))
        return self._source.choose(law)

    def for_drafting(self, round_start: int) -> NoiseSource:
        return self._source.for_drafting(round_start)


def laws_of(rows: list[np.ndarray], params: SamplingParams) -> RowLaws:
    cuts = row_cuts(params)
    assert cuts is not None
    return RowLaws(cuts, rows.__getitem__)


@pytest.mark.parametrize("name", list(RULES))
def test_other_sources_decide_as_an_answers_own(name: str) -> None:
    """The same decisions by numbers keyed alike, whether the source is ours or passes calls on."""
    kinds = set()
    for seed in range(200):
        tree, rows, params = random_round(seed)
        laws, recorded = laws_of(rows, params), Recorded(SeededNoise(seed))
        kept = RULES[name].accept(tree, laws, recorded, seed)
        assert kept == RULES[name].accept(tree, laws, SeededNoise(seed), seed)
        kinds.add(tuple(call[0] for call in recorded.calls))
    assert len(kinds) > 10


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("name", list(RULES))
def test_an_error_of_any_call_comes_through(name: str, error: type[BaseException]) -> None:
    rule, raised = RULES[name], 0
    for seed in range(40):
        tree, rows, params = random_round(seed)
        laws = laws_of(rows, params)
        whole = Recorded(SeededNoise(seed))
        kept = rule.accept(tree, laws, whole, seed)
        for number in range(len(whole.calls)):
            noise = Recorded(SeededNoise(seed), number, error)
            with pytest.raises(error):
                rule.accept(tree, laws, noise, seed)
            assert noise.calls == whole.calls[:number]
            raised += 1
        assert rule.accept(tree, laws, SeededNoise(seed), seed) == kept
    assert raised > 100


def test_nothing_is_held_after_errors_and_walks() -> None:
    tree, rows, params = random_round(11)
    laws = laws_of(rows, params)
    calls = len(walked(tree, laws, -1))
    laws_of_draws = (draw.law for draws in tree.draws.values() for draw in draws)
    held = [tree.tokens, *rows, *(each for each in laws_of_draws if each is not None)]

    def counts() -> list[int]:
        return [sys.getrefcount(each) for each in held]

    for _ in range(3):  # caches fill
        [walked(tree, laws, number) for number in range(calls + 1)]
    gc.collect()
    before, blocks = counts(), sys.getallocatedblocks()
    for _ in range(200):
        for number in range(calls + 1):
            walked(tree, laws, number)
    gc.collect()
    assert counts() == before
    assert sys.getallocatedblocks() - blocks < 100


def walked(tree: DraftTree, laws: RowLaws, fails: int) -> list[tuple[object, ...]]:
    noise = Recorded(SeededNoise(1), fails)
    try:
        BlockRule().accept(tree, laws, noise, 0)
    except OSError as error:
        error.__traceback__ = None
    return noise.calls


# -- drafts ----------------------------------------------------------------------------------------

VOCAB = 60
PROMPT = [3, 1, 4, 1, 5]
PARAMS = SamplingParams(temperature=1.0, top_k=5, top_p=1.0, min_p=0.0)


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Context]:
    path = tmp_path_factory.mktemp("other noise") / "small.gguf"
    write_random_llama(path, RandomLlama(vocab_size=VOCAB, width=16, ffn=32, layers=1, scale=2.0))
    options = ContextOptions(n_ctx=64, n_threads=1, n_threads_batch=1, n_sequences=4, n_outputs=4)
    with Model(path) as model, Context(model, options) as opened:
        yield opened


def chain_of(context: Context) -> GrowingDrafter:
    context.memory.clear()
    source = DraftModelSource(context, Topology.chain(4), target_vocab_size=VOCAB)
    return GrowingDrafter(source, Topology.chain(4), sampling="with")


def tree_of(context: Context) -> GrowingDrafter:
    context.memory.clear()
    shape = parse_topology("2x2x1")
    source = DraftModelSource(context, shape, target_vocab_size=VOCAB)
    return GrowingDrafter(source, shape, sampling="without")


def drafted(drafter: GrowingDrafter, noise: NoiseSource) -> list[object]:
    return drafted_bits(drafter.propose(DraftRequest(PROMPT, PARAMS, noise, 100, 100)))


@pytest.mark.parametrize("make", [chain_of, tree_of])
def test_plain_drafts_call_what_other_drafts_call(
    context: Context, make: Callable[[Context], GrowingDrafter]
) -> None:
    for seed in range(12):
        source = SeededNoise(seed).for_drafting(5)
        plain, in_steps, drafter = Recorded(source), Recorded(source), make(context)
        drafter._is_plain = False
        expected = drafted(drafter, in_steps)
        assert drafted(make(context), plain) == expected
        assert plain.calls == in_steps.calls
        assert drafted(make(context), source)[:2] == expected[:2]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("make", [chain_of, tree_of])
def test_a_draft_that_an_error_ended_leaves_nothing_behind(
    context: Context,
    make: Callable[[Context], GrowingDrafter],
    error: type[BaseException],
) -> None:
    whole = Recorded(SeededNoise(2))
    expected = drafted(make(context), whole)
    assert len(whole.calls) > 6
    for number in range(len(whole.calls)):
        drafter, noise = make(context), Recorded(SeededNoise(2), number, error)
        with pytest.raises(error):
            drafted(drafter, noise)
        assert noise.calls == whole.calls[:number]
        drafter.rewind(len(PROMPT) - 1)
        assert context.memory.last_position() <= len(PROMPT) - 2
        assert drafted(drafter, SeededNoise(2))[:4] == expected[:4]  # laws but for rounding


# -- numbers ---------------------------------------------------------------------------------------

_WORD, _GOLDEN = 2**64 - 1, 0x9E3779B97F4A7C15


def word_of(uniform: int) -> int:
    """The word whose second number has these 53 bits: SplitMix64's mixing, backwards."""

    def unshift(word: int, bits: int) -> int:
        found = word
        for _ in range(64 // bits + 1):
            found = word ^ (found >> bits)
        return found

    word = unshift(uniform << 11, 31) * pow(0x94D049BB133111EB, -1, 2**64) & _WORD
    word = unshift(word, 27) * pow(0xBF58476D1CE4E5B9, -1, 2**64) & _WORD
    return (unshift(word, 30) - 2 * _GOLDEN) & _WORD


def test_an_answers_own_numbers_draw_the_law() -> None:
    """The share of all 2^53 numbers that name a token is its probability, to 1e-15 and its end."""
    generator = np.random.default_rng(4)
    for size in (2, 3, 40, 128):
        probs = generator.dirichlet(np.full(size, 0.4))
        probs[generator.integers(size)] = 0.0
        probs /= probs.sum()
        ends = [0]
        for token in range(size):
            low, high = ends[-1], 2**53  # the first number that names a later token
            while low < high:
                middle = (low + high) // 2
                [named] = Law(probs).draw_distinct(1, word_of(middle), 1)
                low, high = (middle + 1, high) if named <= token else (low, middle)
            ends.append(low)
        shares = np.diff(ends) / 2.0**53
        assert np.abs(shares - probs).max() < 1e-14
