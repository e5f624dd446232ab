"""Several drafters at once, their trees merged by shared prefixes (SpecInfer, Miao et al. 2023, section 3).

A node that several members drafted keeps every draw that produced it: the first member's draws in their order,
then the second's, and so on. Each draw stays independent of the other members', given the path above it, so its
law is the one it was drawn from; laws and point masses may mix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specrun.bindings.errors import OptionError
from specrun.runtime.drafters.drafter import Drafter, DraftRequest, RoundOutcome
from specrun.runtime.drafters.member_noise import MemberNoise
from specrun.runtime.drafters.member_outcome import outcome_for
from specrun.runtime.drafters.members import all_layer_inputs, close_all, learn_prompts, part_reports
from specrun.runtime.target import EvaluatedRows
from specrun.runtime.tree import ROOT, DraftTree, TreeBuilder

__all__ = ["EnsembleDrafter", "merge_trees"]


class EnsembleDrafter(Drafter):
    """Proposes what all its members propose. Owns them."""

    def __init__(self, members: Sequence[Drafter], *, name: str = "ensemble") -> None:
        if len(members) < 2:
            raise OptionError(f"{name}: an ensemble needs at least two drafters, as in ensemble(draft(a.gguf), ...)")
        self.name = name
        self.max_leaves = sum(member.max_leaves for member in members)
        self.max_nodes = sum(member.max_nodes for member in members)
        self.needs_hidden_states = any(member.needs_hidden_states for member in members)
        self.layer_inputs = all_layer_inputs(members)
        self._members = list(members)
        self._trees: list[DraftTree] = []
        self._places: list[dict[int, int]] = []

    @property
    def native_seconds(self) -> float:
        """Time inside all members' evaluations."""
        return sum(member.native_seconds for member in self._members)

    @property
    def n_params(self) -> int:
        """All members' parameters."""
        return sum(member.n_params for member in self._members)

    def begin(self, tokens: Sequence[int]) -> None:
        """Pass on."""
        self._trees, self._places = [], []
        for member in self._members:
            member.begin(tokens)

    def learn_prompt(self, start: int, rows: EvaluatedRows, count: int) -> None:
        """Pass on to those who read the target's states."""
        learn_prompts(self._members, start, rows, count)

    def propose(self, request: DraftRequest) -> DraftTree:
        """Return the members' trees merged; where nodes are short, each member gets its share beforehand."""
        self._trees = [
            member.propose(
                DraftRequest(
                    request.tokens,
                    request.params,
                    MemberNoise(request.noise, index),
                    request.max_depth,
                    self._share(member, request.max_nodes),
                )
            )
            for index, member in enumerate(self._members)
        ]
        merged, self._places = merge_trees(self._trees)
        return merged

    def _share(self, member: Drafter, max_nodes: int) -> int:
        # Fixed before anything is drawn: what one member drew must not decide what another may draw.
        if max_nodes >= self.max_nodes:
            return member.max_nodes
        return max_nodes * member.max_nodes // self.max_nodes

    def observe(self, outcome: RoundOutcome) -> None:
        """Tell each member what became of its own tree, with the accepted nodes it lacked added to it."""
        for index, member in enumerate(self._members):
            if index >= len(self._trees):
                member.observe(outcome)
                continue
            member.observe(outcome_for(outcome, self._trees[index], self._places[index]))
        self._trees, self._places = [], []

    def rewind(self, length: int) -> None:
        """Pass on."""
        for member in self._members:
            member.rewind(length)

    def report(self) -> dict[str, Any]:
        """Return the reports of the members that have something to say."""
        return part_reports(self._members)

    def close(self) -> None:
        """Close all members, whatever one of them raises."""
        close_all(self._members)


def merge_trees(trees: Sequence[DraftTree]) -> tuple[DraftTree, list[dict[int, int]]]:
    """Return one tree of all draws, and for each tree where its nodes went."""
    builder = TreeBuilder()
    all_places: list[dict[int, int]] = []
    for tree in trees:
        places = {ROOT: ROOT}
        for parent in range(ROOT, len(tree)):
            for draw in tree.draws.get(parent, ()):
                places[draw.node] = builder.add(places[parent], tree.tokens[draw.node], draw.law)
        for node, parent in enumerate(tree.parents):
            if not tree.is_candidate[node]:
                places[node] = builder.add_hidden(places[parent], tree.tokens[node])
        all_places.append(places)
    return builder.build(), all_places
