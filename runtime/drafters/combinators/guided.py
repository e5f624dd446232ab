"""Drafts under a grammar: what it forces is drafted for nothing, what it forbids is left out.

A grammar that leaves no choice says the next tokens itself; they are drafted as point masses, and
the conversation's drafter goes on below them. Of what that one proposes, tokens that the grammar
forbids are left out with all that hangs below them. Neither changes the text's law: the target's
own law, masked, gives forbidden tokens probability 0, so that acceptance rejects a point mass there
for certain and draws on from what it had; and a forced token is a guess of how the text is spelled,
tested like any other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from specrun.runtime.drafters.combinators.members import (
    MembersRows,
    graft,
    outcome_for,
    outcome_for_idle,
)
from specrun.runtime.grammar import GrammarError, GrammarState
from specrun.runtime.round.drafter import Drafter, DraftRequest, RoundOutcome
from specrun.runtime.round.text import common_prefix
from specrun.runtime.trees.tree import ROOT, DraftRows, DraftTree, Draw

_MOST_FORCED = 64
_LONGEST_REST = 64


class ForcedLength:
    """How many forced tokens a round drafts, by how many of them were right so far.

    A model that spells the forced text with other tokens than the tokenizer would keep none of
    them. Twice as many are drafted as were right in the last round. If none was, one is tried
    again after a rest, which doubles each time. No clock is read, so texts do not depend on it.
    """

    def __init__(self) -> None:
        self._most, self._rest, self._resting = _MOST_FORCED, 1, 0

    def limit(self) -> int:
        """Return how many tokens the next round may force."""
        return 0 if self._resting else self._most

    def learn(self, n_forced: int, n_right: int) -> None:
        """Count a round's forced tokens, none in a rest."""
        if not n_forced:
            self._resting = max(0, self._resting - 1)
        elif n_right:
            self._rest = 1
            self._most = min(_MOST_FORCED, 2 * (self._most if n_right == n_forced else n_right))
        else:
            self._most, self._resting = 1, self._rest
            self._rest = min(_LONGEST_REST, 2 * self._rest)


class GuidedDrafter(Drafter):
    """Drafts for one answer under a grammar, with a drafter that it does not own.

    `forced` and `forced_accepted` count forced tokens so far. Without `may_draft` it waits for what
    the grammar says.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.name, self.max_nodes, self.max_leaves = (
            drafter.name,
            drafter.max_nodes,
            drafter.max_leaves,
        )
        self.forced = self.forced_accepted = 0
        self._length = ForcedLength()
        self._drafter, self.waits = drafter, True
        self.may_draft = True
        # What was asked for, the forced tokens, and what the drafter is asked for below them.
        self._asked: tuple[DraftRequest, list[int], DraftRequest] | None = None
        # Of this round: the forced tokens, the drafter's tree, and where its nodes went; None where
        # the round's tree is the drafter's own.
        self._round: tuple[int, DraftTree, dict[int, int]] | None = None

    def prepare(self, request: DraftRequest) -> bool:
        """Let the drafter draft a step further, once it is known what may follow (`may_draft`)."""
        place = _place_of(request)
        self.may_draft = place.is_ready
        if not self.may_draft or not self._drafter.waits:
            return self.may_draft
        with place.hurrying():
            return self._drafter.prepare(self._below_forced(request)[1])

    def propose(self, request: DraftRequest) -> DraftTree:
        """Return forced tokens, and below them what the grammar allows of the drafter's tree."""
        with _place_of(request).hurrying():
            return self._propose(request, _place_of(request))

    def _propose(self, request: DraftRequest, place: GrammarState) -> DraftTree:
        forced, below = self._below_forced(request)
        self._asked = None
        own = self._drafter.propose(below)
        kept, places = allowed_part(own, place.after(forced))
        if kept is own and not forced:
            self._round = None
            return own
        tree, grafted = graft(DraftTree.chain(forced), len(forced) - 1, kept)
        where = {node: grafted[number] for node, number in places.items()}
        self._round = len(forced), own, where
        if own.rows is None:
            return tree
        return dataclasses.replace(tree, rows=_rows_of(own.rows, where))

    def _below_forced(self, request: DraftRequest) -> tuple[list[int], DraftRequest]:
        """Return the forced tokens and the request for what follows, the same for the same one."""
        if self._asked is None or self._asked[0] is not request:
            place = _place_of(request)
            if place.closed:
                problem = "the answer left its grammar: a rule kept what the grammar forbids"
                raise GrammarError(problem)
            below = request
            if place.is_slow:  # each place of a draft would take as long
                below = dataclasses.replace(request, max_depth=0, max_nodes=0)
            # A rule that weighs the drafter's laws would take a forced token for all of its law.
            most = min(below.max_depth, below.max_nodes) if request.keep == "nothing" else 0
            forced = place.forced(min(most, self._length.limit()))
            self._asked = request, forced, _after(below, forced) if forced else below
        return self._asked[1:]

    def observe(self, outcome: RoundOutcome) -> None:
        """Tell the drafter what became of its own tree; what was left out was rejected."""
        if self._round is None:
            self._length.learn(0, 0)
            self._drafter.observe(outcome)
            return
        (n_forced, own, places), self._round = self._round, None
        agreed = common_prefix(range(n_forced), outcome.path)
        self._length.learn(n_forced, agreed)
        self.forced += n_forced
        self.forced_accepted += agreed
        if agreed == n_forced and (len(own) or not n_forced):
            self._drafter.observe(outcome_for(outcome, own, places))
            return
        if agreed < n_forced:
            self._drafter.rewind(outcome.start + agreed)
        self._drafter.observe(outcome_for_idle(outcome))


