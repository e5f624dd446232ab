"""Draft trees of best tokens grown inside one graph: EAGLE's and Hydra's, fixed and dynamic.

Depth by depth, each evaluation of a head costs inputs, outputs and Python, and all of them find the
processor's caches full of weights. Here the best tokens of a depth are found, chosen from and fed
to the next depth inside the graph, as in greedy chains (`graphs`), and the tree comes back in one
read. Draws cannot be made so: a noise source decides them.

A depth evaluates rows; each names its best tokens, its children. Children are numbered over the
whole tree in the order of the rows that named them, which has parents before children. Which of
them are the next depth's rows is fixed by the shape, or they are those of the highest path
probability (EAGLE-2, Li et al. 2024, section 4.1), in the order of their numbers.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import UnsupportedModelError
from specrun.bindings.ggml import ComputeDevice, Graph, GraphBuilder, Tensor, TensorStore
from specrun.runtime.heads.graphs import MOST_CHAIN_ROWS, MOST_DEPTHS, LengthGraphs, NativeShare
from specrun.runtime.heads.states import RowPiece
from specrun.runtime.round.drafter import close_all
from specrun.runtime.trees.eagle2 import DynamicShape, GrownTree, NodeChoice
from specrun.runtime.trees.topology import Topology
from specrun.runtime.trees.tree import ROOT, DraftTree

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True)
class TreePlan:
    """The rows of every depth, and how many children each names.

    `ranks[d]` are the children of a row of depth d, `widths[d]` how many rows it has, the root's
    being the first with one. `chosen[d]` are the children of depth d, counted there from 0, that
    are evaluated as rows of the next, ascending; None stands for those of the highest path
    probability. `has_values`: the children's path probabilities are requested.
    """

    ranks: tuple[int, ...]
    widths: tuple[int, ...]
    chosen: tuple[tuple[int, ...] | None, ...]
    has_values: bool = False

    @functools.cached_property
    def n_drafted(self) -> int:
        """How many rows there are below the root's."""
        return sum(self.widths) - 1

    @functools.cached_property
    def first_rows(self) -> tuple[int, ...]:
        """The number of each depth's first row; the last entry is how many rows there are."""
        return (0, *accumulate(self.widths))

    @functools.cached_property
    def first_children(self) -> tuple[int, ...]:
        """The number of each depth's first child; the last entry is how many children there are."""
        made = (ranks * width for ranks, width in zip(self.ranks, self.widths, strict=True))
        return (0, *accumulate(made))

    @functools.cached_property
    def row_depths(self) -> npt.NDArray[np.int64]:
        """The depth of each row, 0 for the root."""
        return np.repeat(np.arange(len(self.widths)), self.widths)


@dataclass(slots=True)
class NamedChildren:
    """The children of a tree by number: their tokens, of the target, and views of the rest.

    If the plan has values, `values` are the natural logarithms of their path probabilities, and
    `rows` the numbers of the children that became rows, from the second depth's first row on.
    """

    tokens: list[int]
    values: npt.NDArray[np.float32] | None = None
    rows: IntArray | None = None

    def probabilities(self) -> npt.NDArray[np.float64]:
        """Return the path probabilities of the children."""
        assert self.values is not None
        return np.exp(self.values, dtype=np.float64)


