"""Drafts under a grammar: forced tokens are drafted for nothing, forbidden ones are left out.

A grammar that leaves no choice gives the next text. It is drafted as point masses, in the spelling
that the target prefers, and the conversation's drafter goes on below them. Of that one's proposals,
tokens that the grammar forbids are left out with all that hangs below them. Neither changes the
distribution of the text: the target's own, masked, gives forbidden tokens probability 0, so that
acceptance rejects a point mass there for certain and continues from its distribution. A forced
token is a guess at the spelling of the text, tested like any other.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from specrun.runtime.drafters.combinators.members import (
    MembersRows,
    graft,
    outcome_for,
    outcome_for_idle,
)
from specrun.runtime.grammar import GrammarError, GrammarState
from specrun.runtime.planning import CostCurve, expected_tokens
from specrun.runtime.planning.account import Account
from specrun.runtime.round.drafter import Drafter, DraftRequest, RoundOutcome
from specrun.runtime.round.text import common_prefix
from specrun.runtime.trees.tree import ROOT, DraftTree, Draw

_MOST_FORCED = 64
_MEMORY = 0.85  # of the counts, that is kept in a round
_ROWS = 0.2  # of the preference, that one row makes
USUAL = CostCurve.flat([1.0 + 0.5 * min(n, 3) + 0.15 * max(0, n - 3) for n in range(65)])
_FIRST = 0.8  # how often the tokenizer's spelling is right, as long as nothing is known
_GAIN = 1.02  # times the tokens of plain decoding, from which forced tokens are drafted


class ForcedLength:
    """How many forced tokens a round drafts: the number with the highest expected gain.

    How often they are right is known also while none is drafted (`ForcedSpelling`). The account of
    drafting must allow to lose them all, so that they lose no more than any other draft.
    """

    def __init__(self, costs: CostCurve | None = None) -> None:
        self._costs, self._account = costs or USUAL, Account()

    def limit(self, share: float) -> int:
        """Return how many tokens to force, of which such a `share` is right behind right ones."""
        best, gain = 0, _GAIN
        for n in range(1, _MOST_FORCED + 1):
            worth = expected_tokens(share, n) / (1.0 + self._lost(n))
            if worth > gain and self._lost(n) <= self._account.room:
                best, gain = n, worth
        return best

    def learn(self, n_forced: int, n_right: int, n_new: int = 1) -> None:
        """Count a round's forced tokens, and all of its new tokens."""
        self._account.allow(n_new)
        if n_forced:
            self._account.lose(self._lost(n_forced) - n_right)

    def _lost(self, n: int) -> float:
        """Return the rounds of plain decoding that n rejected tokens cost."""
        return max(0.0, self._costs.seconds(1 + n) / self._costs.seconds(1) - 1.0)


class ForcedSpelling:
    """How the target spells forced text: as the tokenizer does, or by the tokens it prefers.

    A target that does not expect the text takes it apart. Which of the tokens that fit it then
    takes follows from its logits in earlier rounds: their mean is its preference. Which of both
    spellings was right more often lately is drafted.
    """

    def __init__(self) -> None:
        self._preference: npt.NDArray[np.float32] | None = None
        # How often lately, of the tokenizer's spelling and of the preferred one.
        self._right = {False: _FIRST, True: 0.5 * _FIRST}
        self._first: dict[bool, list[int]] = {}

    def tokens(self, place: GrammarState, most: int) -> list[int]:
        """Return up to `most` tokens of the text that is forced at a place."""
        self._first = {False: place.forced(1)}
        if self._preference is not None:
            self._first[True] = place.forced(1, self._preference)
        preferred = max(self._first, key=self._right.__getitem__)
        if most < 2 or not self._first[preferred]:
            return self._first[preferred][:most]
        return place.forced(most, self._preference if preferred else None)

    def nothing(self) -> list[int]:
        """Return no tokens, at a place that is not looked at."""
        self._first = {}
        return []

    @property
    def share(self) -> float:
        """How often the drafted spelling was right lately."""
        return max(self._right.values())

    def learn(self, token: int, row: npt.NDArray[np.float32]) -> None:
        """Learn from the token that stood at the last place, and from a row of the round."""
        if not any(self._first.values()):
            return
        for preferred, first in self._first.items():
            kept = _MEMORY * self._right[preferred]
            self._right[preferred] = kept + (1.0 - _MEMORY) * (first == [token])
        if self._preference is None:
            self._preference = np.array(row)
        else:
            self._preference += _ROWS * (row - self._preference)


