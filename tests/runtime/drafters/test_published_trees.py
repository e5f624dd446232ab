"""Trees as the authors of heads write them: lists of ranks, and the names of those that were
published."""

from __future__ import annotations

import pytest

from specrun.bindings.errors import OptionError
from specrun.runtime.language import METHODS
from specrun.runtime.trees import parse_topology

# As it stands in Medusa's medusa_choices.py.
MC_SIM_7B_63 = (
    "[[0], [0, 0], [1], [0, 1], [2], [0, 0, 0], [1, 0], [0, 2], [3], [0, 3], [4], [0, 4], [2, "
    "0], [0, 5], [0, 0, 1], "
    "[5], [0, 6], [6], [0, 7], [0, 1, 0], [1, 1], [7], [0, 8], [0, 0, 2], [3, 0], [0, 9], [8], "
    "[9], [1, 0, 0], "
    "[0, 2, 0], [1, 2], [0, 0, 3], [4, 0], [2, 1], [0, 0, 4], [0, 0, 5], [0, 0, 0, 0], [0, 1, "
    "1], [0, 0, 6], "
    "[0, 3, 0], [5, 0], [1, 3], [0, 0, 7], [0, 0, 8], [0, 0, 9], [6, 0], [0, 4, 0], [1, 4], [7, "
    "0], [0, 1, 2], "
    "[2, 0, 0], [3, 1], [2, 2], [8, 0], [0, 5, 0], [1, 5], [1, 0, 1], [0, 2, 1], [9, 0], [0, 6, "
    "0], [0, 0, 0, 1], "
    "[1, 6], [0, 7, 0]]"
)


def test_medusas_published_tree_is_what_its_name_says() -> None:
    tree = parse_topology(MC_SIM_7B_63)
    assert len(tree) == 63
    assert (tree.max_depth, tree.max_width, tree.n_leaves) == (4, 10, 42)
    assert tree == parse_topology(METHODS["medusa"].published_tree("mc_sim_7b_63"))
    assert tree == parse_topology(METHODS["hydra"].published_tree("mc_sim_7b_63"))
    assert tree == parse_topology(
        MC_SIM_7B_63.replace("[", "(").replace("]", ",)")
    )  # tuples, as other versions have


def test_the_other_published_trees_can_be_read() -> None:
    assert len(parse_topology(METHODS["medusa"].published_tree("vicuna_7b_stage2"))) == 63
    eagle = parse_topology(
        METHODS["eagle"].published_tree("mc_sim_7b_63")
    )  # EAGLE-1's own tree under Medusa's name
    assert (len(eagle), eagle.max_depth, eagle.max_width) == (25, 5, 4)
    assert METHODS["medusa"].published_tree("4x2") == "4x2"


def test_lists_and_names_of_nodes_are_the_same_tree() -> None:
    tree = parse_topology("[[0], [1], [0, 0], [0, 1], [0, 0, 0]]")
    assert tree == parse_topology("0 1 00 01 000")
    assert parse_topology(f"[{', '.join(f'[{rank}]' for rank in range(32))}]") == parse_topology(
        "32"
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[[0], [1]", "is not a list of nodes"),
        ("[0, 1]", "is not a list of nodes"),
        ("[[0], []]", "is not a list of nodes"),
        ("[[0], [x]]", "is not a list of nodes"),
        ("[" * 5000, "is not a list of nodes"),
        ("[[0], [32]]", "ranks from 0 to 31"),
        ("[[0], [[0]]]", "ranks from 0 to 31"),
        ("[[0], [2]]", "without its sibling 1"),
        ("[[0, 0]]", "without its parent 0"),
        ("[[0], [0]]", "twice"),
        ("[]", "tree is empty"),
    ],
)
def test_lists_that_are_no_trees_are_refused(text: str, problem: str) -> None:
    with pytest.raises(OptionError, match=problem):
        parse_topology(text)
