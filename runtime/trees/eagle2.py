"""EAGLE-2's dynamic trees: expand the best k nodes of each depth, keep the best N (Li et al. 2024).

The value of a node is the product of the draft probabilities on its path, an estimate of the
probability that it is accepted (section 3.1). Expansion: of each depth, the k nodes of highest
value are evaluated, and each gets its k most likely children (section 4.1). Reranking: of all
children made, the N of highest value are the tree (section 4.2); a parent is worth no less than its
child, so they are connected. A head's graph may expand all depths at once (`heads.tree_graphs`);
its nodes are reranked here as well. With nodes=auto a plan chooses N in every round.

Choosing nodes by their values is exact for point masses only: pruning drawn tokens by their own
probability would change the distribution of the remaining ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from specrun.bindings.errors import OptionError
from specrun.runtime.laws.law import Law
from specrun.runtime.trees.growth import LawSource, Steps, TreeSampling, drive, most_likely
from specrun.runtime.trees.topology import MAX_NODES, Topology, check_leaves
from specrun.runtime.trees.tree import ROOT, DraftTree


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
                f"nodes={self.nodes} is less than depth={self.depth}: a tree has at least one node "
                "for each depth; raise nodes or lower depth"
            )
        # Each branch that the draft model evaluates takes a sequence id of llama.cpp's.
        asked = f"depth={self.depth} and topk={self.topk} in the draft model"
        check_leaves(asked, self.n_draft_sequences)

    def limited(self, max_depth: int, max_nodes: int) -> DynamicShape:
        """Return a shape that keeps these limits, both at least 1."""
        if max_depth >= self.depth and max_nodes >= self.nodes:
            return self
        nodes = min(self.nodes, max_nodes)
        # Depth is cut to the nodes too, or the new shape would refuse itself.
        return DynamicShape(min(self.depth, max_depth, nodes), self.topk, nodes)

    @property
    def max_depth(self) -> int:
        """How deep a tree of this shape is, at most."""
        return self.depth

    @property
    def max_nodes(self) -> int:
        """The most nodes that a tree of this shape has."""
        # topk children of the root, then topk of each of topk nodes at every further depth.
        return min(self.nodes, self.topk + (self.depth - 1) * self.topk**2)

    @property
    def max_leaves(self) -> int:
        """The most leaves: of n nodes with at most k children each, at least n/k - 1 are inner."""
        return min(self.max_nodes, self.max_nodes + 1 - -(-self.max_nodes // self.topk))

    @property
    def max_width(self) -> int:
        """The most children that a node has."""
        return self.topk

    @property
    def n_draft_sequences(self) -> int:
        """The most sequences of the evaluated nodes: each depth branches off up to topk - 1."""
        return 1 + (self.topk - 1) * (self.depth - 1)


class NodeChoice(Protocol):
    """Chooses how many nodes are kept in each round (`planning.draft_plan`)."""

    def best(self, values: Sequence[float], parents: Sequence[int], most: int) -> list[int]:
        """Return at most `most` nodes, rising, of paths with these probabilities."""

    def drafted(self, tree: DraftTree) -> DraftTree:
        """Note the tree of these nodes; return it."""


def check_sampling(shape: Topology | DynamicShape, sampling: TreeSampling) -> None:
    """Refuse draws in a dynamic tree, which chooses its nodes by their values."""
    if isinstance(shape, DynamicShape) and sampling != "argmax":
        raise OptionError(
            f"sampling={sampling} with a dynamic tree would choose drawn tokens by their own "
            "probability, which biases the text: use sampling=argmax, or a fixed tree=..."
        )


@dataclass(slots=True)
class GrownTree:
    """All nodes that a dynamic tree looked at, parents first, before the best of them are kept.

    `values` are the products of the draft probabilities on their paths; `depths` count from 1.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)

    def by_value(self) -> list[int]:
        """Return all nodes, the highest value first: parents before children, also among equals."""
        return _best(self.values, len(self.values))

    def reranked(self, nodes: int, choice: NodeChoice | None = None) -> DraftTree:
        """Return the tree of the `nodes` nodes of highest value (section 4.2: reranking).

        With `choice` only those of them that pay.
        """
        if choice is not None:
            return choice.drafted(self.tree_of(choice.best(self.values, self.parents, nodes)))
        # In the order in which they were made, which has parents before children.
        return self.tree_of(sorted(_best(self.values, nodes)))

    def tree_of(self, kept: Sequence[int]) -> DraftTree:
        """Return the tree of these nodes, rising, of which none may lack its parent."""
        places = dict(zip(kept, range(len(kept)), strict=True))
        places[ROOT] = ROOT
        # No parent is missing: it is worth no less than its child and comes first among equals.
        above = map(self.parents.__getitem__, kept)
        tokens = [*map(self.tokens.__getitem__, kept)]
        return DraftTree.of_points(tokens, (*map(places.__getitem__, above),))


