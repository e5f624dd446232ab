"""`partial`: the target's weights with a bounded cache, alone and as the middle of TriForce.

KV truth: after any feeds, drafts and cuts the next logits equal a fresh evaluation of the kept
tokens (F32, flash attention off, 1e-5), which a window off by a token does not. Laws: chi-square of
whole texts beyond the window against the target's joint law (`support.joint_law`: hypothesis,
chance of a false alarm, and a control of the same size that must fail).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from support.joint_law import (
    ALPHA,
    REJECTED,
    KeepsTooMuch,
    Text,
    model_joint_law,
    p_value,
    sampled_texts,
)
from support.tiny_models import F32, fresh_logits

from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.models.model import Model
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.drafters.build import build_drafter
from specrun.runtime.drafters.combinators import CascadeDrafter, DraftModelTarget
from specrun.runtime.drafters.environment import DraftEnvironment
from specrun.runtime.drafters.growing import GrowingDrafter
from specrun.runtime.drafters.partial import (
    ChunkMemory,
    KeptTokens,
    PartialSource,
    Window,
)
from specrun.runtime.language import quoted
from specrun.runtime.laws import SeededNoise
from specrun.runtime.planning import CostCurve
from specrun.runtime.round import DraftRequest
from specrun.runtime.trees import ROOT, DraftTree, Topology

pytestmark = pytest.mark.long

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4, 1, 5, 9, 2, 6, 8, 7]
WHOLE = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
DRAWN = ["partial(sink=2, window=6, n=4)", "partial(sink=0, window=9, tree=2x2)"]
TRIFORCE = "cascade(partial(sink=2, window=6, n=4), draft(FILE, n=2))"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("partial")
    for name, shape in {
        "target": {"vocab_size": 400, "scale": 4.0, "seed": 1},
        "small": {"vocab_size": 400, "scale": 3.0, "seed": 1, "layers": 1},
        "open": {"vocab_size": 12, "scale": 1.5, "seed": 1, "layers": 3},
        "open small": {"vocab_size": 12, "scale": 0.8, "seed": 2},
    }.items():
        write_random_llama(folder / f"{name}.gguf", RandomLlama(**shape))
    return folder


@pytest.fixture(scope="module")
def target(models: Path) -> Iterator[Model]:
    with Model(models / "target.gguf") as model:
        yield model


def open_pair(models: Path, drafter: str, small: str = "small", **options: object) -> Runtime:
    expression = drafter.replace("FILE", quoted(str(models / f"{small}.gguf")))
    name = {"small": "target", "open small": "open"}[small]
    return Runtime(models / f"{name}.gguf", drafter=expression, **{**F32, **options})


# -- the window ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sink", "size"), [(0, 1), (4, 5), (3, 8), (20, 6)])
def test_a_window_holds_its_size_at_least_and_twice_that_at_most(sink: int, size: int) -> None:
    kept = KeptTokens(Window(sink, size))
    for length in range(200):
        assert kept.is_to_move(length, length) == (kept.first != kept.window.first_kept(length))
        kept.move(length)
        cells = kept.cells(length)
        assert cells == len({*range(min(sink, length)), *range(kept.first, length)})
        assert min(length, sink + size) <= cells <= kept.window.most_cells
        if kept.first > sink:
            assert size <= length - kept.first < 2 * size
            assert kept.cells(kept.first - 1) == sink
        assert kept.tokens(cells) == length
    assert kept.first > sink


# -- the cache is true -----------------------------------------------------------------------------


def kept_tokens(window: Window, tokens: Sequence[int], root: int, *, shift: int = 0) -> list[int]:
    """What a window keeps of a text whose round began after `root` tokens."""
    first = window.first_kept(root) + shift
    return [*tokens[: window.sink], *tokens[max(window.sink, first) :]]


def partial_source(context: Context, kept: KeptTokens) -> PartialSource:
    return PartialSource(context, Topology.chain(4), kept, target_vocab_size=400)


@pytest.mark.parametrize("window", [Window(2, 6), Window(0, 5), Window(4, 9)])
def test_after_any_rounds_the_logits_are_those_of_the_kept_tokens(
    target: Model, window: Window
) -> None:
    """Texts that grow, are drafted on, cut back to anywhere and taken up again."""
    rng = np.random.default_rng(window.size)
    options = ContextOptions(**{**F32, "n_ctx": window.most_cells + 8}, n_sequences=2, n_outputs=2)
    moved = different = 0
    with Context(target, options) as context:
        state = partial_source(context, KeptTokens(window))
        text: list[int] = []
        for _ in range(40):
            if text and rng.random() < 0.4:  # another text that shares a beginning
                text = text[: rng.integers(0, len(text))]
            text += rng.integers(0, 400, rng.integers(1, 9)).tolist()
            state.begin(text)
            state.rewind(min(len(state.cached), len(text) - 1))
            row = state.feed(text[len(state.cached) :])
            root = len(text)
            wanted = fresh_logits(target, kept_tokens(window, text, root))[-1]
            np.testing.assert_allclose(row, wanted, atol=1e-5)
            if window.first_kept(root) > window.sink:
                moved += 1
                wrong = fresh_logits(target, kept_tokens(window, text, root, shift=1))[-1]
                different += np.abs(row - wrong).max() > 1e-3
            drafted = rng.integers(0, 400, 3).tolist()
            for count in range(1, 4):
                row = state.feed_one(drafted[count - 1])
                kept = kept_tokens(window, [*text, *drafted[:count]], root)
                np.testing.assert_allclose(row, fresh_logits(target, kept)[-1], atol=1e-5)
            assert context.memory.last_position() < window.most_cells + 3
            state.rewind(root + int(rng.integers(0, 4)))
            text += drafted[: len(state.cached) - root]
    assert moved > 10
    assert different == moved  # the control: a window off by a token


def test_nodes_of_a_tree_see_the_kept_tokens_and_their_own_path(target: Model) -> None:
    window, text = Window(2, 6), [number * 7 % 400 for number in range(33)]
    options = ContextOptions(**F32, n_sequences=3, n_outputs=3)
    with Context(target, options) as context:
        state = partial_source(context, KeptTokens(window))
        for start in range(20, 30):
            state.rewind(min(len(state.cached), start - 1))
            state.feed(text[len(state.cached) : start])
            kept = kept_tokens(window, text[:start], start)
            state.evaluate([ROOT, ROOT], [5, text[start]])
            rows = state.evaluate([0, 1, 1], [6, 7, 8])
            for row, path in enumerate(([5, 6], [text[start], 7], [text[start], 8])):
                wanted = fresh_logits(target, [*kept, *path])[-1]
                np.testing.assert_allclose(rows.logits(row), wanted, atol=1e-5)
            state.keep(text[start : start + 1])


@pytest.mark.parametrize(
    "drafter",
    [
        TRIFORCE,
        "cascade(partial(sink=2, window=8, n=5, sampling=argmax), prompt-lookup(min_ngram=1))",
        "cascade(partial(sink=3, window=9, n=6, sampling=argmax), draft(FILE, tree=2x1))",
    ],
)
def test_a_cascades_bounded_cache_stays_true(models: Path, target: Model, drafter: str) -> None:
    prompts = [PROMPT, PROMPT[:6], [*PROMPT[:9], 8, 8], [1, 2, 3, 4] * 12]
    with open_pair(models, drafter) as runtime:
        cascade = runtime.session.drafter
        assert isinstance(cascade, CascadeDrafter)
        model, text = cascade._model, cascade._text
        assert isinstance(model, DraftModelTarget)
        for seed, prompt in enumerate(prompts):
            answer = runtime.generate(prompt, WHOLE.replace(seed=seed), max_tokens=30).token_ids
            tokens = [*prompt, *answer]
            cascade.begin(tokens)
            root = len(tokens)
            model.rewind(text, root - 1)
            text.tokens = list(tokens)
            model.prefill(text, root - 1)
            row = model.evaluate(text, DraftTree()).logits(0)
            wanted = fresh_logits(target, kept_tokens(model.kept.window, tokens, root))[-1]
            np.testing.assert_allclose(row, wanted, atol=1e-5)


# -- texts and laws --------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", DRAWN)
def test_drafts_beside_a_moving_window_are_those_of_other_drafts(
    models: Path, drafter: str
) -> None:
    said: list[object] = []
    for is_plain in (True, False):
        with open_pair(models, drafter) as runtime:
            growing = runtime.session.drafter
            assert isinstance(growing, GrowingDrafter)
            assert growing._is_plain
            growing._is_plain = is_plain
            result = runtime.generate(PROMPT, SamplingParams(seed=3), max_tokens=80)
            stats = result.stats
            said.append((result.token_ids, stats.rounds, stats.drafted, stats.accepted))
    assert said[0] == said[1]


@pytest.fixture(scope="module")
def joint(models: Path) -> dict[Text, float]:
    return model_joint_law(models / "open.gguf", PROMPT_OF_TWELVE, 2, least_entropy=1.0)


PROMPT_OF_TWELVE = [number * 5 % 11 for number in range(23)]
"""The first token that is drawn makes it 24 long, where a window of 6 moves."""
SAMPLES = 1700


@pytest.mark.parametrize("drafter", ["partial(sink=2, window=6, n=3)", TRIFORCE])
def test_texts_beyond_the_window_follow_the_targets_joint_law(
    models: Path, joint: dict[Text, float], drafter: str
) -> None:
    with open_pair(models, drafter, "open small", flash_attention="auto") as runtime:
        counts = sampled_texts(runtime, PROMPT_OF_TWELVE, 2, SAMPLES)
        assert p_value(counts, joint) > ALPHA


def test_a_biased_rule_is_rejected_at_the_same_sample_size(
    models: Path, joint: dict[Text, float]
) -> None:
    drafter = "partial(sink=2, window=6, n=3)"
    with open_pair(models, drafter, "open small", flash_attention="auto") as runtime:
        runtime.session.rule = KeepsTooMuch()
        counts = sampled_texts(runtime, PROMPT_OF_TWELVE, 2, SAMPLES)
        assert p_value(counts, joint) < REJECTED


# -- weights, costs, refusals ----------------------------------------------------------------------


def test_the_weights_are_the_targets_and_the_cache_is_small(models: Path) -> None:
    with open_pair(models, "partial(sink=2, window=6, n=4)", n_ctx=512) as runtime:
        drafter = runtime.session.drafter
        assert isinstance(drafter, GrowingDrafter)
        assert drafter.source.context.model is runtime.session.target.context.model
        assert drafter.source.context.options.n_ctx == 2 + 2 * 6 + 4 + 1
        assert drafter.remark == ""
    with open_pair(models, "partial(n=4)") as runtime:
        assert "all of a context of 256" in runtime.session.drafter.remark


def test_as_many_tokens_are_drafted_as_pay_beside_a_long_text(target: Model) -> None:
    """Keys and values of 900 tokens are several times these weights: there drafts are cheap."""
    costs = CostCurve.flat([1.0 + 0.02 * n for n in range(64)])
    env = DraftEnvironment(target, ContextOptions(**{**F32, "n_ctx": 1024}), costs=costs)
    drafted = []
    with closing(build_drafter("partial(sink=2, window=32)", env)) as weights:
        for length in (40, 900):
            drafter = weights.start()
            tokens = [number * 7 % 400 for number in range(length)]
            drafter.begin(tokens)
            request = DraftRequest(tokens, WHOLE, SeededNoise(0), max_depth=99, max_nodes=99)
            drafted.append(len(drafter.propose(request)))
            drafter.close()
    assert drafted[0] == 0 < drafted[1]


# -- chunks ----------------------------------------------------------------------------------------


class States:
    """Rows that have nothing but the inputs of layer 2."""

    def __init__(self, states: np.ndarray) -> None:
        self._states = states

    def layer_input(self, row: int, layer: int) -> np.ndarray:
        assert layer == 2
        return self._states[row]


def test_the_chunks_most_like_the_last_tokens_are_kept() -> None:
    """Chunk 3 of ten has the last tokens' direction, chunk 6 the opposite, others any."""
    rng = np.random.default_rng(0)
    direction = rng.standard_normal(48).astype(np.float32)
    states = 5.0 + rng.standard_normal((90, 48)).astype(np.float32)  # a part that all share
    states[4 + 24 : 4 + 32] += direction
    states[4 + 48 : 4 + 56] -= direction
    states[84:] += direction
    memory = ChunkMemory(8, 2, layer=2, n_embd=48, n_ctx=100)
    memory.begin(range(90))
    assert list(memory.choose(4, 80, 90)) == []  # nothing is known yet
    memory.learn_prompt(0, States(states), 90)  # type: ignore[arg-type]
    chosen = list(memory.choose(4, 80, 90))
    assert set(range(28, 36)) < set(chosen)
    assert not set(range(52, 60)) & set(chosen)
    assert len(chosen) == 16
    assert chosen == sorted(chosen)
    assert list(memory.choose(4, 11, 90)) == []  # no whole chunk
    # What was said later is not read: the last tokens before 52 are like chunk 3, too.
    states[44:52] += direction
    memory.learn_prompt(44, States(states[44:]), 46)  # type: ignore[arg-type]
    early = list(memory.choose(4, 44, 52))
    memory.begin(range(52))
    assert list(memory.choose(4, 44, 52)) == early
    memory.begin([*range(30), 0])
    assert max(memory.choose(4, 80, 90)) < 36  # of what is known only


