"""The shapes of draft trees, and what is refused of them."""

from __future__ import annotations

import pytest

from specrun.bindings.errors import OptionError
from specrun.runtime.drafters.tree_options import TreeOptions
from specrun.runtime.planning import best_tree, typical_acceptance
from specrun.runtime.trees import ROOT, DynamicShape, Topology, parse_topology


def plan(nodes: int, depth: int) -> Topology:
    return best_tree(typical_acceptance("without"), nodes, depth)


def test_branching_factors_make_a_full_tree() -> None:
    tree = parse_topology("4x2x2")
    assert len(tree) == 4 + 8 + 16
    assert tree.n_leaves == 16
    assert tree.max_depth == 3
    assert tree.max_width == 4
    assert tree.inner_widths == (1, 4, 8)  # the leaves are never evaluated by the drafter
    assert tree.n_inner_leaves == 8


def test_a_list_names_every_node_by_its_ranks_in_any_order() -> None:
    tree = parse_topology("000 1 0 01 00")
    assert tree == Topology((ROOT, ROOT, 0, 0, 2))
    assert str(tree) == "0 1 00 01 000"
    assert tree.n_leaves == 3
    assert tree.inner_widths == (1, 1, 1)
    assert tree.n_inner_leaves == 1


@pytest.mark.parametrize("text", ["1", "3", "1x1x1", "2x3", "12x2", "0", "0 1 00 01 000"])
def test_a_shape_survives_its_own_notation(text: str) -> None:
    tree = parse_topology(text)
    assert parse_topology(str(tree)) == tree


def test_limits_cut_the_deepest_nodes_first() -> None:
    tree = parse_topology("2x2x2")
    assert tree.limited(9, 99) is tree
    assert tree.limited(2, 99) == parse_topology("2x2")
    assert tree.limited(3, 5) == parse_topology("0 1 00 01 10")
    assert len(tree.limited(0, 5)) == len(tree.limited(3, 0)) == 0


def test_a_dynamic_shape_knows_its_most_leaves() -> None:
    assert DynamicShape(depth=1, topk=4, nodes=4).max_leaves == 4
    assert DynamicShape(depth=5, topk=1, nodes=5).max_leaves == 1
    assert DynamicShape(depth=5, topk=4, nodes=16).max_leaves == 13
    assert DynamicShape(depth=2, topk=2, nodes=100).max_nodes == 6
    assert DynamicShape(5, 4, 16).limited(2, 8) == DynamicShape(2, 4, 8)
    assert DynamicShape(5, 4, 16).limited(9, 1) == DynamicShape(1, 4, 1)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is empty"),
        ("4x0", "branching factor of 0"),
        ("300", "llama.cpp allows 256"),
        ("20x20", "llama.cpp allows 256"),
        ("999999999x999999999", "more than 1024 nodes"),
        ("00", "without its parent 0"),
        ("0 2", "without its sibling 1"),
        ("0 0", "twice"),
        ("sequoja", "is not a tree: .* or sequoia"),
        ("4x2y", "is not a node"),
        ("-1", "is not a node"),
        (" ".join("0" * depth for depth in range(1, 1026)), "1024 at most"),
    ],
)
def test_impossible_trees_are_refused_by_name(text: str, problem: str) -> None:
    with pytest.raises(OptionError, match=problem) as caught:
        parse_topology(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (TreeOptions(tree="4x2", n=5), "give one of them"),
        (TreeOptions(nodes=8, n=5), "give one of them"),
        (TreeOptions(tree="4x2", nodes=5), "leave out nodes=5"),
        (TreeOptions(tree="4x2", depth=5), "leave out depth=5"),
        (TreeOptions(tree="sequoia", topk=5), "leave out topk=5"),
        (TreeOptions(depth=8, nodes=5), "nodes=5 is less than depth=8"),
        (TreeOptions(tree="sequoia", depth=8, nodes=5), "nodes=5 is less than depth=8"),
        (TreeOptions(depth=0), "depth is 0"),
        (TreeOptions(topk=-1), "topk is -1"),
        (TreeOptions(nodes=10**9), "nodes is 1000000000"),
        (TreeOptions(nodes=-3), "nodes is -3"),
        (TreeOptions(tree="sequoia", nodes=10**9), "nodes is 1000000000"),
        (TreeOptions(tree="sequoia", nodes=300), "0 to 256 nodes"),
        (TreeOptions(tree="sequoia", depth=0), "depth is 0"),
        (
            TreeOptions(depth=200, topk=3, nodes=200),
            "in the draft model: 399 leaves need as many sequences",
        ),
        (TreeOptions(depth=2, topk=250, nodes=1000), "llama.cpp allows 256: lower nodes"),
        (TreeOptions(tree="1x" * 99 + "1"), "do not fit a batch of 64"),
        (TreeOptions(tree="8x8"), "do not fit a batch of 64"),
        (TreeOptions(nodes=64, topk=8), "do not fit a batch of 64"),
    ],
)
def test_options_that_no_evaluation_can_hold_are_refused(
    options: TreeOptions, problem: str
) -> None:
    with pytest.raises(OptionError, match=problem) as caught:
        options.shape(64, plan, 15)
    assert "\n" not in str(caught.value)


def test_options_make_shapes() -> None:
    assert TreeOptions(tree="2x2").shape(64, plan, 15) == parse_topology("2x2")
    assert TreeOptions(depth=3).shape(64, plan, 15) == DynamicShape(3, 4, 16)
    assert TreeOptions(depth=3, topk=2, nodes=9).shape(64, plan, 15) == DynamicShape(3, 2, 9)
    planned = TreeOptions(tree="sequoia", nodes=9, depth=3).shape(64, plan, 15)
    assert isinstance(planned, Topology)
    assert len(planned) == 9
    assert planned.max_depth <= 3
    assert not TreeOptions(n=5).asks_for_tree
    assert not TreeOptions().asks_for_tree
