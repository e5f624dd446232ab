"""A tree in one graph equals the tree depth by depth, over many rounds, shapes and limits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.head_chains import chain_plan, eagle_drafter, hydra_drafter
from support.tiny_models import F32

from specrun.bindings.errors import OptionError
from specrun.bindings.ggml import I32, ComputeDevice, fields
from specrun.bindings.models.model import Model
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.drafters.eagle import Eagle3Head, EagleHead, EagleSource, PairHead
from specrun.runtime.drafters.eagle import head as pair_tree_module
from specrun.runtime.drafters.eagle.head import PairTrees
from specrun.runtime.drafters.growing import GrowingDrafter
from specrun.runtime.drafters.hydra import HydraHead
from specrun.runtime.heads import MOST_CHAIN_ROWS, MOST_DEPTHS, RowPiece, TreeGraphs, mask_below
from specrun.runtime.heads.places import write_below
from specrun.runtime.language import quoted
from specrun.runtime.laws import SeededNoise
from specrun.runtime.round import DraftRequest
from specrun.runtime.trees import DraftTree, DynamicShape, Topology, parse_topology

torch = pytest.importorskip("torch")
from support.tiny_eagle import random_eagle  # noqa: E402
from support.tiny_eagle3 import Variant, random_eagle3  # noqa: E402
from support.tiny_hydra import random_hydra  # noqa: E402

HIDDEN, VOCAB, CELLS = 32, 320, 600
KINDS = ["eagle", "eagle3", "hydra", "hydra++"]
SHAPES: list[Topology | DynamicShape] = [
    parse_topology("4x3"),
    parse_topology("2x2x2"),
    parse_topology("0 1 2 00 01 10 000 0000"),
    DynamicShape(4, 4, 16),
    DynamicShape(5, 3, 9),
    DynamicShape(2, 3, 5),
    DynamicShape(1, 4, 3),
    Topology.chain(4),
]
NO_GRAPH = "the head made no tree in one graph"

Opened = Callable[..., GrowingDrafter]


@pytest.fixture(scope="module")
def shallow(tiny_model: Path) -> Iterator[Model]:
    with Model(tiny_model) as model:
        yield model


@pytest.fixture(scope="module")
def deep(tiny_deep_model: Path) -> Iterator[Model]:
    with Model(tiny_deep_model) as model:
        yield model


@pytest.fixture
def opened(shallow: Model, deep: Model, tmp_path: Path) -> Iterator[Opened]:
    """Makes a drafter with a random head of a kind and a type of numbers.

    Twice the same gives heads of their own.
    """
    heads: list[PairHead | HydraHead] = []

    def drafter(
        kind: str, shape: Topology | DynamicShape, quantization: str = "F32"
    ) -> GrowingDrafter:
        path = tmp_path / f"{kind}.gguf"
        if kind == "hydra" or kind == "hydra++":
            made = random_hydra(HIDDEN, VOCAB, heads=6, prefix=kind == "hydra++")
            made.write(path, VOCAB, quantization=quantization)
            hydra = HydraHead(path, shallow, ranks=[shape.max_width] * 6, n_threads=1)
            heads.append(hydra)
            return hydra_drafter(hydra.cells(CELLS), shape)
        if kind == "eagle":
            random_eagle(HIDDEN).write(path, VOCAB, quantization=quantization)
            heads.append(EagleHead(path, shallow, ranks=shape.max_width, n_threads=1))
        else:
            # 64 of 320 tokens: nearly all drafted tokens have other numbers in the target's
            # vocabulary.
            variant = Variant(draft_tokens=64 if kind == "eagle3" else None)
            random_eagle3(HIDDEN, VOCAB, variant).write(
                path, Path(deep.path), quantization=quantization
            )
            heads.append(Eagle3Head(path, deep, ranks=shape.max_width, n_threads=1))
        return eagle_drafter(heads[-1].cells(CELLS), shape)

    yield drafter
    for head in heads:
        head.close()


def depth_by_depth(drafter: GrowingDrafter) -> GrowingDrafter:
    """The reference: no graph of whole trees is asked for, and the drafter grows them itself."""
    drafter.source.named = lambda *_: None  # type: ignore[method-assign]
    return drafter


def check_rounds(
    once: GrowingDrafter, by_depth: GrowingDrafter, rounds: int, *, seed: int = 0, skip: int = 0
) -> list[DraftTree]:
    """Compare the trees of two equal heads along a random text; return them."""
    rng = np.random.default_rng(seed)
    asked: list[DraftTree] = []
    inner = once.source.named

    def noted(*arguments: Any) -> Any:
        named = inner(*arguments)
        if named is None:
            pytest.fail(NO_GRAPH)
        return named

    once.source.named = noted  # type: ignore[method-assign]
    n_features = (
        once.source.state._cells.head.sizes.features
        if isinstance(once.source, EagleSource)
        else HIDDEN
    )
    text = rng.integers(0, VOCAB, skip + 1).tolist()
    states = rng.normal(size=(skip, n_features)).astype(np.float32)
    for drafter in (once, by_depth):
        drafter.begin(text)
        drafter.source.state.learn(0, states, text)
    noise = SeededNoise(0)
    for _ in range(rounds):
        m = int(rng.integers(1, MOST_CHAIN_ROWS + 1))
        start = len(text) - 1
        text = text + rng.integers(0, VOCAB, m).tolist()
        states = rng.normal(size=(m, n_features)).astype(np.float32)
        limits = (int(rng.integers(1, 7)), int(rng.integers(1, 20)))
        trees = []
        for drafter in (once, by_depth):
            drafter.source.state.learn(start, states, text)
            # The first limits nothing, and the second is any.
            for limit in ((99, 999), limits):
                request = DraftRequest(text, SamplingParams(temperature=0.0), noise, *limit)
                trees.append(drafter.propose(request))
        assert trees[:2] == trees[2:]
        asked += trees[:2]
    return asked


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_in_one_graph_is_the_tree_by_depth(
    opened: Opened, kind: str, shape: Topology | DynamicShape
) -> None:
    with (
        closing(opened(kind, shape)) as once,
        closing(depth_by_depth(opened(kind, shape))) as by_depth,
    ):
        trees = check_rounds(once, by_depth, 12)
    assert max(map(len, trees)) == shape.max_nodes
    if isinstance(shape, DynamicShape) and shape.depth > 2:
        assert len({tree.parents for tree in trees}) > 3  # which tokens are likely decides


@pytest.mark.parametrize("quantization", ["Q8_0", "Q4_0"])
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "eagle3 of all tokens", "hydra++"])
def test_trees_of_quantized_heads_are_those_by_depth(
    opened: Opened, kind: str, quantization: str
) -> None:
    shape = DynamicShape(4, 4, 16)
    with (
        closing(opened(kind, shape, quantization)) as once,
        closing(depth_by_depth(opened(kind, shape, quantization))) as by_depth,
    ):
        trees = check_rounds(once, by_depth, 12)
    assert max(map(len, trees)) == shape.max_nodes


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "hydra++"])
def test_trees_go_on_where_the_cache_is_read_further(opened: Opened, kind: str) -> None:
    """Past the first 256 cells graphs read more of the cache."""
    shape = DynamicShape(4, 3, 12)
    with (
        closing(opened(kind, shape)) as once,
        closing(depth_by_depth(opened(kind, shape))) as by_depth,
    ):
        check_rounds(once, by_depth, 12, seed=1, skip=230)


# -- what must not pass ----------------------------------------------------------------------------


def test_a_mask_without_the_rows_own_cell_is_caught(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a row nor what is below it then sees its token."""

    def unseen(builder: Any, above: Any, parents: Any, own: Any, zeros: Any) -> Any:
        hidden = builder._add("ggml_log", zeros)  # minus infinity
        return mask_below(builder, above, parents, own, hidden)

    monkeypatch.setattr(pair_tree_module, "mask_below", unseen)
    fails_along_rounds(opened)