class TreeGraphs(LengthGraphs[int], ABC):
    """The graphs of a head's trees of one plan, and the table of their results.

    `build` takes length and width of the text's rows, and grows the tree with `grow`. Close it
    before the device.
    """

    def __init__(
        self, device: ComputeDevice, plan: TreePlan, build: Callable[[int, int], Graph]
    ) -> None:
        super().__init__(build)
        self.plan = plan
        n_children, widest = plan.first_children[-1], max(plan.widths)
        shapes = {"tokens": ("I32", (n_children,)), "zeros": ("F32", (1, widest))}
        if plan.has_values:
            shapes |= {"values": ("F32", (n_children,)), "rows": ("I32", (max(1, plan.n_drafted),))}
        constants: dict[str, IntArray] = {}
        for depth, ranks in enumerate(plan.ranks):
            places = plan.chosen[depth] if depth < len(plan.chosen) else ()
            n_here = ranks * plan.widths[depth]
            first = plan.first_children[depth]
            constants[f"parents{depth}"] = np.arange(n_here, dtype=np.int32) // ranks
            constants[f"numbers{depth}"] = np.arange(first, first + n_here, dtype=np.int32)
            if places:
                constants[f"chosen{depth}"] = np.array(places, np.int32)
        shapes |= {name: ("I32", (1, len(array))) for name, array in constants.items()}
        self._table = TensorStore(device, shapes)
        for name, array in constants.items():
            self._table.write(name, array)

    @abstractmethod
    def run(self, piece: RowPiece, last: int) -> NamedChildren:
        """Return the children of a tree behind a piece of rows and the text's last token.

        Its views are valid until the next `run`. Raises UnsupportedModelError if no backend
        computes the graph.
        """

    def grow(
        self,
        builder: GraphBuilder,
        logits: Tensor,
        below: Callable[[int, NextRows], Tensor],
        ids: Tensor | None = None,
    ) -> Graph:
        """Build the graph of a tree whose root has these logits, (vocab, 1).

        `below` adds a depth's rows to the graph and returns their logits, (vocab, n). `ids`, I32
        (1, vocab), names the target's tokens if the logits are of others.
        """
        values, depth = None, 0
        while (rows := self.add(builder, logits, depth, values, ids)) is not None:
            depth, values = depth + 1, rows.values
            logits = below(depth, rows)
        for name in ("tokens", "values", "rows") if self.plan.has_values else ("tokens",):
            table = Tensor(self._table[name])
            builder.output(name, builder.columns(table, 0, table.shape[0]))
        return builder.build()

    def zeros(self, builder: GraphBuilder, count: int) -> Tensor:
        """Return zeros, F32 (1, count)."""
        return builder.rows(Tensor(self._table["zeros"]), 0, count)

    def add(
        self,
        builder: GraphBuilder,
        logits: Tensor,
        depth: int,
        values: Tensor | None,
        ids: Tensor | None,
    ) -> NextRows | None:
        """Note the children of a depth's rows, logits (vocab, n); return the next depth's rows.

        None after the last depth. `values`, (1, n), are those of the rows, None at the root.
        """
        plan, ranks, n = self.plan, self.plan.ranks[depth], self.plan.widths[depth]
        n_here = ranks * n
        best, highest = builder.best(logits, ranks)
        tokens = builder.reshape(best, n_here, 1)
        if ids is not None:
            tokens = builder.reshape(builder.get_rows(ids, tokens), n_here, 1)
        self._note(builder, "tokens", plan.first_children[depth], tokens)
        if plan.has_values:
            shares = builder.sub(highest, builder.log_sum_exp(logits, (best, highest)))
            paths = shares if values is None else builder.add(shares, values)
            values = builder.reshape(paths, n_here, 1)
            self._note(builder, "values", plan.first_children[depth], values)
        if depth == len(plan.chosen):
            return None
        width, here = plan.widths[depth + 1], plan.chosen[depth]
        if here is not None:
            places = builder.reshape(Tensor(self._table[f"chosen{depth}"]), width, 1)
        else:
            assert values is not None
            # Rows in the order of their numbers: siblings stay side by side.
            places, _ = builder.ascending(builder.top_k(values, width))
        if plan.has_values:
            numbers = builder.get_rows(Tensor(self._table[f"numbers{depth}"]), places)
            first = plan.first_rows[depth + 1] - 1
            self._note(builder, "rows", first, builder.reshape(numbers, width, 1))
        parents = builder.get_rows(Tensor(self._table[f"parents{depth}"]), places)
        return NextRows(
            builder.pick(tokens, places, width),
            builder.reshape(parents, width, 1),
            None
            if values is None
            else builder.reshape(builder.pick(values, places, width), 1, width),
        )

    def _note(self, builder: GraphBuilder, name: str, first: int, found: Tensor) -> None:
        place = builder.columns(Tensor(self._table[name]), first, found.n_elements)
        # Without keep, nothing downstream reads the copy, and ggml would leave it out of the graph.
        builder.keep(builder.copy(found, place))

    def named(self, graph: Graph) -> NamedChildren:
        """Compute a graph whose inputs are filled."""
        graph.compute()
        [tokens] = graph.numbers("tokens")
        if not self.plan.has_values:
            return NamedChildren(tokens)
        values, rows = graph.peek("values")[0], graph.peek("rows")[0, : self.plan.n_drafted]
        return NamedChildren(tokens, values.view(np.float32), rows.view(np.int32))

    def close(self) -> None:
        """Free graphs and table."""
        super().close()
        self._table.close()


