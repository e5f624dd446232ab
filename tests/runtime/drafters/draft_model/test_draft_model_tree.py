"""Trees drafted by real (tiny, random) models: accepted lengths, the drafter's cache, refusals.

F32 weights and cache, flash attention off, so that batches round like single tokens to 1e-5.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.joint_law import WHOLE
from support.scripted import TableRows
from support.tiny_models import F32

from specrun.bindings.contexts.batch import Batch
from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.models.model import Model
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime import Runtime
from specrun.runtime.drafters.draft_model import DraftModelSource, draft_size
from specrun.runtime.drafters.growing import GrowingDrafter
from specrun.runtime.language import quoted
from specrun.runtime.round.drafter import RoundOutcome
from specrun.runtime.trees import ROOT, DraftTree, DynamicShape, Topology, parse_topology

_EMPTY, _NO_ROWS = DraftTree(), TableRows([])
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("trees")
    write_random_llama(folder / "target.gguf", RandomLlama(vocab_size=400, seed=1, scale=4.0))
    write_random_llama(
        folder / "drafter.gguf", RandomLlama(vocab_size=400, seed=1, layers=1, scale=2.5)
    )
    return folder / "target.gguf", folder / "drafter.gguf"


def open_pair(pair: tuple[Path, Path], drafter: str, **options: object) -> Runtime:
    return Runtime(
        pair[0], drafter=drafter.replace("FILE", quoted(str(pair[1]))), **{**F32, **options}
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


def source_of(context: Context, target_vocab_size: int = 400) -> DraftModelSource:
    shape = parse_topology("2x2")
    return DraftModelSource(context, shape, target_vocab_size=target_vocab_size)


def test_tokens_that_only_one_model_knows(pair: tuple[Path, Path]) -> None:
    """The draft's rows are cut to shared tokens; tokens it lacks are fed as a stand-in."""
    with Model(pair[1]) as model, Context(model, ContextOptions(n_ctx=256, n_threads=1)) as context:
        larger, smaller = (source_of(context, size) for size in (500, 300))
        assert len(larger.feed([3, 450])) == 400
        assert larger.cached == [3, 450]
        larger.rewind(0)
        assert len(smaller.feed([3])) == 300


# -- the drafter's cache ---------------------------------------------------------------------------


def fresh_row(context: Context, tokens: list[int]) -> np.ndarray:
    """The last token's logits, evaluated from nothing."""
    context.memory.clear()
    batch = Batch(context.n_batch, 1)
    batch.fill_chain(tokens, 0, [0], 1)
    return context.decode(batch).logits(0).copy()


def check_cache(state: DraftModelSource) -> None:
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
    state = source_of(draft_context)
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
    state = source_of(draft_context)
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
    drafter = GrowingDrafter(DraftModelSource(context, shape, target_vocab_size=400), shape)
    tokens = list(PROMPT)
    drafter.begin(tokens)
    for step in range(3):
        tokens += [step, 50 + step]
        drafter.observe(RoundOutcome(tokens, _EMPTY, (), 50 + step, _NO_ROWS))
    assert drafter.source.cached == []
    drafter.close()
    drafter.close()
