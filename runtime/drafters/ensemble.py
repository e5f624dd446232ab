"""Several drafters at once, their trees merged by shared prefixes (SpecInfer, Miao et al. 2023, section 3).

A node that several members drafted keeps every draw that produced it: the first member's draws in their order,
then the second's, and so on. Each draw stays independent of the other members', given the path above it, so its
law is the one it was drawn from; laws and point masses may mix.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import OptionError
from specrun.runtime.drafters.drafter import Drafter, DraftRequest, RoundOutcome
from specrun.runtime.law import Law
from specrun.runtime.noise import NoiseSource
from specrun.runtime.target import EvaluatedRows
from specrun.runtime.tree import ROOT, DraftTree, TreeBuilder

__all__ = ["EnsembleDrafter", "merge_trees"]

_STREAMS = 1_000_003  # more than any position, so that members and positions never meet
_POSITION_BITS = 0x7FFF_FFFF_FFFF_FFFF


class EnsembleDrafter(Drafter):
    """Proposes what all its members propose. Owns them."""

    def __init__(self, members: Sequence[Drafter], *, name: str = "ensemble") -> None:
        if len(members) < 2:
            raise OptionError(f"{name}: an ensemble needs at least two drafters, as in ensemble(draft(a.gguf), ...)")
        self.name = name
        self.max_leaves = sum(member.max_leaves for member in members)
        self.max_nodes = sum(member.max_nodes for member in members)
        self.needs_hidden_states = any(member.needs_hidden_states for member in members)
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
        """Pass on to those who read hidden states."""
        for member in self._members:
            if member.needs_hidden_states:
                member.learn_prompt(start, rows, count)

    def propose(self, request: DraftRequest) -> DraftTree:
        """Return the members' trees merged; where nodes are short, each member gets its share beforehand."""
        self._trees = [
            member.propose(
                DraftRequest(
                    request.tokens,
                    request.params,
                    _MemberNoise(request.noise, index),
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
            member.observe(_outcome_for(outcome, self._trees[index], self._places[index]))
        self._trees, self._places = [], []

    def close(self) -> None:
        """Close all members, whatever one of them raises."""
        error: Exception | None = None
        for member in self._members:
            try:
                member.close()
            except Exception as one:
                error = error or one
        if error is not None:
            raise error


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


def _outcome_for(outcome: RoundOutcome, own: DraftTree, places: dict[int, int]) -> RoundOutcome:
    """Return the outcome as the member sees it: its own nodes keep their numbers, accepted ones are appended."""
    back = {merged: node for node, merged in places.items()}
    tokens, parents, depths, flags = list(own.tokens), list(own.parents), list(own.depths), list(own.is_candidate)
    rows = [places[node] for node in range(len(own))]
    path: list[int] = []
    for merged in outcome.path:
        node = back.get(merged)
        if node is None:
            node = len(tokens)
            tokens.append(outcome.tree.tokens[merged])
            parents.append(path[-1] if path else ROOT)
            depths.append(len(path) + 1)
            flags.append(True)
            rows.append(merged)
        path.append(node)
    tree = own
    if len(tokens) > len(own):
        tree = DraftTree(tuple(tokens), tuple(parents), tuple(depths), tuple(flags), own.draws)
    return RoundOutcome(outcome.tokens, tree, tuple(path), outcome.next_token, _MemberRows(outcome.rows, rows))


class _MemberRows:
    """The evaluation's rows under a member's own node numbers."""

    def __init__(self, rows: EvaluatedRows, places: list[int]) -> None:
        self._rows = rows
        self._places = [ROOT, *places]

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        """Return the logits of the member's row."""
        return self._rows.logits(self._places[row] + 1)

    def hidden_state(self, row: int) -> npt.NDArray[np.float32]:
        """Return the hidden state of the member's row."""
        return self._rows.hidden_state(self._places[row] + 1)


class _MemberNoise:
    """A member's own draws: the same keys for two members would make their drafts dependent, and biased."""

    def __init__(self, noise: NoiseSource, index: int) -> None:
        self._noise = noise
        self._index = index

    def seek(self, position: int) -> None:
        """Turn to this member's draws of a position; ensembles inside ensembles stay apart too."""
        self._noise.seek((position * _STREAMS + self._index + 1) & _POSITION_BITS)

    def accept(self, probability: float) -> bool:
        """Pass on."""
        return self._noise.accept(probability)

    def choose(self, law: Law) -> int:
        """Pass on."""
        return self._noise.choose(law)

    def for_drafting(self, round_start: int) -> NoiseSource:
        """Return a source for a drafter of this member's, keyed apart from the other members'."""
        return _MemberNoise(self._noise.for_drafting(round_start), self._index)
