"""EAGLE-2's dynamic trees: expand the best k nodes of each depth, then keep the best N of all (Li et al. 2024).

The value of a node is the product of the draft probabilities on its path, an estimate of the probability that
it is accepted (section 3.1). Expansion: of each depth, the k nodes of highest value are evaluated, and each gets
its k most likely children (section 4.1). Reranking: of all children made, the N of highest value are the tree
(section 4.2); a parent is worth no less than its child, so they form one.

Choosing nodes by their values is exact for point masses only: pruning drawn tokens by their own probability would
change what the remaining ones are draws of.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specrun.bindings.context import MAX_SEQUENCES
from specrun.bindings.errors import OptionError
from specrun.runtime.drafters.proposals import most_likely
from specrun.runtime.drafters.topology import MAX_NODES
from specrun.runtime.drafters.tree_growth import LawSource
from specrun.runtime.law import Law
from specrun.runtime.tree import ROOT, DraftTree, TreeBuilder

__all__ = ["DynamicShape", "grow_by_path_probability"]


@dataclass(frozen=True, slots=True)
class DynamicShape:
    """How far a dynamic tree may grow: `depth` tokens deep, `topk` wide, `nodes` in all."""

    depth: int
    topk: int
    nodes: int

    def __post_init__(self) -> None:
        for name in ("depth", "topk", "nodes"):
            if not 1 <= getattr(self, name) <= MAX_NODES:
                raise OptionError(f"{name} is {getattr(self, name)}: give 1 to {MAX_NODES}")
        if self.nodes < self.depth:
            raise OptionError(
                f"nodes={self.nodes} is less than depth={self.depth}: a tree has at least one node for each depth; "
                "raise nodes or lower depth"
            )
        if self.n_draft_sequences > MAX_SEQUENCES:
            raise OptionError(
                f"depth={self.depth} and topk={self.topk} need {self.n_draft_sequences} sequences in the draft "
                f"model: llama.cpp allows {MAX_SEQUENCES}; lower one of them"
            )

    def limited(self, max_depth: int, max_nodes: int) -> DynamicShape:
        """Return a shape that keeps these limits, both at least 1."""
        if max_depth >= self.depth and max_nodes >= self.nodes:
            return self
        nodes = min(self.nodes, max_nodes)
        return DynamicShape(min(self.depth, max_depth, nodes), self.topk, nodes)

    @property
    def max_nodes(self) -> int:
        """The most nodes that a tree of this shape has."""
        return min(self.nodes, self.topk + (self.depth - 1) * self.topk**2)

    @property
    def max_leaves(self) -> int:
        """The most leaves: with n nodes of at most k children each, at least n/k - 1 are no leaves."""
        return min(self.max_nodes, self.max_nodes + 1 - -(-self.max_nodes // self.topk))

    @property
    def n_draft_sequences(self) -> int:
        """The most sequences that the evaluated nodes need: each depth branches off at most topk - 1."""
        return 1 + (self.topk - 1) * (self.depth - 1)


def grow_by_path_probability(shape: DynamicShape, laws: LawSource, p_min: float = 0.0) -> DraftTree:
    """Return the tree of the best nodes. A law whose best token is under `p_min` gives no children."""
    tokens: list[int] = []
    parents: list[int] = []
    values: list[float] = []
    expanded = [ROOT]
    level_laws = [laws.root()]
    numbers = {ROOT: ROOT}  # of evaluated nodes, as the source of laws counts them
    for depth in range(1, shape.depth + 1):
        first = len(tokens)
        for parent, law in zip(expanded, level_laws, strict=True):
            _add_children(parent, law, shape.topk, p_min, tokens, parents, values)
        if depth == shape.depth or first == len(tokens):
            break
        expanded = sorted(_best(values, shape.topk, first))
        level_laws = list(
            laws.below([numbers[parents[node]] for node in expanded], [tokens[node] for node in expanded])
        )
        for node in expanded:
            numbers[node] = len(numbers) - 1
    return _tree_of(sorted(_best(values, shape.nodes)), tokens, parents)


def _add_children(
    parent: int, law: Law, topk: int, p_min: float, tokens: list[int], parents: list[int], values: list[float]
) -> None:
    """Append the `topk` most likely children of an evaluated node with their values."""
    children = most_likely(law, topk)
    if not children or children[0][1] < p_min:
        return
    value = 1.0 if parent == ROOT else values[parent]
    for token, probability in children:
        tokens.append(token)
        parents.append(parent)
        values.append(value * probability)


def _best(values: list[float], count: int, first: int = 0) -> list[int]:
    """Return the nodes of the `count` highest values from node `first` on, earlier ones first among equals."""
    best: list[int] = (np.argsort(-np.array(values[first:]), kind="stable")[:count] + first).tolist()
    return best


def _tree_of(nodes: list[int], tokens: list[int], parents: list[int]) -> DraftTree:
    """Return the tree of these nodes, which are in order and closed under parents."""
    builder = TreeBuilder()
    places = {ROOT: ROOT}
    for node in nodes:
        places[node] = builder.add(places[parents[node]], tokens[node])
    return builder.build()
