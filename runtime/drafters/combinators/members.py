"""Members of combinators, drafters made of drafters: their draws, trees and outcomes.

`MembersDrafter` owns members and passes on calls for all. `MemberNoise` keeps their draws
independent. `graft` puts one member's tree below a node of another's, and `outcome_for` translates
a round's outcome back into the nodes of the tree that a member proposed itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from specrun.bindings.contexts.embedding_inputs import EmbeddingInputs
from specrun.bindings.errors import OptionError
from specrun.runtime.laws.law import Law
from specrun.runtime.laws.noise import NoiseSource
from specrun.runtime.round.drafter import (
    Drafter,
    DrafterWeights,
    Pace,
    RoundOutcome,
    close_all,
    make_all,
)
from specrun.runtime.round.target import EvaluatedRows, PlacedRows, TargetModel
from specrun.runtime.trees.tree import ROOT, DraftRows, DraftTree, Draw


class MembersDrafter(Drafter):
    """Owns its members, drafters of the same conversation, and reads the same states of the target.

    A subclass sets the leaves and nodes of its trees, proposes, and tells members the
    outcome.
    """

    def __init__(self, members: Sequence[Drafter], *, name: str) -> None:
        self.name = name
        self.remark = "; ".join(member.remark for member in members if member.remark)
        self.needs_hidden_states = any(member.needs_hidden_states for member in members)
        layers = {layer for member in members for layer in member.layer_inputs}
        self.layer_inputs = tuple(sorted(layers))
        self.needs_nextn_states = any(member.needs_nextn_states for member in members)
        self.reads_logits = any(member.reads_logits for member in members)
        self.embedding_inputs = _shared_inputs(members, name)
        self.keeps_rows = all(member.keeps_rows or not member.max_nodes for member in members)
        self.n_params = sum(member.n_params for member in members)
        self.depth_params = sum(member.depth_params for member in members)
        self._members = list(members)
        # Each member's proposal in this round, and the places of its nodes in the whole tree.
        self._trees: list[DraftTree] = []
        self._places: list[dict[int, int]] = []

    @property
    def native_seconds(self) -> float:
        """Time inside all members' evaluations."""
        return sum(member.native_seconds for member in self._members)

    def take_target(self, target: TargetModel) -> None:
        """Pass on."""
        for member in self._members:
            member.take_target(target)

    def begin(self, tokens: Sequence[int]) -> None:
        """Forget the round before, and pass on."""
        self._trees, self._places = [], []
        for member in self._members:
            member.begins_alike |= self.begins_alike
            member.begin(tokens)

    def take_over(self, other: Drafter, length: int) -> int:
        """Pass on; return how many tokens all members have states of."""
        if not isinstance(other, MembersDrafter):
            return 0
        pairs = zip(self._members, other._members, strict=True)
        return min(own.take_over(its, length) for own, its in pairs)

    def learn_prompt(self, start: int, rows: EvaluatedRows, count: int) -> None:
        """Show the target's states over a prompt to the members that read them."""
        for member in self._members:
            if member.reads_target:
                member.learn_prompt(start, rows, count)

    def rewind(self, length: int) -> None:
        """Forget the round under way, whose tree was not verified as it is, and pass on."""
        self._trees, self._places = [], []
        for member in self._members:
            member.rewind(length)

    def report(self) -> dict[str, Any]:
        """Return the members' reports, as {"parts": [{"drafter": name, ...}]}."""
        reports = [(member.name, member.report()) for member in self._members]
        parts = [{"drafter": name, **report} for name, report in reports if report]
        return {"parts": parts} if parts else {}

    def close(self) -> None:
        """Close all members, whatever one of them raises."""
        close_all(self._members)


def _shared_inputs(members: Sequence[Drafter], name: str) -> EmbeddingInputs | None:
    """Return the meaning of all members' nodes beyond the vocabulary."""
    found = {id(each.embedding_inputs): each for each in members if each.embedding_inputs}
    if len(found) > 1:
        names = " and ".join(member.name for member in found.values())
        raise OptionError(
            f"{name}: {names} look ahead with embeddings of their own, and an evaluation of the "
            "target takes those of one file: leave one of them out"
        )
    return next((member.embedding_inputs for member in found.values()), None)


def combined(
    name: str,
    members: Sequence[DrafterWeights],
    combine: Callable[[Sequence[Drafter]], Drafter],
    *,
    mixes: bool = True,
) -> DrafterWeights:
    """Return the weights of a combinator, which own those of its members.

    Starting it starts every member, and `combine` makes one drafter of them, which owns them; if
    anything fails, started ones are closed again. Its pace is one that suits all its members. If
    it mixes their drafts in a round and may draw, its answers begin alike.
    """
    paces = {member.pace for member in members}
    # All of them draft point masses, or one of them draws, or is not to be stopped.
    mixed: Pace = "compared" if paces == {"compared", "paying"} else "counted"
    pace = paces.pop() if len(paces) == 1 else mixed

    def start() -> Drafter:
        started = make_all(member.start for member in members)
        try:
            drafter = combine(started)
            drafter.begins_alike = mixes and pace == "counted"
            return drafter
        except BaseException:
            close_all(started)
            raise

    return DrafterWeights(name, start, members, pace)


