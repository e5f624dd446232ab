"""Ensembles: several drafters' trees merged by shared prefixes (SpecInfer, Miao et al. 2023).

Section 3 of the paper merges trees of tokens; here their draws are merged, too. A node that several
members drafted keeps every draw that produced it: the first member's draws in their order, then the
second's, and so on. Each draw stays independent of the other members', given the path above it, so
its distribution is the one it was drawn from; distributions and point masses may mix.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from specrun.bindings.errors import OptionError
from specrun.runtime.drafters.combinators.members import (
    MemberNoise,
    MembersDrafter,
    MembersRows,
    outcome_for,
)
from specrun.runtime.round.drafter import Drafter, DraftRequest, RoundOutcome
from specrun.runtime.trees.growth import TreeBuilder
from specrun.runtime.trees.tree import ROOT, DraftRows, DraftTree


class EnsembleDrafter(MembersDrafter):
    """Proposes the proposals of all its members. Owns them."""

    def __init__(self, members: Sequence[Drafter], *, name: str = "ensemble") -> None:
        if len(members) < 2:
            example = "ensemble(draft(a.gguf), ...)"
            raise OptionError(f"{name}: an ensemble needs at least two drafters, as in {example}")
        super().__init__(members, name=name)
        self.max_leaves = sum(member.max_leaves for member in members)
        self.max_nodes = sum(member.max_nodes for member in members)

    def propose(self, request: DraftRequest) -> DraftTree:
        """Return the members' trees merged; if nodes are short, each member gets its share."""
        trees: list[DraftTree] = []
        for index, member in enumerate(self._members):
            noise, share = MemberNoise(request.noise, index), self._share(member, request.max_nodes)
            own = dataclasses.replace(request, noise=noise, max_nodes=share)
            trees.append(member.propose(own))
        merged, places = merge_trees(trees)
        self._trees, self._places = trees, places
        return merged if request.keep == "nothing" else self._with_rows(merged)

    def _with_rows(self, tree: DraftTree) -> DraftTree:
        """Return the tree with its members' rows: at each node those of whose draft comes first.

        That is the member whose distribution stands for S(q), too: of the first draw that was
        drawn. If none was, it is the first member that drafted there, and of leaves the first
        that has it.
        """
        said: dict[int, tuple[DraftRows, int]] = {}
        ranks: dict[int, int] = {}
        for own, places in zip(self._trees, self._places, strict=True):
            if own.rows is None:
                continue
            for number, node in places.items():
                draws = own.draws.get(number, ())
                rank = 2 if any(draw.law is not None for draw in draws) else bool(draws)
                if rank > ranks.get(node, -1):
                    ranks[node], said[node] = rank, (own.rows, number)
        return dataclasses.replace(tree, rows=MembersRows(said))

    def _share(self, member: Drafter, max_nodes: int) -> int:
        # Fixed beforehand: one member's draws must not decide another's.
        if max_nodes >= self.max_nodes:
            return member.max_nodes
        return max_nodes * member.max_nodes // self.max_nodes

    def observe(self, outcome: RoundOutcome) -> None:
        """Tell each member the outcome of its own tree, with the accepted nodes it lacked."""
        for index, member in enumerate(self._members):
            if index >= len(self._trees):
                member.observe(outcome)
                continue
            member.observe(outcome_for(outcome, self._trees[index], self._places[index]))
        self._trees, self._places = [], []


def merge_trees(trees: Sequence[DraftTree]) -> tuple[DraftTree, list[dict[int, int]]]:
    """Return one tree of all draws, and for each tree where its nodes went."""
    builder = TreeBuilder()
    all_places: list[dict[int, int]] = []
    for tree in trees:
        places = {ROOT: ROOT}
        for parent in range(ROOT, len(tree)):
            # Draws in the members' order: acceptance tests them one
            # after another against the residual.
            for draw in tree.draws.get(parent, ()):
                # builder.add shares the node of an equal token and keeps
                # each draw: dropping one biases the text.
                places[draw.node] = builder.add(places[parent], tree.tokens[draw.node], draw.law)
        # Hidden nodes are no draws, and may not become candidates by the merge.
        for node, parent in enumerate(tree.parents):
            if not tree.is_candidate[node]:
                places[node] = builder.add_hidden(places[parent], tree.tokens[node])
        all_places.append(places)
    return builder.build(), all_places