@pytest.mark.parametrize("wrong", ["_depths", "_places", "cells"])
def test_misplaced_rows_are_caught(
    opened: Opened, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions shifted by one, masks in a sibling's place, and siblings in one cell."""
    prepare = PairTrees.__init__

    def misplaced(self: PairTrees, *arguments: Any) -> None:
        prepare(self, *arguments)
        if wrong == "_depths":
            self._depths = (np.asarray(self._depths) + 1).data
        elif wrong == "_places":
            self._places = (np.asarray(self._places) // 2).data

    def in_one_cell(at: memoryview, cells: memoryview, *others: Any) -> None:
        write_below(at, cells, *others)
        if wrong == "cells":
            cells[:] = (cells[0] + np.arange(len(cells)) // 2).data

    monkeypatch.setattr(PairTrees, "__init__", misplaced)
    monkeypatch.setattr(pair_tree_module, "write_below", in_one_cell)
    fails_along_rounds(opened)


@pytest.mark.parametrize("kind", ["eagle", "hydra++"])
def test_rows_below_the_wrong_row_are_caught(
    opened: Opened, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = TreeGraphs.add

    def astray(self: TreeGraphs, builder: Any, *arguments: Any) -> Any:
        rows = add(self, builder, *arguments)
        if rows is None:
            return None
        n = rows.parents.shape[0]
        return dataclasses.replace(rows, parents=builder.pick(rows.parents, rows.parents, n))

    monkeypatch.setattr(TreeGraphs, "add", astray)
    fails_along_rounds(opened, kind)


def fails_along_rounds(opened: Opened, kind: str = "eagle") -> None:
    shape = parse_topology("3x3x3")
    with (
        closing(opened(kind, shape)) as once,
        closing(depth_by_depth(opened(kind, shape))) as by_depth,
        pytest.raises(AssertionError),
    ):
        check_rounds(once, by_depth, 12)


# -- where there is no such graph ------------------------------------------------------------------


def no_tokens_written(self: ComputeDevice, operation: int, *, writes_weights: bool = False) -> bool:
    """A backend that cannot write I32 into its memory."""
    return not (writes_weights and fields(operation).type == I32)


@pytest.mark.parametrize(
    ("kind", "shape"), [("eagle", "depth=4, topk=3, nodes=8"), ("hydra++", "tree=2x2x1")]
)
def test_the_text_is_the_same_with_and_without_the_graph(
    opened: Opened,
    tiny_model: Path,
    tmp_path: Path,
    kind: str,
    shape: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened(kind, parse_topology("2")).close()
    expression = f"{kind.removesuffix('++')}({quoted(str(tmp_path / f'{kind}.gguf'))}, {shape})"
    params = SamplingParams(temperature=0.9, seed=4)

    def answer(drafter: str) -> tuple[list[int], int, int]:
        with Runtime(tiny_model, drafter=drafter, **F32) as runtime:
            result = runtime.generate([5, 6, 7, 8, 9], params, max_tokens=30)
        return [*result.token_ids], result.stats.drafted, result.stats.accepted

    plain = answer("none")[0]
    in_one = answer(expression)
    monkeypatch.setattr(ComputeDevice, "supports", no_tokens_written)
    assert in_one == answer(expression)
    assert in_one[0] == plain
    assert in_one[1] > 0


def test_what_does_not_fit_is_left_to_single_depths(opened: Opened) -> None:
    """Trees that the cells do not hold as a whole, and heads of fewer tokens than branches."""
    shape = DynamicShape(4, 4, 16)
    drafter = opened("eagle", shape)

    def tree(tokens: list[int]) -> Any:
        request = DraftRequest(tokens, SamplingParams(temperature=0.0), SeededNoise(0), 9, 99)
        return drafter.source.named(request, drafter._plans.of(4))

    with closing(drafter):
        state = drafter.source.state
        assert isinstance(drafter.source, EagleSource)
        room = state.room - drafter._plans.of(4).n_drafted
        text = np.arange(room + 1) % VOCAB
        rows = np.zeros((room + 1, HIDDEN), np.float32)
        state.learn(0, rows[:room], text.tolist())
        assert tree(text.tolist()) is not None
        longer = [*text.tolist(), 1]
        state.learn(room, rows[:1], longer)
        assert tree(longer) is None
        request = DraftRequest(longer, SamplingParams(temperature=0.0), SeededNoise(0), 9, 99)
        assert len(drafter.propose(request)) > 4


def test_numbers_that_no_graph_takes(shallow: Model, tmp_path: Path) -> None:
    row = np.zeros((MOST_CHAIN_ROWS + 1, HIDDEN), np.float32)
    one = RowPiece([1], row[:1], 0, 0)
    random_eagle(HIDDEN).write(tmp_path / "eagle.gguf", VOCAB)
    random_hydra(HIDDEN, VOCAB, heads=6, prefix=True).write(tmp_path / "hydra.gguf", VOCAB)
    eagle = EagleHead(tmp_path / "eagle.gguf", shallow, ranks=1, n_threads=1)
    with closing(eagle), closing(eagle.cells(CELLS)) as pairs:
        assert pairs.tree(chain_plan(2), RowPiece([1] * len(row), row, 0, 0), 1) is None
        assert pairs.tree(chain_plan(MOST_DEPTHS + 1), one, 1) is None
        with pytest.raises(OptionError, match="cannot hold"):
            pairs.tree(chain_plan(2), RowPiece([1], row[:1], 0, pairs.n_cells - 1), 1)
        places = [0], [0], 0, np.ones((1, 1), bool)
        for token in (-1, VOCAB):
            with pytest.raises(OptionError, match="outside the 320 tokens"):
                pairs.tree(chain_plan(2), RowPiece([token], row[:1], 0, 0), token)
            with pytest.raises(OptionError, match="outside the 320 tokens"):
                pairs.evaluate([token], row[:1], places)
    hydra = HydraHead(tmp_path / "hydra.gguf", shallow, ranks=[1] * 6, n_threads=1)
    with closing(hydra), closing(hydra.cells(CELLS)) as cells:
        with pytest.raises(OptionError, match="reach 1 to 6 tokens"):
            cells.tree(chain_plan(7), one, 1)
        with pytest.raises(OptionError, match="cannot hold"):
            cells.tree(chain_plan(2), RowPiece([1], row[:1], 0, 768), 1)
        with pytest.raises(OptionError, match="outside the 320 tokens"):
            cells.tree(chain_plan(2), one, -1)
