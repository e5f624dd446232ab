"""From the options of a drafter expression to the shape of its trees.

tree=4x2x2                      branching factors by depth
tree="0 1 00 01 000"            a list of nodes, each the path of child ranks that leads to it
tree=sequoia, nodes=24, depth=6 the best tree of so many nodes (see `planning.sequoia`)
depth=5, topk=4, nodes=16       grown where the drafter is sure (EAGLE-2)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specrun.bindings.errors import OptionError
from specrun.runtime.drafters.path_probability import DynamicShape
from specrun.runtime.drafters.topology import MAX_NODES, Topology, check_leaves, parse_topology

__all__ = ["TreeOptions"]

_DEPTH, _TOPK, _NODES = 5, 4, 16
_PLANNED_NODES = 24


@dataclass(frozen=True, slots=True)
class TreeOptions:
    """The options that describe a tree, None where they were not given."""

    tree: str | None = None
    depth: int | None = None
    topk: int | None = None
    nodes: int | None = None
    n: int | None = None

    @property
    def asks_for_tree(self) -> bool:
        """Whether any of them asks for more than a chain."""
        return any(one is not None for one in (self.tree, self.depth, self.topk, self.nodes))

    @property
    def is_dynamic(self) -> bool:
        """Whether the tree grows by path probability."""
        return self.tree is None

    def shape(self, n_batch: int, plan: Callable[[int, int], Topology]) -> Topology | DynamicShape:
        """Return the shape; `plan(nodes, depth)` makes Sequoia's.

        Raises `OptionError` for options that exclude each other and for trees that no evaluation can hold.
        """
        self._check_companions()
        shape: Topology | DynamicShape
        if self.tree is None:
            shape = DynamicShape(_given(self.depth, _DEPTH), _given(self.topk, _TOPK), _given(self.nodes, _NODES))
        elif self.tree == "sequoia":
            shape = self._planned(plan)
        else:
            shape = parse_topology(self.tree)
        size = shape.max_nodes
        check_leaves(f"a tree of {size} nodes", shape.max_leaves)
        if size + 1 > n_batch:
            raise OptionError(
                f"a tree of {size} nodes and its root do not fit a batch of {n_batch}: use a smaller tree, or raise "
                "the batch size (-b)"
            )
        return shape

    def _planned(self, plan: Callable[[int, int], Topology]) -> Topology:
        nodes = _given(self.nodes, _PLANNED_NODES)
        depth = _given(self.depth, min(nodes, MAX_NODES))
        if not 1 <= nodes <= MAX_NODES:
            raise OptionError(f"nodes is {nodes}: give 1 to {MAX_NODES}")
        if depth < 1:
            raise OptionError(f"depth is {depth}: give at least 1")
        if self.depth is not None and nodes < depth:
            raise OptionError(f"nodes={nodes} is less than depth={depth}: raise nodes or lower depth")
        return plan(nodes, depth)

    def _check_companions(self) -> None:
        if self.n is not None:
            shape = f"tree={self.tree}" if self.tree is not None else "depth, topk or nodes"
            raise OptionError(f"n={self.n} drafts a chain and {shape} a tree: give one of them")
        if self.tree is None:
            return
        extra = {"topk": self.topk}
        if self.tree != "sequoia":
            extra |= {"nodes": self.nodes, "depth": self.depth}
        for name, value in extra.items():
            if value is not None:
                raise OptionError(f"tree={self.tree[:60]} already fixes the shape: leave out {name}={value}")


def _given(value: int | None, default: int) -> int:
    return default if value is None else value
