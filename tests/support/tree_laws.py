"""A source of draft laws that reads a table instead of evaluating a model, and its drafters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specrun.runtime.laws import Law
from specrun.runtime.round import DraftRequest
from specrun.runtime.trees import (
    ROOT,
    DraftTree,
    DynamicShape,
    Propose,
    Stop,
    Threshold,
    Topology,
    TreeSampling,
    grow_by_path_probability,
    grow_tree,
    proposal_scheme,
)
from support.scripted import LawTable, law_of

Grow = Callable[[DraftRequest], DraftTree]


class TableLaws:
    """Draft laws by prefix; `batches` are the sizes of the evaluations a model would have made."""

    def __init__(self, table: LawTable, prefix: Sequence[int]) -> None:
        self._table = table
        self._prefix = tuple(prefix)
        self._paths: list[tuple[int, ...]] = []
        self.batches: list[int] = []

    def root(self) -> Law:
        return law_of(self._table(self._prefix))

    def below(self, parents: Sequence[int], tokens: Sequence[int]) -> list[Law]:
        self.batches.append(len(tokens))
        paths = [
            (*(() if parent == ROOT else self._paths[parent]), token)
            for parent, token in zip(parents, tokens, strict=True)
        ]
        self._paths += paths
        return [law_of(self._table([*self._prefix, *path])) for path in paths]


def fixed(
    drafts: LawTable, topology: Topology, sampling: TreeSampling | Propose, p_min: float = 0.0
) -> Grow:
    """Return what proposes trees of a fixed shape, as `DraftTreeDrafter` does with a model."""
    scheme = sampling if callable(sampling) else proposal_scheme(sampling)

    def propose(request: DraftRequest) -> DraftTree:
        limited = topology.limited(request.max_depth, request.max_nodes)
        laws = TableLaws(drafts, request.tokens)
        return grow_tree(
            limited, laws, scheme, request.noise, len(request.tokens), Threshold(p_min)
        )

    return propose


def dynamic(drafts: LawTable, shape: DynamicShape, p_min: float = 0.0) -> Grow:
    """Return what proposes EAGLE-2's trees."""

    def propose(request: DraftRequest) -> DraftTree:
        if request.max_depth < 1 or request.max_nodes < 1:
            return DraftTree()
        limited = shape.limited(request.max_depth, request.max_nodes)
        return grow_by_path_probability(limited, TableLaws(drafts, request.tokens), p_min)

    return propose


class ChainLaws:
    """Distributions after the tokens of a chain."""

    def __init__(self, law_after: Callable[[list[int]], Law]) -> None:
        self._law_after, self._drafted = law_after, list[int]()

    def root(self) -> Law:
        return self._law_after(self._drafted)

    def below(self, parents: Sequence[int], tokens: Sequence[int]) -> list[Law]:
        self._drafted += tokens
        return [self._law_after(self._drafted)]


def drawn_chain(
    law_after: Callable[[list[int]], Law],
    request: DraftRequest,
    most: int,
    stop: Stop | None = None,
) -> DraftTree:
    """A chain of draws, by the shipped growth."""
    chain, start = Topology.chain(max(0, most)), len(request.tokens)
    scheme = proposal_scheme("with")
    return grow_tree(chain, ChainLaws(law_after), scheme, request.noise, start, stop)


def drafted_bits(tree: DraftTree) -> list[object]:
    """The tokens and parents of a draft, and the laws they were drawn from, bit by bit."""
    made: list[object] = [tree.tokens, tree.parents, tree.depths, tree.is_candidate]
    for parent in sorted(tree.draws):
        for node, law in tree.draws[parent]:
            assert law is not None
            assert law.ids is not None
            made.append((parent, node, law.probs.tobytes(), law.ids.tobytes()))
    return made
