"""A chain in one graph equals the chain token by token: tokens, probabilities, cache, over many
rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.head_chains import chain_plan, hydra_chain, pair_chain
from support.tiny_models import F32

from specrun.bindings.errors import OptionError
from specrun.bindings.ggml import I32, ComputeDevice, Graph, fields
from specrun.bindings.models.model import Model
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.drafters.eagle import Eagle3Head, EagleHead, PairCells, PairHead
from specrun.runtime.drafters.eagle import head as pair_chain_module
from specrun.runtime.drafters.eagle.head import PairTrees
from specrun.runtime.drafters.hydra import HydraCells, HydraHead
from specrun.runtime.drafters.hydra import head as hydra_chain_module
from specrun.runtime.heads import (
    MOST_CHAIN_ROWS,
    MOST_DEPTHS,
    FloatRows,
    KeyValueCache,
    RowPiece,
    fill_chain,
    mask_below,
)
from specrun.runtime.language import quoted

torch = pytest.importorskip("torch")
from support.tiny_eagle import random_eagle  # noqa: E402
from support.tiny_eagle3 import Variant, random_eagle3  # noqa: E402
from support.tiny_hydra import random_hydra  # noqa: E402

HIDDEN, VOCAB, CELLS = 32, 320, 600
KINDS = ["eagle", "eagle3", "eagle3 of all tokens", "hydra", "hydra++"]

Cells = PairCells | HydraCells


@pytest.fixture(scope="module")
def shallow(tiny_model: Path) -> Iterator[Model]:
    with Model(tiny_model) as model:
        yield model


@pytest.fixture(scope="module")
def deep(tiny_deep_model: Path) -> Iterator[Model]:
    with Model(tiny_deep_model) as model:
        yield model


@pytest.fixture
def opened(shallow: Model, deep: Model, tmp_path: Path) -> Iterator[Callable[..., Cells]]:
    """Opens a random head of a kind and a type of numbers; twice the same gives heads of their
    own."""
    heads: list[PairHead | HydraHead] = []

    def head_of(kind: str, quantization: str) -> PairHead | HydraHead:
        path = tmp_path / f"{kind}-{quantization}.gguf"
        if kind == "eagle":
            random_eagle(HIDDEN).write(path, VOCAB, quantization=quantization)
            return EagleHead(path, shallow, ranks=1, n_threads=1)
        if kind.startswith("eagle3"):
            # 64 of 320 tokens: nearly all drafted tokens have other numbers in the target's
            # vocabulary.
            variant = Variant(draft_tokens=64 if kind == "eagle3" else None)
            random_eagle3(HIDDEN, VOCAB, variant).write(
                path, Path(deep.path), quantization=quantization
            )
            return Eagle3Head(path, deep, ranks=1, n_threads=1)
        made = random_hydra(HIDDEN, VOCAB, heads=6, prefix=kind == "hydra++")
        made.write(path, VOCAB, quantization=quantization)
        return HydraHead(path, shallow, ranks=[1] * made.heads, n_threads=1)

    def cells(kind: str, quantization: str = "F32") -> Cells:
        heads.append(head_of(kind, quantization))
        return heads[-1].cells(CELLS)

    yield cells
    for head in heads:
        head.close()


# Told by pytest.fail, which is no AssertionError: the known-wrong variants below must not pass for
# want of a chain.
NO_GRAPH = "the head made no chain in one graph"


def cache_of(head: Cells) -> KeyValueCache | None:
    if isinstance(head, PairCells):
        return head._cache
    return None if head.prefix is None else head.prefix._cache


def cells_of(cache: KeyValueCache, used: int) -> np.ndarray:
    return np.stack(
        [
            cache._tensors.read(name, np.float32)
            .reshape(-1, cache.sizes.kv_size)[:used]
            .astype(np.float32)
            for name in ("keys0", "values0")
        ]
    )


def check_rounds(
    once: Cells, by_depth: Cells, rounds: int, *, seed: int = 0, most: int = 6, skip: int = 0
) -> None:
    """Compare chains of two equal heads, the cells that were accepted kept, rejected ones written
    over."""
    random = np.random.default_rng(seed)
    n_features = once._head.sizes.features if isinstance(once, PairCells) else HIDDEN
    count = skip
    for _ in range(rounds):
        m, n = int(random.integers(1, MOST_CHAIN_ROWS + 1)), int(random.integers(1, most + 1))
        features = random.normal(size=(m, n_features)).astype(np.float32)
        tokens = random.integers(0, VOCAB, m).tolist()
        if isinstance(once, PairCells):
            used = count + m + n - 1
            piece = RowPiece(tokens, features, count + 3, count)
            found = once.tree(chain_plan(n, has_values=True), piece)
            wanted = pair_chain(by_depth, tokens, features, count + 3, count, n)
        else:
            used = count + m
            piece = RowPiece(tokens, features, count + 3, count)
            found = once.tree(chain_plan(n, has_values=True), piece, tokens[-1])
            wanted = hydra_chain(by_depth, features, count + 3, count, tokens[-1], n)
        if found is None or found.values is None:
            pytest.fail(NO_GRAPH)
        assert found.tokens == wanted.tokens
        np.testing.assert_allclose(found.values, wanted.values, rtol=1e-5)
        ours, theirs = cache_of(once), cache_of(by_depth)
        if ours is not None and theirs is not None:
            np.testing.assert_allclose(
                cells_of(ours, used), cells_of(theirs, used), rtol=1e-5, atol=1e-6
            )
        count += m  # a round keeps its real pairs; those of the draft are written over


@pytest.mark.parametrize("quantization", ["F32", "Q8_0"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_chain_in_one_graph_is_the_chain_by_depth(
    opened: Callable[..., Cells], kind: str, quantization: str
) -> None:
    with (
        closing(opened(kind, quantization)) as once,
        closing(opened(kind, quantization)) as by_depth,
    ):
        check_rounds(once, by_depth, 30)
        kept = [graphs for _, graphs in once._trees._of_depth.values()]
        assert sum(len(each._graphs) for each in kept if each is not None) < 30  # used again


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "hydra++"])
def test_chains_go_on_where_the_cache_is_read_further(
    opened: Callable[..., Cells], kind: str
) -> None:
    """Past the first 256 cells graphs read more of the cache."""
    with closing(opened(kind)) as once, closing(opened(kind)) as by_depth:
        check_rounds(once, by_depth, 12, seed=1, skip=230)


def test_tokens_come_without_their_probabilities_too(opened: Callable[..., Cells]) -> None:
    for kind in KINDS:
        with closing(opened(kind)) as head:
            features = np.random.default_rng(3).normal(size=(2, 3 * HIDDEN)).astype(np.float32)
            plans = [chain_plan(4, has_values=has_values) for has_values in (True, False)]
            if isinstance(head, PairCells):
                features = features[:, : head._head.sizes.features].copy()
                found = [head.tree(plan, RowPiece([1, 2], features, 0, 0)) for plan in plans]
            else:
                states = features[:, :HIDDEN].copy()
                found = [head.tree(plan, RowPiece([1, 2], states, 0, 0), 2) for plan in plans]
            both, tokens = found
            assert both is not None
            assert tokens is not None
            assert both.tokens == tokens.tokens
            assert tokens.values is None


# -- what must not pass ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_depth_that_does_not_see_the_one_above_is_caught(
    opened: Callable[..., Cells], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unseen(builder: Any, above: Any, parents: Any, own: Any, zeros: Any) -> Any:
        hidden = builder._add("ggml_log", zeros)  # minus infinity
        return mask_below(builder, above, parents, own, hidden)

    monkeypatch.setattr(pair_chain_module, "mask_below", unseen)
    with (
        closing(opened(kind)) as once,
        closing(opened(kind)) as by_depth,
        pytest.raises(AssertionError),
    ):
        check_rounds(once, by_depth, 30)


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "hydra++"])
def test_a_key_in_the_wrong_cell_is_caught(
    opened: Callable[..., Cells], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def misplaced(graph: Graph, given: FloatRows, position: int, count: int, spare: int) -> None:
        fill_chain(graph, given, position, count, spare)
        graph.inputs["cells"][0, len(given) - 1] = spare

    monkeypatch.setattr(pair_chain_module, "fill_chain", misplaced)
    with closing(opened(kind)) as once, closing(opened(kind)) as by_depth:
        monkeypatch.setattr(hydra_chain_module, "fill_chain", misplaced)
        with pytest.raises(AssertionError):
            if kind == "hydra++":
                assert isinstance(once, HydraCells)
                states = np.random.default_rng(0).normal(size=(4, HIDDEN)).astype(np.float32)
                plan = chain_plan(3, has_values=True)
                found = once.tree(plan, RowPiece([5] * 4, states, 0, 0), 5)
                monkeypatch.undo()
                wanted = hydra_chain(by_depth, states, 0, 0, 5, 3)
                if found is None:
                    pytest.fail(NO_GRAPH)
                np.testing.assert_allclose(found.values, wanted.values, rtol=1e-5)
            else:
                check_rounds(once, by_depth, 30)


def test_a_position_shifted_by_one_is_caught(
    opened: Callable[..., Cells], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the draft's pairs against the real ones: all shifted alike would be the same."""

    prepare = PairTrees.__init__

    def shifted(self: PairTrees, *arguments: Any) -> None:
        prepare(self, *arguments)
        self._depths = (np.asarray(self._depths) + 1).data

    monkeypatch.setattr(PairTrees, "__init__", shifted)
    with (
        closing(opened("eagle")) as once,
        closing(opened("eagle")) as by_depth,
        pytest.raises(AssertionError),
    ):
        check_rounds(once, by_depth, 30)


