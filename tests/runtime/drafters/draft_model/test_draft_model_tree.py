"""Trees drafted by real (tiny, random) models: texts, joint law, the drafter's cache, refusals.

F32 weights and cache, flash attention off, so that batches round like single tokens to 1e-5.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.joint_law import (
    ALPHA,
    REJECTED,
    WHOLE,
    KeepsTooMuch,
    Text,
    model_joint_law,
    p_value,
    sampled_texts,
)
from support.scripted import TableRows
from support.tiny_models import F32

from specrun.bindings.contexts.batch import Batch
from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import OptionError
from specrun.bindings.models.model import Model
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.drafters.draft_model import DraftModelState, draft_size, model_drafter
from specrun.runtime.language import quoted
from specrun.runtime.round.drafter import RoundOutcome
from specrun.runtime.trees import ROOT, DraftTree, DynamicShape, Topology, parse_topology

pytestmark = pytest.mark.long

_EMPTY, _NO_ROWS = DraftTree(), TableRows([])
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4]
LENGTH = 40
SAMPLED = [
    "draft(FILE, tree=4x2x2)",
    "draft(FILE, tree=3x1x1, sampling=with)",
    'draft(FILE, tree="0 1 00 01 000")',
]
POINTS = [
    "draft(FILE, tree=4x2x2, sampling=argmax)",
    "draft(FILE, depth=5, topk=4, nodes=16)",
    "draft(FILE, tree=sequoia, nodes=12, sampling=argmax)",
    (
        "ensemble(draft(FILE, tree=2x2, sampling=argmax), draft(FILE, n=4, sampling=argmax), "
        "prompt-lookup)"
    ),
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("trees")
    write_random_llama(folder / "target.gguf", RandomLlama(vocab_size=400, seed=1, scale=4.0))
    write_random_llama(
        folder / "drafter.gguf", RandomLlama(vocab_size=400, seed=1, layers=1, scale=2.5)
    )
    return folder / "target.gguf", folder / "drafter.gguf"


@pytest.fixture(scope="module")
def plain(pair: tuple[Path, Path]) -> Iterator[Runtime]:
    with Runtime(pair[0], "none", **F32) as runtime:
        yield runtime


def open_pair(pair: tuple[Path, Path], drafter: str, **options: object) -> Runtime:
    return Runtime(
        pair[0], drafter=drafter.replace("FILE", quoted(str(pair[1]))), **{**F32, **options}
    )


# -- texts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", SAMPLED + POINTS)
def test_trees_keep_plain_decodings_text(
    pair: tuple[Path, Path], plain: Runtime, drafter: str
) -> None:
    """Greedily for every tree, at any temperature for point masses, with penalties on a node's own
    path."""
    penalties = {"repeat_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2}
    settings = [SamplingParams(temperature=0.0), SamplingParams(temperature=0.0, **penalties)]
    if drafter in POINTS:
        settings += [WHOLE.replace(temperature=t, seed=5, **penalties) for t in (0.7, 1.5)]
    with open_pair(pair, drafter) as runtime:
        for params in settings:
            wanted = plain.generate(PROMPT, params, max_tokens=LENGTH).token_ids
            result = runtime.generate(PROMPT, params, max_tokens=LENGTH)
            assert result.token_ids == wanted
            assert result.stats.accepted  # a pair that never agrees would prove nothing


def test_sampled_trees_do_not_keep_the_text(pair: tuple[Path, Path], plain: Runtime) -> None:
    """Negative control: the equality is a property of point masses."""
    params = WHOLE.replace(temperature=1.5, seed=0)
    with open_pair(pair, SAMPLED[0]) as runtime:
        assert (
            runtime.generate(PROMPT, params, max_tokens=LENGTH).token_ids
            != plain.generate(PROMPT, params, max_tokens=LENGTH).token_ids
        )


def test_wider_trees_accept_more(pair: tuple[Path, Path]) -> None:
    def accepted(drafter: str) -> float:
        with open_pair(pair, drafter) as runtime:
            lengths = [
                runtime.generate(
                    PROMPT, WHOLE.replace(seed=seed), max_tokens=60
                ).stats.mean_accepted_length
                for seed in range(4)
            ]
        return float(np.mean([length for length in lengths if length]))

    assert accepted("draft(FILE, tree=6x2x1)") > 1.1 * accepted("draft(FILE, n=3)")


@pytest.mark.parametrize("drafter", [SAMPLED[0], POINTS[1]])
def test_the_end_of_the_context_cuts_the_tree(
    pair: tuple[Path, Path], plain: Runtime, drafter: str
) -> None:
    prompt = [number % 399 for number in range(230)]
    params = SamplingParams(temperature=0.0)
    with open_pair(pair, drafter) as runtime:
        result = runtime.generate(prompt, params)
    assert result.token_ids == plain.generate(prompt, params).token_ids


@pytest.mark.parametrize("drafter", [SAMPLED[0], POINTS[1]])
def test_a_drafter_with_a_shorter_context_drafts_on_from_a_window(
    pair: tuple[Path, Path], tmp_path: Path, drafter: str
) -> None:
    write_random_llama(
        tmp_path / "short.gguf",
        RandomLlama(vocab_size=400, seed=1, layers=1, scale=2.5, context=256),
    )
    prompt, params = [number % 399 for number in range(240)], SamplingParams(temperature=0.0)
    with open_pair((pair[0], pair[0]), "none", n_ctx=512) as runtime:
        wanted = runtime.generate(prompt, params, max_tokens=60).token_ids
    with open_pair((pair[0], tmp_path / "short.gguf"), drafter, n_ctx=512) as runtime:
        result = runtime.generate(prompt, params, max_tokens=60)
        again = runtime.generate(prompt[:20], params, max_tokens=20)
    assert result.token_ids == wanted
    # As much a round beyond its context as within it.
    rounds = result.stats.rounds / again.stats.rounds
    assert result.stats.drafted > again.stats.drafted * rounds / 2


def test_tokens_that_only_one_model_knows(pair: tuple[Path, Path]) -> None:
    """The draft's rows are cut to shared tokens; tokens it lacks are fed as a stand-in."""
    with Model(pair[1]) as model, Context(model, ContextOptions(n_ctx=256, n_threads=1)) as context:
        larger, smaller = (DraftModelState(context, target_vocab_size=size) for size in (500, 300))
        assert len(larger.feed([3, 450])) == 400
        assert larger.cached == [3, 450]
        larger.rewind(0)
        assert len(smaller.feed([3])) == 300