def _place_of(request: DraftRequest) -> GrammarState:
    place = request.state.grammar
    assert place is not None
    return place


def _after(request: DraftRequest, forced: Sequence[int]) -> DraftRequest:
    """Return the request for what follows forced tokens."""
    n = len(forced)
    return dataclasses.replace(
        request,
        tokens=[*request.tokens, *forced],
        max_depth=request.max_depth - n,
        max_nodes=request.max_nodes - n,
    )


def _rows_of(rows: DraftRows, places: dict[int, int]) -> MembersRows:
    return MembersRows({place: (rows, node) for node, place in places.items()})


def allowed_part(tree: DraftTree, place: GrammarState) -> tuple[DraftTree, dict[int, int]]:
    """Return what a grammar allows of a tree below a place, and where its nodes went.

    Point masses that it forbids are left out, and those behind which it does not say in time what
    may follow. A token that was drawn from a law stays, because
    acceptance has to test each draw; nothing below it does. Nodes that are no candidates are not
    tested, and stay where what they hang from does.
    """
    after: dict[int, GrammarState] = {ROOT: place}  # of candidates that are allowed
    left_out: set[int] = set()
    drawn = {draw.node for draws in tree.draws.values() for draw in draws if draw.law is not None}
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        above = after.get(parent)
        if not tree.is_candidate[node]:
            if parent in left_out:
                left_out.add(node)
        elif above is not None and above.allows(token) and (below := above.child(token)).is_seen:
            after[node] = below
        elif above is None or node not in drawn:
            left_out.add(node)
    if not left_out:
        return tree, {ROOT: ROOT, **{node: node for node in range(len(tree))}}
    return _without(tree, left_out)


def _without(tree: DraftTree, left_out: set[int]) -> tuple[DraftTree, dict[int, int]]:
    kept = [node for node in range(len(tree)) if node not in left_out]
    places = {ROOT: ROOT, **{node: number for number, node in enumerate(kept)}}
    draws: dict[int, tuple[Draw, ...]] = {}
    for parent, made in tree.draws.items():
        left = tuple(Draw(places[draw.node], draw.law) for draw in made if draw.node in places)
        if parent in places and left:
            draws[places[parent]] = left
    part = DraftTree(
        tuple(tree.tokens[node] for node in kept),
        tuple(places[tree.parents[node]] for node in kept),
        tuple(tree.depths[node] for node in kept),
        tuple(tree.is_candidate[node] for node in kept),
        draws,
    )
    return part, places