# -- where there is no such graph ------------------------------------------------------------------


def no_tokens_written(self: ComputeDevice, operation: int, *, writes_weights: bool = False) -> bool:
    """A backend that cannot write I32 into its memory."""
    return not (writes_weights and fields(operation).type == I32)


@pytest.mark.parametrize("kind", KINDS)
def test_a_backend_without_an_operation_leaves_the_chain_to_single_depths(
    opened: Callable[..., Cells], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ComputeDevice, "supports", no_tokens_written)
    with closing(opened(kind)) as head:
        for _ in range(2):
            if isinstance(head, PairCells):
                row = np.zeros((1, head._head.sizes.features), np.float32)
                assert head.tree(chain_plan(3), RowPiece([1], row, 0, 0)) is None
            else:
                row = np.zeros((1, HIDDEN), np.float32)
                assert head.tree(chain_plan(3), RowPiece([1], row, 0, 0), 1) is None


@pytest.mark.parametrize("kind", ["eagle", "hydra", "hydra++"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_text_is_the_same_with_and_without_the_graph(
    opened: Callable[..., Cells],
    tiny_model: Path,
    tmp_path: Path,
    kind: str,
    temperature: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened(kind).close()
    params = SamplingParams(temperature=temperature, seed=4)
    expression = f"{kind.removesuffix('++')}({quoted(str(tmp_path / f'{kind}-F32.gguf'))}, n=4)"

    def answers(drafter: str) -> tuple[list[int], int, int]:
        with Runtime(tiny_model, drafter=drafter, **F32) as runtime:
            first = runtime.generate([5, 6, 7, 8, 9], params, max_tokens=30)
            second = runtime.generate(
                [5, 6, 7, 8, 9, *first.token_ids[:9], 3], params, max_tokens=30
            )
        counts = (
            [answer.stats.drafted for answer in (first, second)],
            [answer.stats.accepted for answer in (first, second)],
        )
        return [*first.token_ids, *second.token_ids], sum(counts[0]), sum(counts[1])

    plain = answers("none")[0]
    in_one = answers(expression)
    monkeypatch.setattr(ComputeDevice, "supports", no_tokens_written)
    by_depth = answers(expression)
    assert in_one == by_depth
    assert in_one[0] == plain
    assert in_one[1] > 0


def test_numbers_too_large_for_one_graph(opened: Callable[..., Cells]) -> None:
    with closing(opened("eagle")) as head:
        assert isinstance(head, PairCells)
        row = np.zeros((MOST_CHAIN_ROWS + 1, HIDDEN), np.float32)
        one = RowPiece([1], row[:1], 0, 0)
        assert head.tree(chain_plan(2), RowPiece([1] * len(row), row, 0, 0)) is None
        assert head.tree(chain_plan(MOST_DEPTHS + 1), one) is None
        with pytest.raises(OptionError, match="cannot hold"):
            head.tree(chain_plan(2), RowPiece([1], row[:1], 0, head.n_cells - 1))
        with pytest.raises(OptionError, match="outside the 320 tokens"):
            head.tree(chain_plan(2), RowPiece([VOCAB], row[:1], 0, 0))
    with closing(opened("hydra++")) as head:
        assert isinstance(head, HydraCells)
        with pytest.raises(OptionError, match="reach 1 to 6 tokens"):
            head.tree(chain_plan(7), one, 1)
        with pytest.raises(OptionError, match="cannot hold"):
            head.tree(chain_plan(2), RowPiece([1], row[:1], 0, 768), 1)
        with pytest.raises(OptionError, match="outside the 320 tokens"):
            head.tree(chain_plan(2), one, -1)
