"""One drafter after the other: CS-Drafting's horizontal cascade (Chen et al. 2023, section 3.2).

The first tokens of a draft are accepted most often, so they are worth the better drafter; those
behind them, which count only if all before them are accepted, get a cheaper one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from specrun.runtime.drafters.combinators.members import (
    MemberNoise,
    MembersDrafter,
    MembersRows,
    first_path,
    graft,
    outcome_for,
    outcome_for_idle,
)
from specrun.runtime.round.drafter import Drafter, DraftRequest, RoundOutcome
from specrun.runtime.round.text import common_prefix
from specrun.runtime.trees.tree import ROOT, DraftRows, DraftTree


class RelayDrafter(MembersDrafter):
    """Each member goes on where the one before stopped, for up to `counts[i]` tokens (None: any).

    A member that proposes nothing is skipped. Below a tree, the next member goes on from one leaf
    only, that of the path of first draws: the drafter's favourite. Members get the guesses before
    them as if they were committed, and take back rejected ones (`Drafter.rewind`). Owns them.
    """

    def __init__(
        self, members: Sequence[Drafter], counts: Sequence[int | None], *, name: str = "relay"
    ) -> None:
        super().__init__(members, name=name)
        # A chain is cut at its count.
        self.max_nodes = sum(
            member.max_nodes if count is None or member.max_leaves > 1 else count
            for member, count in zip(members, counts, strict=True)
        )
        # The leaf that a member goes on from is a leaf no longer.
        self.max_leaves = sum(member.max_leaves for member in members) - len(members) + 1
        self._counts = list(counts)

    def propose(self, request: DraftRequest) -> DraftTree:
        """Return the members' trees, one below the other."""
        self._trees, self._places = [], []
        tree, tip = DraftTree(), ROOT
        tokens: Sequence[int] = request.tokens
        for index, (member, count) in enumerate(zip(self._members, self._counts, strict=True)):
            depth = 0 if tip == ROOT else tree.depths[tip]
            # Noise of its own: numbers used twice would couple a member's draws to others'.
            noise, room = MemberNoise(request.noise, index), request.max_nodes - len(tree)
            most = min(request.max_depth - depth, count or request.max_depth)
            below = dataclasses.replace(request, tokens=tokens, noise=noise, fallback=0.0)
            own = member.propose(below.within(most, room))
            path = first_path(own)
            tree, places = graft(tree, tip, own)
            self._trees.append(own)
            self._places.append(places)
            # A member's noise and room were fixed before it drew;
            # only nodes below may see its tokens.
            if path:
                tip = places[path[-1]]
                tokens = [*tokens, *(own.tokens[node] for node in path)]
        return tree if request.keep == "nothing" else self._with_rows(tree)

    def _with_rows(self, tree: DraftTree) -> DraftTree:
        """Return the tree with its members' rows."""
        said: dict[int, tuple[DraftRows, int]] = {}
        # Where one ends and another goes on, the later one speaks: it drafted, or would have. If
        # nothing was drafted it is the first.
        for own, places in zip(self._trees, self._places, strict=True):
            idles = not len(own) and places[ROOT] == ROOT and ROOT in said
            if own.rows is not None and not idles:
                said.update((node, (own.rows, number)) for number, node in places.items())
        return dataclasses.replace(tree, rows=MembersRows(said))

    def observe(self, outcome: RoundOutcome) -> None:
        """Take rejected guesses back from each member, and tell it the outcome of its own tree."""
        for index, member in enumerate(self._members):
            if index >= len(self._trees):
                member.observe(outcome_for_idle(outcome))
                continue
            own, places = self._trees[index], self._places[index]
            guessed = outcome.tree.path_to(places[ROOT])
            agreed = common_prefix(guessed, outcome.path)
            # A tree below rejected guesses was not tested: its member learns the text alone.
            if agreed == len(guessed) and len(own):
                member.observe(outcome_for(outcome, own, places))
            else:
                member.rewind(outcome.start + agreed)
                member.observe(outcome_for_idle(outcome))
        self._trees, self._places = [], []