class PlannedTrees:
    """The graphs of a conversation's trees by their depth: one plan of each, the last requested.

    `make` makes those of a plan when they are first needed. It, and running them, may raise
    UnsupportedModelError, if no backend computes them: that is found once. Their time goes into
    `share`.
    """

    def __init__(self, make: Callable[[TreePlan], TreeGraphs], share: NativeShare) -> None:
        self._make, self._share = make, share
        # The plan of each depth, and its graphs; None if there are none.
        self._of_depth: dict[int, tuple[TreePlan, TreeGraphs | None]] = {}

    def draft(self, plan: TreePlan, piece: RowPiece, last: int) -> NamedChildren | None:
        """Return the children behind a piece and the text's last token; None if one graph cannot.

        See `TreeGraphs.run`.
        """
        depth = len(plan.ranks)
        if depth > MOST_DEPTHS or len(piece) > MOST_CHAIN_ROWS:
            return None
        with self._share:
            try:
                known = self._of_depth.get(depth)
                if known is None or known[0] is not plan:
                    self._forget(depth)
                    known = self._of_depth[depth] = plan, self._make(plan)
                trees = known[1]
                return None if trees is None else trees.run(piece, last)
            except UnsupportedModelError:
                self._forget(depth)
                self._of_depth[depth] = plan, None
                return None

    def _forget(self, depth: int) -> None:
        _, trees = self._of_depth.pop(depth, (None, None))
        if trees is not None:
            trees.close()

    def close(self) -> None:
        """Free all graphs."""
        trees, self._of_depth = self._of_depth, {}
        close_all([graphs for _, graphs in trees.values() if graphs is not None])


@dataclass(frozen=True, slots=True)
class NextRows:
    """A depth's rows inside a graph: their tokens and the rows above them, I32 (n).

    Rows above are counted in their own depth from 0; `values` (1, n) are path probabilities in
    nats, None if the shape is fixed.
    """

    tokens: Tensor
    parents: Tensor
    values: Tensor | None


# == Draft trees of named children =================================================================


class ShapePlans:
    """A shape, the plans by which a head's graph grows it, and the draft trees that follow.

    If a request allows less than the shape, the smaller tree is a part of the graph's. A
    shape that is less deep has a plan of its own (`of`), whose children are numbered alike.
    """

    def __init__(self, shape: Topology | DynamicShape, *, has_values: bool = False) -> None:
        self._shape, self._has_values = shape, has_values
        self._plans: dict[int, tuple[TreePlan, list[int]]] = {}
        self._depth = shape.max_depth
        self.whole = self.of(self._depth)
        """The plan of the whole shape."""

    def of(self, depth: int) -> TreePlan:
        """Return the plan of a tree that is at most so deep."""
        return self._of(depth)[0]

    def _of(self, depth: int) -> tuple[TreePlan, list[int]]:
        """Return a plan, and the child that each place of a fixed shape is."""
        depth, shape = min(depth, self._depth), self._shape
        known = self._plans.get(depth)
        if known is None:
            if isinstance(shape, DynamicShape):
                known = _dynamic_plan(depth, shape.topk)
            else:
                known = _fixed_plan(shape.limited(depth, len(shape)), has_values=self._has_values)
            self._plans[depth] = known
        return known

    def tree(
        self,
        named: NamedChildren,
        depth: int,
        limits: tuple[int, int],
        choice: NodeChoice | None = None,
    ) -> DraftTree:
        """Return the tree of the children that the plan of a depth named.

        It keeps these limits of depth and nodes, both at least 1. With `choice` it has only those
        nodes that pay.
        """
        most_deep = limits[0] if limits[0] < depth else depth
        shape = self._shape.limited(most_deep, limits[1])
        plan, numbers = self._of(depth)
        if isinstance(shape, DynamicShape):
            # The rows are the root and the children that were chosen.
            assert named.rows is not None
            n, parents = plan.first_children[shape.depth], list[int]()
            for row in (ROOT, *named.rows.tolist()):
                parents += [row] * shape.topk
            values = named.probabilities()[:n].tolist()
            return GrownTree(named.tokens[:n], parents[:n], values).reranked(shape.nodes, choice)
        numbers = numbers[: len(shape)]
        tokens = [*map(named.tokens.__getitem__, numbers)]
        if choice is None:
            return DraftTree.of_points(tokens, shape.parents)
        values = named.probabilities()[numbers].tolist()
        return GrownTree(tokens, [*shape.parents], values).reranked(len(shape), choice)


def _fixed_plan(topology: Topology, *, has_values: bool) -> tuple[TreePlan, list[int]]:
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
    plan = TreePlan(ranks, topology.inner_widths, tuple(chosen[:-1]), has_values=has_values)
    return plan, numbers


def _dynamic_plan(depth: int, topk: int) -> tuple[TreePlan, list[int]]:
    widths = (1,) + (topk,) * (depth - 1)
    # All children of the root are rows of the next depth: there is nothing to choose.
    chosen = (tuple(range(topk)),) + (None,) * (depth - 2) if depth > 1 else ()
    return TreePlan((topk,) * depth, widths, chosen, has_values=True), []