# -- the joint law ---------------------------------------------------------------------------------

LAW_PROMPT = [3, 1, 4]
SAMPLES = 1250


@pytest.fixture(scope="module")
def flat_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("law")
    write_random_llama(folder / "target.gguf", RandomLlama(vocab_size=8, seed=1, scale=0.5))
    write_random_llama(folder / "drafter.gguf", RandomLlama(vocab_size=8, seed=2, scale=0.8))
    return folder / "target.gguf", folder / "drafter.gguf"


@pytest.fixture(scope="module")
def joint(flat_pair: tuple[Path, Path]) -> dict[Text, float]:
    return model_joint_law(flat_pair[0], LAW_PROMPT, 3)


@pytest.mark.parametrize(
    "drafter", ["draft(FILE, tree=2x2)", "draft(FILE, tree=3x1, sampling=with)"]
)
def test_texts_of_a_sampled_tree_follow_the_targets_joint_law(
    flat_pair: tuple[Path, Path], joint: dict[Text, float], drafter: str
) -> None:
    """Hypothesis, test and false alarms are those of `joint_law`; a biased rule is rejected at the
    same size."""
    with open_pair(flat_pair, drafter) as runtime:
        assert p_value(sampled_texts(runtime, LAW_PROMPT, 3, SAMPLES), joint) > ALPHA
        runtime.session.rule = KeepsTooMuch()
        assert p_value(sampled_texts(runtime, LAW_PROMPT, 3, SAMPLES), joint) < REJECTED


# -- the drafter's cache ---------------------------------------------------------------------------


def fresh_row(context: Context, tokens: list[int]) -> np.ndarray:
    """The last token's logits, evaluated from nothing."""
    context.memory.clear()
    batch = Batch(context.n_batch, 1)
    batch.fill_chain(tokens, 0, [0], 1)
    return context.decode(batch).logits(0).copy()


def check_cache(state: DraftModelState) -> None:
    """Assert that the next row, and rows in every sequence, are those of a fresh evaluation."""
    tokens = [*state.cached, 7]
    options = ContextOptions(**F32)
    got = state.feed([7]).copy()
    width = state.context.options.n_sequences
    children = state.evaluate([ROOT] * width, list(range(10, 10 + width)))
    rows = [children.logits(row).copy() for row in range(width)]
    with Context(state.context.model, options) as fresh:
        np.testing.assert_allclose(got, fresh_row(fresh, tokens), atol=1e-5)
        for row in range(width):
            np.testing.assert_allclose(rows[row], fresh_row(fresh, [*tokens, 10 + row]), atol=1e-5)
    state.keep([])
    state.rewind(len(tokens) - 1)


