"""Accuracies by depth and rank: read from a file's metadata or a CSV, made into trees, sized by
what they cost."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_heads import random_medusa
from support.tiny_models import F32

from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import FileMissingError, MalformedFileError, OptionError
from specrun.bindings.models.model import Model
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.drafters.environment import DraftEnvironment
from specrun.runtime.drafters.tree_options import head_tree
from specrun.runtime.heads import HeadFile, read_accuracy_csv, stored_accuracy
from specrun.runtime.language import parse_expression, quoted
from specrun.runtime.planning import CostCurve, plan_medusa_tree, save_curve
from specrun.runtime.planning.optimal_trees import medusa_tree
from specrun.runtime.trees import Topology

HIDDEN, VOCAB = 32, 320
ACCURACY = ((0.6, 0.2), (0.5, 0.25), (0.4, 0.1))


# -- CSV -------------------------------------------------------------------------------------------


def csv_file(folder: Path, text: str | bytes) -> Path:
    path = folder / "accuracy.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_columns_are_found_by_name_and_others_left(tmp_path: Path) -> None:
    path = csv_file(tmp_path, "note,Accuracy, rank ,head\nx,0.6,0,0\ny,.2,1,0\n\nz,0.5,0,1\n")
    assert read_accuracy_csv(path) == ((0.6, 0.2), (0.5,))
    assert read_accuracy_csv(csv_file(tmp_path, "\ufeffhead,rank,accuracy\r\n0,0,1\r\n"), 1) == (
        (1.0,),
    )


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("", 1, "columns head, rank, accuracy are missing"),
        ("head,accuracy\n0,0.5\n", 1, "columns"),
        ("head,rank,accuracy\n", 1, "no accuracy is given"),
        ("head,rank,accuracy\n0,0,0.5\n0,1\n", 3, "2 cells"),
        ("head,rank,accuracy\n0,0,half\n", 2, "accuracy is 'half'"),
        ("head,rank,accuracy\n0,0,1.5\n", 2, "from 0 to 1"),
        ("head,rank,accuracy\n0,0,nan\n", 2, "from 0 to 1"),
        ("head,rank,accuracy\n0,0,-0.1\n", 2, "from 0 to 1"),
        ("head,rank,accuracy\nx,0,0.5\n", 2, "head is 'x'"),
        ("head,rank,accuracy\n0,-1,0.5\n", 2, "rank is '-1'"),
        ("head,rank,accuracy\n0,99999,0.5\n", 2, "rank is '99999'"),
        ("head,rank,accuracy\n0,0,0.5\n0,0,0.5\n", 3, "has a rank 0 already"),
        ("head,rank,accuracy\n0,1,0.5\n", 2, "rank 1 of head 0 comes before its rank 0"),
        ("head,rank,accuracy\n1,0,0.5\n", 2, "head 1 comes before head 0"),
        ("head,rank,accuracy\n0,0,0.7\n\n0,1,0.4\n", 4, "add up to 1.1"),
        ("head,rank,accuracy\n0,0,0.7\n1,0,0.4\n2,0,0.4\n", 4, "head 2 of a file with 2 heads"),
        (b"head,rank,accuracy\n0,0,0.5\n\xff\n", 3, "not UTF-8"),
    ],
)
def test_a_bad_csv_is_refused_with_its_line(
    tmp_path: Path, text: str | bytes, line: int, problem: str
) -> None:
    with pytest.raises(MalformedFileError, match=rf"accuracy\.csv, line {line}: .*{problem}"):
        read_accuracy_csv(csv_file(tmp_path, text), 2)


def test_a_missing_or_huge_csv_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileMissingError, match=r"none\.csv cannot be read"):
        read_accuracy_csv(tmp_path / "none.csv")
    with pytest.raises(MalformedFileError, match="larger than 1 MiB"):
        read_accuracy_csv(csv_file(tmp_path, b"x" * ((1 << 20) + 1)))


# -- metadata --------------------------------------------------------------------------------------


def test_metadata_hold_rows_one_after_another(tmp_path: Path) -> None:
    heads = random_medusa(HIDDEN, VOCAB)
    path = heads.write(tmp_path / "h.gguf", VOCAB, accuracy=[0.5, 0.25, 0.25, 0.125, 0.125, 0.0])
    assert stored_accuracy(HeadFile(path, "medusa"), 3) == (
        (0.5, 0.25),
        (0.25, 0.125),
        (0.125, 0.0),
    )
    assert (
        stored_accuracy(HeadFile(heads.write(tmp_path / "none.gguf", VOCAB), "medusa"), 3) is None
    )


@pytest.mark.parametrize("wrong", [[0.5, 0.5], [0.5, 0.2, 1.5], [0.1, float("nan"), 0.2]])
def test_metadata_that_are_no_shares_are_refused(tmp_path: Path, wrong: list[float]) -> None:
    path = random_medusa(HIDDEN, VOCAB).write(tmp_path / "h.gguf", VOCAB, accuracy=wrong)
    with pytest.raises(MalformedFileError, match="accuracies for 3 heads: calibrate them again"):
        stored_accuracy(HeadFile(path, "medusa"), 3)


# -- trees -----------------------------------------------------------------------------------------

rows = st.lists(st.floats(0.0, 0.3), min_size=1, max_size=3)


@settings(max_examples=80, derandomize=True, deadline=None, database=None)
@given(
    accuracy=st.lists(rows, min_size=1, max_size=3),
    times=st.lists(st.floats(0.0, 0.6), min_size=7, max_size=7),
)
def test_the_planned_tree_is_the_fastest_of_all_sizes_and_depths(
    accuracy: list[list[float]], times: list[float]
) -> None:
    """Over every size and depth, with the best tree of each; accuracies that rise with rank are
    levelled first."""
    curve = CostCurve.flat(np.cumsum([1.0, *times]).tolist())
    if not accuracy[0][0] and not any(accuracy[0]):
        with pytest.raises(OptionError, match="ever right"):
            plan_medusa_tree(accuracy, curve)
        return
    plan = plan_medusa_tree(accuracy, curve, 0.1, most=7, tolerance=0.0)
    levelled = [level(row) for row in accuracy]
    best = max(
        tree_value(tree, levelled) / (curve.seconds(len(tree) + 1) + 0.1 * tree.max_depth)
        for depth in range(1, len(accuracy) + 1)
        for tree in (medusa_tree(accuracy[:depth], nodes) for nodes in range(1, 8))
    )
    found = tree_value(plan.topology, levelled)
    assert plan.expected_tokens == pytest.approx(found)
    seconds = curve.seconds(len(plan.topology) + 1) + 0.1 * plan.topology.max_depth
    assert plan.speed_up == pytest.approx(found / seconds)
    assert plan.speed_up == pytest.approx(best)


def tree_value(tree: Topology, accuracy: Sequence[Sequence[float]]) -> float:
    """The expected tokens of a round with a tree: 1 and the products of the accuracies on the paths
    of its nodes."""
    paths = [[int(rank, 36) for rank in name] for name in str(tree).split()]
    return 1.0 + sum(
        float(np.prod([accuracy[k][rank] for k, rank in enumerate(path)])) for path in paths
    )


def level(row: Sequence[float]) -> list[float]:
    """The slopes of the least concave function over the running sums: what the levelled shares
    are."""
    totals = [0.0, *itertools.accumulate(row)]
    slopes: list[float] = []
    place = 0
    while place < len(row):
        ends = range(place + 1, len(totals))
        end = max(ends, key=lambda end: ((totals[end] - totals[place]) / (end - place), end))
        slopes += [(totals[end] - totals[place]) / (end - place)] * (end - place)
        place = end
    return slopes


def test_cheap_evaluations_make_large_trees_and_dear_ones_small_ones() -> None:
    free = plan_medusa_tree(ACCURACY, CostCurve((1, 64), (1.0, 1.0), (1.0, 1.0)), tolerance=0.0)
    assert len(free.topology) == 2 + 4 + 8  # all that can be right
    assert free.speed_up == pytest.approx(free.expected_tokens)
    dear = plan_medusa_tree(ACCURACY, CostCurve((1, 2), (1.0, 2.0), (1.0, 2.0)))
    assert (len(dear.topology), dear.speed_up < 1.0) == (1, True)
    deep = plan_medusa_tree(ACCURACY, CostCurve((1, 64), (1.0, 1.0), (1.0, 1.0)), 0.5)
    assert deep.topology.max_depth == 1


def test_a_little_speed_is_given_for_fewer_nodes() -> None:
    accuracy = ((0.5, *[0.001] * 20),)
    curve = CostCurve((1, 64), (1.0, 1.0001), (1.0, 1.0001))
    assert len(plan_medusa_tree(accuracy, curve, tolerance=0.0).topology) == 21
    assert len(plan_medusa_tree(accuracy, curve).topology) < 21


# -- in an expression ------------------------------------------------------------------------------


@pytest.fixture
def heads(tmp_path: Path) -> Path:
    return random_medusa(HIDDEN, VOCAB).write(
        tmp_path / "heads.gguf", VOCAB, accuracy=[0.6, 0.1, 0.5, 0.1, 0.4, 0.1]
    )


def tree_of(target: Path, expression: str) -> str:
    with Runtime(target, drafter=expression, **F32) as runtime:
        return str(runtime.session.drafter._shape)  # type: ignore[attr-defined]


def test_accuracies_of_a_csv_replace_those_of_the_file(
    tiny_model: Path, heads: Path, tmp_path: Path
) -> None:
    wide = csv_file(tmp_path, "head,rank,accuracy\n0,0,0.3\n0,1,0.3\n0,2,0.3\n1,0,0.1\n")
    assert tree_of(tiny_model, f"medusa({quoted(str(heads))}, nodes=3)") == "0 00 000"
    expression = f"medusa({quoted(str(heads))}, nodes=3, accuracy={quoted(str(wide))})"
    assert tree_of(tiny_model, expression) == "0 1 2"


def test_the_size_follows_the_targets_measured_costs(
    tiny_model: Path, heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    context = ContextOptions(**F32)
    expression = f"medusa({quoted(str(heads))})"

    def drafted() -> int:
        with Runtime(tiny_model, drafter=expression, **F32) as runtime:
            greedy = SamplingParams(temperature=0.0)
            return runtime.generate("abc", greedy, max_tokens=3).stats.drafted

    save_curve(CostCurve((1, 2, 64), (1.0, 9.0, 900.0), (1.0, 9.0, 900.0)), tiny_model, context, 0)
    assert drafted() == 0
    save_curve(CostCurve((1, 64), (1.0, 1.001), (1.0, 1.001)), tiny_model, context, 0)
    assert drafted() > 3


def test_costs_that_the_environment_names_replace_those_that_are_known(tiny_model: Path) -> None:
    """Whoever plans for other costs than this machine's, as a replay does, gets trees of that
    size."""
    expression = parse_expression("medusa(heads.gguf)")

    def planned(model: Model, costs: CostCurve) -> int:
        environment = DraftEnvironment(model, ContextOptions(**F32), costs=costs)
        return len(head_tree(expression, environment, stored=ACCURACY, n_depths=3, depth_cost=0.01))

    with Model(tiny_model) as model:
        steep = planned(model, CostCurve((1, 2, 64), (1.0, 3.0, 90.0), (1.0, 3.0, 90.0)))
        flat = planned(model, CostCurve((1, 64), (1.0, 1.001), (1.0, 1.001)))
    assert steep == 1
    assert flat > 3


def test_a_bad_csv_is_refused_before_anything_runs(
    tiny_model: Path, heads: Path, tmp_path: Path
) -> None:
    path = csv_file(tmp_path, "head,rank,accuracy\n0,0,2\n")
    with pytest.raises(MalformedFileError, match="line 2"):
        Runtime(
            tiny_model, drafter=f"medusa({quoted(str(heads))}, accuracy={quoted(str(path))})", **F32
        )


@pytest.mark.parametrize("blocks", [1, 3])
def test_many_heads_and_blocks_fit_a_graph(tiny_model: Path, tmp_path: Path, blocks: int) -> None:
    many = random_medusa(HIDDEN, VOCAB, heads=24, blocks=blocks, own_output=False)
    path = many.write(tmp_path / "many.gguf", VOCAB)
    chain = "x".join(["1"] * 24)
    with Runtime(
        tiny_model, drafter=f"medusa({quoted(str(path))}, tree={chain})", **F32
    ) as runtime:
        assert (
            runtime.generate(
                [5, 6, 7], SamplingParams(temperature=0.0), max_tokens=30
            ).stats.drafted
            > 0
        )