class GuidedDrafter(Drafter):
    """Drafts for one answer under a grammar, with a drafter that it does not own.

    `forced` and `forced_accepted` count forced tokens so far. Without `may_draft` it waits for the
    grammar.
    """

    def __init__(self, drafter: Drafter, costs: CostCurve | None = None) -> None:
        self.name, self.max_nodes, self.max_leaves = (
            drafter.name,
            drafter.max_nodes,
            drafter.max_leaves,
        )
        self.forced = self.forced_accepted = 0
        self._length, self._spelling = ForcedLength(costs), ForcedSpelling()
        self._drafter, self.waits = drafter, True
        self.may_draft = True
        # The request, the forced tokens, and the drafter's request below them.
        self._asked: tuple[DraftRequest, list[int], DraftRequest] | None = None
        # Of this round: the forced tokens, the drafter's tree, and where its nodes went; None if
        # the round's tree is the drafter's own.
        self._round: tuple[int, DraftTree, dict[int, int]] | None = None

    def prepare(self, request: DraftRequest) -> bool:
        """Let the drafter draft a step further, once the next tokens are known (`may_draft`)."""
        place = _place_of(request)
        self.may_draft = place.is_ready
        if not self.may_draft or not self._drafter.waits:
            return self.may_draft
        with place.hurrying():
            return self._drafter.prepare(self._below_forced(request)[1])

    def propose(self, request: DraftRequest) -> DraftTree:
        """Return forced tokens, and below them the allowed part of the drafter's tree."""
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
        said = {place: (own.rows, node) for node, place in where.items()}
        return dataclasses.replace(tree, rows=MembersRows(said))

    def _below_forced(self, request: DraftRequest) -> tuple[list[int], DraftRequest]:
        """Return the forced tokens and the request below them, the same for the same one."""
        if self._asked is None or self._asked[0] is not request:
            place = _place_of(request)
            if place.closed:
                problem = "the answer left its grammar: a rule kept tokens that the grammar forbids"
                raise GrammarError(problem)
            below = request
            if place.is_slow:  # each place of a draft would take as long
                below = dataclasses.replace(request, max_depth=0, max_nodes=0)
            # A rule that weighs the drafter's distributions would take a forced token for all of
            # its distribution.
            most = min(below.max_depth, below.max_nodes) if request.keep == "nothing" else 0
            length = min(most, self._length.limit(self._spelling.share))
            forced = self._spelling.tokens(place, length) if most else self._spelling.nothing()
            if n := len(forced):
                below = dataclasses.replace(
                    below,
                    tokens=[*below.tokens, *forced],
                    max_depth=below.max_depth - n,
                    max_nodes=below.max_nodes - n,
                )
            self._asked = request, forced, below
        return self._asked[1:]

    def observe(self, outcome: RoundOutcome) -> None:
        """Tell the drafter the outcome of its own tree; nodes that were left out were rejected."""
        if outcome.n_new:
            row = outcome.rows.logits(outcome.path_rows[-1])
            self._spelling.learn(outcome.tokens[outcome.start], row)
        if self._round is None:
            self._length.learn(0, 0, outcome.n_new)
            self._drafter.observe(outcome)
            return
        (n_forced, own, places), self._round = self._round, None
        agreed = common_prefix(range(n_forced), outcome.path)
        self._length.learn(n_forced, agreed, outcome.n_new)
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


def allowed_part(tree: DraftTree, place: GrammarState) -> tuple[DraftTree, dict[int, int]]:
    """Return the part of a tree that a grammar allows below a place, and where its nodes went.

    Point masses that it forbids are left out, and those after which it does not find the next
    tokens in time. A token that was drawn from a distribution stays, because
    acceptance has to test each draw; nothing below it does. Nodes that are no candidates are not
    tested, and stay if their parents stay.
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
