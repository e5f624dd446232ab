"""Puts one drafter's tree below a node of another's."""

from __future__ import annotations

from specrun.bindings.errors import OptionError
from specrun.runtime.tree import ROOT, DraftTree, Draw

__all__ = ["first_path", "graft"]


def first_path(tree: DraftTree) -> tuple[int, ...]:
    """Return the path of each node's first draw, from the root down: where a drafter bets most."""
    path: list[int] = []
    node = ROOT
    while draws := tree.draws.get(node):
        node = draws[0].node
        path.append(node)
    return tuple(path)


def graft(tree: DraftTree, node: int, below: DraftTree) -> tuple[DraftTree, dict[int, int]]:
    """Return `tree` with `below` grown from one of its nodes (or ROOT), and where the nodes of `below` went.

    The node must have no draws yet: draws of one parent are tested in the order in which they were made, and
    whoever wants to add some must merge the trees instead.
    """
    if node in tree.draws:
        raise OptionError(f"node {node} already has drafted children: nothing can be grafted there")
    if not len(below):
        return tree, {ROOT: node}
    first = len(tree)
    depth = 0 if node == ROOT else tree.depths[node]
    places = {ROOT: node, **{one: first + one for one in range(len(below))}}
    draws = {
        places[parent]: tuple(Draw(places[draw.node], draw.law) for draw in made)
        for parent, made in below.draws.items()
    }
    grafted = DraftTree(
        tree.tokens + below.tokens,
        tree.parents + tuple(places[parent] for parent in below.parents),
        tree.depths + tuple(depth + one for one in below.depths),
        tree.is_candidate + below.is_candidate,
        {**tree.draws, **draws},
    )
    return grafted, places
