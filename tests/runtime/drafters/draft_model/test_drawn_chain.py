"""Chains of draws by compiled code: tokens, laws, cache and errors are those of step after step."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest

from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import DecodeFailedError
from specrun.bindings.models.model import Model
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime.compiled import LOOPS
from specrun.runtime.drafter import DraftRequest
from specrun.runtime.drafters.draft_model import state
from specrun.runtime.drafters.draft_model.chain import DraftModelDrafter
from specrun.runtime.noise import SeededNoise
from specrun.runtime.sampling import SamplingParams
from specrun.runtime.tree import DraftTree

pytestmark = pytest.mark.skipif(LOOPS is None, reason="installed without a compiler")
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
VOCAB = 300
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
    with Context(model, ContextOptions(n_ctx=256, n_threads=1, n_threads_batch=1)) as opened:
        yield opened


def drafter_of(context: Context, known: int = VOCAB) -> DraftModelDrafter:
    cache = state.DraftModelState(context, target_vocab_size=known)
    return DraftModelDrafter(cache, num_draft_tokens=6)


def request(
    tokens: list[int], params: SamplingParams, seed: int, ends: frozenset[int] = frozenset()
) -> DraftRequest:
    noise = SeededNoise(seed).for_drafting(len(tokens))
    return DraftRequest(tokens, params, noise, 100, 100, ends)


def said(tree: DraftTree) -> list[tuple[int, bytes, bytes]]:
    """The tokens of a chain, and the laws they were drawn from, bit by bit."""
    laws = [tree.draws[node - 1][0].law for node in range(len(tree))]
    assert all(law is not None and law.ids is not None for law in laws)
    pairs = zip(tree.tokens, laws, strict=True)
    return [(token, law.probs.tobytes(), law.ids.tobytes()) for token, law in pairs]


@pytest.mark.parametrize("known", [VOCAB, 200])
@pytest.mark.parametrize("params", SETTINGS)
def test_draws_and_laws_are_those_of_single_steps(context, monkeypatch, params, known):
    asked: list[object] = []
    repeat = Context.repeat
    monkeypatch.setattr(Context, "repeat", lambda *args: asked.append(args) or repeat(*args))
    drafted: dict[str, list[object]] = {"compiled": [], "python": []}
    for way, trees in drafted.items():
        monkeypatch.setattr(state, "LOOPS", LOOPS if way == "compiled" else None)
        context.memory.clear()
        drafter, text = drafter_of(context, known), list(PROMPT)
        for seed in range(12):
            # Some rounds begin with several tokens that are not cached, others with one.
            tree = drafter.propose(request(text, params, seed, frozenset({17, 40})))
            trees.append((said(tree), list(drafter._state.cached)))
            assert context.memory.last_position() == len(drafter._state.cached) - 1
            text += [*tree.tokens[: seed % 3], seed]
            drafter.rewind(len(text) - 1)
    assert drafted["compiled"] == drafted["python"]
    assert len(asked) >= 10
    assert len({str(tokens) for tokens, _ in drafted["compiled"]}) > 6


def test_a_chain_ends_behind_an_end_token(context):
    params = SamplingParams(temperature=1.0, top_k=100, top_p=1.0, min_p=0.0)
    whole = drafter_of(context).propose(request(PROMPT, params, 4)).tokens
    assert len(whole) == 6
    for end in set(whole):
        context.memory.clear()
        tree = drafter_of(context).propose(request(PROMPT, params, 4, frozenset({end})))
        assert tree.tokens == whole[: whole.index(end) + 1]


def test_a_row_that_is_no_law_is_refused(context, monkeypatch):
    drafter = drafter_of(context)

    def broken(addresses: tuple[int, ...], *rest: object) -> tuple[int, float, list[int]]:
        code, seconds, tokens = LOOPS.drawn_chain(addresses, *rest)
        context._buffers.logits(1)[0][17] = math.nan
        return code, seconds, [*tokens[:-1], -1]

    class Broken:
        BATCH_BYTES = LOOPS.BATCH_BYTES
        drawn_chain = staticmethod(broken)

    monkeypatch.setattr(state, "LOOPS", Broken)
    with pytest.raises(DecodeFailedError, match="logits of nan"):
        drafter.propose(request(PROMPT, SETTINGS[0], 1))


def test_wrong_arguments_are_refused():
    pair = np.zeros(4, np.intp), np.zeros(4)
    cuts = np.exp, 1.0, -math.inf, 1.0
    for words, arrays, counts in [((1,), (), []), ((1,), (pair,), ()), ([1], [pair], [])]:
        with pytest.raises(TypeError):
            LOOPS.drawn_chain((0,) * 5, 1, 0, 9, frozenset(), words, arrays, counts, cuts)
    with pytest.raises(TypeError):
        LOOPS.drawn_chain((0,) * 4, 1, 0, 9, frozenset(), (), (), [], cuts)