def test_kept_chunks_stand_between_sink_and_window(target: Model) -> None:
    """KV truth with chunks: what was chosen, in the order of the text, for chains and trees."""
    rng = np.random.default_rng(1)
    options = ContextOptions(**F32, n_sequences=2, n_outputs=2)
    with Context(target, options) as context:
        memory = ChunkMemory(3, 2, layer=2, n_embd=32, n_ctx=256)
        state = partial_source(context, KeptTokens(Window(2, 6), memory))
        text = rng.integers(0, 400, 60).tolist()
        states = rng.standard_normal((60, 32)).astype(np.float32)
        n_between = 0
        for root in (5, 18, 19, 25, 40, 41, 30, 60):
            state.begin(text[:root])
            state.learn_prompt(0, States(states), root)  # type: ignore[arg-type]
            state.rewind(min(len(state.cached), root - 1))
            row = state.feed(text[len(state.cached) : root])
            between = list(state.kept.between)
            n_between += len(between)
            places = [*range(min(2, root)), *between, *range(state.kept.first, root)]
            assert len(set(places)) == len(places)
            wanted = fresh_logits(target, [text[place] for place in places])[-1]
            np.testing.assert_allclose(row, wanted, atol=1e-5)
            rows = state.evaluate([ROOT, ROOT], [7, 9])
            known = [text[place] for place in places]
            for place, token in enumerate((7, 9)):
                wanted = fresh_logits(target, [*known, token])[-1]
                np.testing.assert_allclose(rows.logits(place), wanted, atol=1e-5)
            state.keep([9])
        assert n_between > 12


@pytest.mark.parametrize(
    "drafter",
    [
        "partial(sink=2, window=6, chunks=2, chunk=3, n=4, sampling=argmax)",
        "cascade(partial(sink=2, window=8, chunks=2, chunk=4, n=4, sampling=argmax), none)",
    ],
)
def test_chunks_are_kept_while_an_answer_is_made(models: Path, drafter: str) -> None:
    with open_pair(models, drafter) as runtime:
        result = runtime.generate(PROMPT, SamplingParams(temperature=0.0), max_tokens=40)
        assert result.stats.drafted > 0
        drafter_of = runtime.session.drafter
        assert drafter_of.layer_inputs == (1,)
        model = drafter_of._model if isinstance(drafter_of, CascadeDrafter) else None
        kept = drafter_of.source.kept if model is None else model.kept  # type: ignore[attr-defined]
        assert len(kept.between) > 0