@pytest.fixture
def draft_context(pair: tuple[Path, Path]) -> Iterator[Context]:
    options = {**F32, "n_sequences": 8, "n_outputs": 8}
    with Model(pair[1]) as model, Context(model, ContextOptions(**options)) as context:
        yield context


@pytest.mark.parametrize("seed", range(4))
def test_the_draft_cache_is_true_after_many_rounds(draft_context: Context, seed: int) -> None:
    """Random trees, random accepted texts: from the tree, leaving it, beyond it, or another
    drafter's."""
    generator = np.random.default_rng(seed)
    state = DraftModelState(draft_context, target_vocab_size=400)
    state.feed(PROMPT)
    for _ in range(25):
        level, paths = [ROOT], {ROOT: []}
        first = 0
        for _ in range(int(generator.integers(0, 4))):
            parents = sorted(
                int(generator.choice(level)) for _ in range(int(generator.integers(1, 4)))
            )
            tokens = generator.permutation(399)[: len(parents)].tolist()
            state.evaluate(parents, tokens)
            level = list(range(first, first + len(parents)))
            first += len(parents)
            paths |= {
                node: [*paths[a], t] for node, a, t in zip(level, parents, tokens, strict=True)
            }
        accepted = list(paths[int(generator.choice(list(paths)))])
        if generator.random() < 0.3:
            accepted += [int(generator.integers(399))]
        cached = len(state.cached)
        state.keep(accepted)
        kept = state.cached[cached:]
        assert kept == accepted[: len(kept)]
        assert len(kept) >= len(accepted) - 1
        state.feed([*accepted[len(kept) :], int(generator.integers(399))])
        if generator.random() < 0.1:
            state.rewind(len(state.cached) - int(generator.integers(0, 5)))
        check_cache(state)


def test_a_wrong_cache_is_seen(draft_context: Context) -> None:
    """Negative control of the test above."""
    state = DraftModelState(draft_context, target_vocab_size=400)
    state.feed(PROMPT)
    state.evaluate([ROOT, ROOT], [5, 6])
    state.keep([6])
    state.cached[-1] = 5
    with pytest.raises(AssertionError):
        check_cache(state)


@pytest.mark.parametrize("shape", [parse_topology("3x2x1"), DynamicShape(4, 3, 9)])
def test_an_outcome_of_another_drafters_making_is_followed(
    pair: tuple[Path, Path], shape: Topology | DynamicShape
) -> None:
    sequences, outputs = draft_size(shape)
    options = {**F32, "n_sequences": sequences, "n_outputs": outputs}
    model = Model(pair[1])
    context = Context(model, ContextOptions(**options))
    state = DraftModelState(context, target_vocab_size=400)
    drafter = model_drafter(state, shape, sampling="argmax")
    tokens = list(PROMPT)
    drafter.begin(tokens)
    for step in range(3):
        tokens += [step, 50 + step]
        drafter.observe(RoundOutcome(tokens, _EMPTY, (), 50 + step, _NO_ROWS))
    assert drafter.source.state.cached == []
    drafter.close()
    drafter.close()


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drafter", "problem"),
    [
        ("draft(FILE, tree=17x17)", "llama.cpp allows 256"),
        ("draft(FILE, tree=30x9)", "llama.cpp allows 256"),
        ("draft(FILE, tree=8x8)", "do not fit a batch of 64"),
        ("draft(FILE, tree=2x2, n=3)", "give one of them"),
        ("draft(FILE, depth=9, nodes=3)", "nodes=3 is less than depth=9"),
        ("draft(FILE, depth=3, sampling=without)", "use sampling=argmax"),
        ("draft(FILE, nodes=8, sampling=with)", "use sampling=argmax"),
        ("draft(FILE, tree=2x2, sampling=bogus)", "sampling"),
        ("draft(FILE, n=3, sampling=without)", "sampling"),
        ("draft(FILE, treee=2x2)", "did you mean 'tree'"),
        ("draft(FILE, topk=two)", "not a whole number"),
        ("draft(FILE, tree=2x2, p_min=2)", "between 0 and 1"),
        ("ensemble(draft(FILE))", "at least two drafters"),
        ("ensemble(draft(FILE), bogus)", "no drafter 'bogus'"),
        ("ensemble(draft(FILE), draft(FILE, n=0))", "n is 0"),
        ("ensemble(draft(FILE), none, n=3)", "no option 'n'"),
    ],
)
def test_what_cannot_be_drafted_is_refused_in_one_sentence(
    pair: tuple[Path, Path], drafter: str, problem: str
) -> None:
    with pytest.raises(OptionError, match=problem) as caught:
        open_pair(pair, drafter, n_batch=64)
    assert "\n" not in str(caught.value)