def grow_by_path_probability(
    shape: DynamicShape, laws: LawSource, p_min: float = 0.0, size: NodeChoice | None = None
) -> DraftTree:
    """Return the tree of the best nodes, none below a distribution that is less sure than `p_min`.

    With `size` only those of them that pay.
    """
    return drive(path_probability_steps(shape, p_min, size), laws)


def path_probability_steps(
    shape: DynamicShape, p_min: float = 0.0, size: NodeChoice | None = None
) -> Steps[DraftTree]:
    """Grow a tree as `grow_by_path_probability` does."""
    grown = yield from expansion_steps(shape.depth, shape.topk, p_min)
    return grown.reranked(shape.nodes, size)


def expand_by_path_probability(
    depth: int, topk: int, laws: LawSource, p_min: float = 0.0
) -> GrownTree:
    """Return all children of the best `topk` nodes of each depth (section 4.1: expansion).

    A tree expanded less deep is the part of this one down to its depth.
    """
    return drive(expansion_steps(depth, topk, p_min), laws)


def expansion_steps(depth: int, topk: int, p_min: float = 0.0) -> Steps[GrownTree]:
    """Expand as `expand_by_path_probability` does."""
    grown = GrownTree()
    expanded = [ROOT]
    level_laws: Sequence[Law] = yield (), ()
    numbers = {ROOT: ROOT}  # of evaluated nodes, as the source of distributions counts them
    for level in range(1, depth + 1):
        first = len(grown.tokens)
        for parent, law in zip(expanded, level_laws, strict=True):
            _add_children(parent, law, topk, p_min, level, grown)
        # Leaves need no distributions: the last depth is not evaluated.
        if level == depth or first == len(grown.tokens):
            break
        # In the order in which they were made: siblings stay side by side.
        expanded = sorted(_best(grown.values, topk, first))
        parents = [numbers[grown.parents[node]] for node in expanded]
        level_laws = yield parents, [grown.tokens[node] for node in expanded]
        for node in expanded:
            numbers[node] = len(numbers) - 1
    return grown


def _add_children(
    parent: int, law: Law, topk: int, p_min: float, depth: int, grown: GrownTree
) -> None:
    """Append the `topk` most likely children of an evaluated node with their values."""
    children = most_likely(law, topk)
    if not children or (p_min and law.most_likely[1] < p_min):
        return
    # The product of the draft probabilities on the path (section 3.1).
    value = 1.0 if parent == ROOT else grown.values[parent]
    grown.tokens += [token for token, _ in children]
    grown.values += [value * probability for _, probability in children]
    grown.parents += [parent] * len(children)
    grown.depths += [depth] * len(children)


def _best(values: list[float], count: int, first: int = 0) -> list[int]:
    """Return the `count` nodes of highest value from `first` on, earlier ones first if equal."""
    # A list's sort keeps equals in order, reversed too, and for so few is quicker than an array's.
    return sorted(range(first, len(values)), key=values.__getitem__, reverse=True)[:count]