_STREAMS = 1_000_003  # more than any position, so that members and positions never meet
_POSITION_BITS = 0x7FFF_FFFF_FFFF_FFFF


class MemberNoise:
    """A member's own draws: with the same keys, two members' drafts would be dependent: biased."""

    def __init__(self, noise: NoiseSource, index: int) -> None:
        self._noise, self._index = noise, index

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
        return MemberNoise(self._noise.for_drafting(round_start), self._index)


def outcome_for(outcome: RoundOutcome, own: DraftTree, places: dict[int, int]) -> RoundOutcome:
    """Return the outcome as a member sees it: its nodes keep their numbers, accepted ones follow.

    `places` are those of its nodes in the round's tree. Its ROOT may stand at an accepted node,
    for members that went on from others' drafts; then the member sees the tokens after that node.
    Nodes that were left out of it have the rows of the node above them: the tokens after it are not
    known there.
    """
    root = places[ROOT]
    accepted = outcome.path if root == ROOT else outcome.path[outcome.path.index(root) + 1 :]
    back = {merged: node for node, merged in places.items()}
    tokens, parents = list(own.tokens), list(own.parents)
    depths, flags = list(own.depths), list(own.is_candidate)
    rows: list[int] = []
    for number, parent in enumerate(own.parents):
        above = root if parent == ROOT else rows[parent]
        rows.append(places.get(number, above))
    path: list[int] = []
    for merged in accepted:
        node = back.get(merged, len(tokens))
        if node == len(tokens):
            tokens.append(outcome.tree.tokens[merged])
            parents.append(path[-1] if path else ROOT)
            depths.append(len(path) + 1)
            flags.append(True)
            rows.append(merged)
        path.append(node)
    tree = own
    if len(tokens) > len(own):
        tree = DraftTree(tuple(tokens), tuple(parents), tuple(depths), tuple(flags), own.draws)
    evaluated = PlacedRows(outcome.rows, [node + 1 for node in (root, *rows)])
    return RoundOutcome(outcome.tokens, tree, tuple(path), outcome.next_token, evaluated)


def outcome_for_idle(outcome: RoundOutcome) -> RoundOutcome:
    """Return the outcome as a member sees it that proposed nothing: its tree is the path."""
    if not len(outcome.tree):
        return outcome
    return outcome_for(outcome, DraftTree(), {ROOT: ROOT})


class MembersRows:
    """The members' rows at the places of a tree that is made of theirs (`DraftTree.rows`).

    `said` has, for each node (or ROOT) of the whole tree, the member's rows and its own number of
    that node.
    """

    def __init__(self, said: dict[int, tuple[DraftRows, int]]) -> None:
        self._said = said

    def logits(self, node: int) -> npt.NDArray[np.float32] | None:
        """Return the member's row after a node, None if there is none."""
        rows, own = self._said.get(node, (None, node))
        return None if rows is None else rows.logits(own)


def first_path(tree: DraftTree) -> tuple[int, ...]:
    """Return the path of each node's first draw, from the root down: where a drafter bets most."""
    path: list[int] = []
    node = ROOT
    while draws := tree.draws.get(node):
        node = draws[0].node
        path.append(node)
    return tuple(path)


def graft(tree: DraftTree, node: int, below: DraftTree) -> tuple[DraftTree, dict[int, int]]:
    """Return `tree` with `below` grown from a node (or ROOT), and where the nodes of that went.

    The node must have no draws yet: draws of one parent are tested in the order in which they were
    made, and whoever wants to add some must merge the trees instead.
    """
    if node in tree.draws:
        raise OptionError(f"node {node} already has drafted children: nothing can be grafted there")
    if not len(below):
        return tree, {ROOT: node}
    first = len(tree)
    depth = 0 if node == ROOT else tree.depths[node]
    places = {ROOT: node, **{number: first + number for number in range(len(below))}}
    draws = {
        places[parent]: tuple(Draw(places[draw.node], draw.law) for draw in made)
        for parent, made in below.draws.items()
    }
    grafted = DraftTree(
        tree.tokens + below.tokens,
        tree.parents + tuple(places[parent] for parent in below.parents),
        tree.depths + tuple(depth + level for level in below.depths),
        tree.is_candidate + below.is_candidate,
        {**tree.draws, **draws},
    )
    return grafted, places
