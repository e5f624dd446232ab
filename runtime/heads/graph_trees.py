"""Trees of best tokens that a head grows inside one graph: their plans, and what comes back.

Static shapes and EAGLE-2's dynamic ones. The graph names the children of every node that a shape
evaluates (`heads.tree_graphs`); here they become a draft tree.
"""

from __future__ import annotations

import numpy as np

from specrun.runtime.heads.tree_graphs import NamedChildren, TreePlan
from specrun.runtime.trees.eagle2 import DynamicShape, NodeChoice
from specrun.runtime.trees.topology import Topology
from specrun.runtime.trees.tree import ROOT, DraftTree


class GraphTrees:
    """A shape, and the plan by which a head's graph grows it.

    Where a request allows less than the shape, what a smaller one has is a part of what the graph
    names. A dynamic shape that is less deep has a plan of its own (`plan_of`), whose children are
    numbered alike.
    """

    def __init__(self, shape: Topology | DynamicShape) -> None:
        self._shape = shape
        self._plans: dict[int, TreePlan] = {}
        if isinstance(shape, DynamicShape):
            self.plan = _dynamic_plan(shape.depth, shape.topk)
            # Of each child, the row that named it: the first is the root.
            n_children = self.plan.first_children[-1]
            self._rows = [child // shape.topk for child in range(n_children)]
        else:
            self.plan, self._numbers = _fixed_plan(shape)

    def plan_of(self, depth: int | None) -> TreePlan:
        """Return the plan of a tree that is at most so deep, of a dynamic shape; None: of all."""
        if depth is None or depth >= len(self.plan.ranks) or isinstance(self._shape, Topology):
            return self.plan
        plan = self._plans.get(depth)
        if plan is None:
            plan = self._plans[depth] = _dynamic_plan(depth, self._shape.topk)
        return plan

    def drafted(
        self, named: NamedChildren, max_depth: int, max_nodes: int, size: NodeChoice | None = None
    ) -> DraftTree:
        """Return the tree of what a graph named, within these limits, both at least 1.

        With `size` a dynamic tree has only those nodes that pay.
        """
        shape = self._shape.limited(max_depth, max_nodes)
        if isinstance(shape, Topology):
            n = len(shape.parents)
            tokens = [*map(named.tokens.__getitem__, self._numbers[:n])]
            return DraftTree.of_points(tokens, shape.parents)
        return self._best(named, shape, size)

    def _best(
        self, named: NamedChildren, shape: DynamicShape, size: NodeChoice | None
    ) -> DraftTree:
        """Return the tree of the nodes of highest value (Li et al. 2024, section 4.2)."""
        assert named.values is not None
        assert named.rows is not None
        n = self.plan.first_children[shape.depth]
        values: list[float] = named.values[:n].tolist()
        tokens, children = named.tokens, [ROOT, *named.rows.tolist()]
        if size is not None:
            above = [children[row] for row in self._rows[:n]]
            # The graph adds logarithms.
            kept = size.best(np.exp(named.values[:n]).tolist(), above, shape.nodes)
        else:
            # Among equals the earlier: a parent is worth no less than its child, and comes before
            # it. For so few, lists are quicker than arrays.
            kept = sorted(range(n), key=values.__getitem__, reverse=True)[: shape.nodes]
            kept.sort()
        places = {ROOT: ROOT} | {child: place for place, child in enumerate(kept)}
        parents = tuple([places[children[self._rows[child]]] for child in kept])
        tree = DraftTree.of_points([tokens[child] for child in kept], parents)
        return tree if size is None else size.drafted(tree)


def _fixed_plan(topology: Topology) -> tuple[TreePlan, list[int]]:
    """Return the plan of a shape, and the number of the child that each of its places is."""
    depths, children = topology.depths, topology.children
    levels = [[ROOT]] if len(topology) else []
    levels += [
        [place for place, depth in enumerate(depths) if depth == level and place in children]
        for level in range(1, len(topology.inner_widths))
    ]
    ranks = tuple(max(len(children[place]) for place in level) for level in levels)
    numbers = [0] * len(topology)
    first, chosen = 0, []
    for level, below, n_ranks in zip(levels, [*levels[1:], []], ranks, strict=True):
        for row, place in enumerate(level):
            for rank, child in enumerate(children[place]):
                numbers[child] = first + row * n_ranks + rank
        chosen.append(tuple(numbers[child] - first for child in below))
        first += len(level) * n_ranks
    return TreePlan(ranks, topology.inner_widths, tuple(chosen[:-1])), numbers


def _dynamic_plan(depth: int, topk: int) -> TreePlan:
    widths = (1,) + (topk,) * (depth - 1)
    # All children of the root are rows of the next depth: there is nothing to choose.
    chosen = (tuple(range(topk)),) + (None,) * (depth - 2) if depth > 1 else ()
    return TreePlan((topk,) * depth, widths, chosen, has_values=True)
