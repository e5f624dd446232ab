"""Tree size by optimal stopping: of the nodes that a drafter names, those that pay are verified.

A round that verifies n nodes takes D(d) + T(n + 1) seconds, D the drafter's for d depths, and
yields 1 + sum c tokens, c the chance of each node that it and all nodes above it are accepted. With
s the seconds that a token takes at the best choice (see `draft_length`), a round maximises

    s sum c - T(n + 1)

over n, the n nodes of the highest chances: a node's chance is less than its parent's, so they are a
tree (EAGLE-2 reranks by the drafter's own probabilities, Li et al. 2024, section 4.2; here they are
calibrated by what was accepted lately, and their number is chosen).

How deep the drafter is asked has to be said before anything is known of the round: as deep as was
worth most lately, less D. Each draft tells what all smaller depths would have been worth, and
nothing of larger ones: those are hoped for again little by little, and so are tried again. Where no
depth was worth its D the drafter is not asked, and asked again some rounds later; and it rests
while rounds in which it was asked lost all that they may lose against plain decoding (`Account`).

Choosing nodes by their probability is exact for point masses only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from specrun.runtime.costs.account import LOST_ANEW, account_of_model
from specrun.runtime.costs.draft_length import AcceptanceOdds, log_odds
from specrun.runtime.costs.live_curve import DraftCost
from specrun.runtime.drafter import RoundOutcome
from specrun.runtime.tree import ROOT, DraftTree

_USUAL = 0.75  # the chance of the best child of a node, where nothing is known
_PRIOR_TOKENS, _PRIOR_ROUNDS, _MOST_ROUNDS = 6.0, 4.0, 20.0
_ROUNDS = 0.98  # memory of tokens and seconds
_RECOVERY, _PATIENCE = 0.03, 0.8  # of the way back to the prior, in a round without a draft
_DEEPER = 0.005  # and of the depths below a draft
_TRIED = 1.5  # what an untried depth is hoped to be worth at the least, over what it takes


class TreeSize:
    """Chooses the nodes of point masses. `seconds` is T, `draft` D, `most` the largest tree.

    Trees are at most `depth` deep; 1 where the drafter names all depths at once. With `forgets`
    answers begin alike: where a rule's law depends on how much is drafted, a seed would not repeat
    itself otherwise.

    A round asks `depth_to_ask` before the drafter is evaluated, `best` for the nodes to keep of
    those that it named, and in the end `observe`.
    """

    def __init__(
        self,
        seconds: Callable[[int], float],
        draft: DraftCost,
        most: int,
        *,
        depth: int = 1,
        forgets: bool = False,
    ) -> None:
        self.most, self._seconds, self._draft, self._depth = most, seconds, draft, depth
        self._forgets = forgets
        self._start_anew()

    def _start_anew(self) -> None:
        """Know nothing."""
        most, plain = self.most, self._seconds(1)
        self._odds = AcceptanceOdds(1.0)
        chances = [_USUAL**depth for depth in range(1, most + 1)]
        tokens, best = 1.0, 1.0
        for n, chance in enumerate(chances, 1):
            tokens += chance
            deep = min(n, self._depth)
            best = min(best, (self._draft.seconds(deep) + self._seconds(n + 1)) / tokens / plain)
        # All of it in plain rounds: what one takes in seconds is learnt, too.
        self._tokens, self._spent = _PRIOR_TOKENS, _PRIOR_TOKENS * best
        last = self._depth
        prices = self._prices(most)
        worth = [
            _best_count(chances[: most if deep == last else deep], *prices)[1] / plain
            for deep in range(last + 1)
        ]
        # What each depth adds to the one above it.
        self._hoped = [b - a for a, b in itertools.pairwise(worth)]
        self._added = [*map(self._prior, range(last))]
        self._rounds = _PRIOR_ROUNDS  # how many they are the means of
        self._recovery = _RECOVERY
        self._account = account_of_model()
        self._silent = self._rests = False
        self._asked = 0
        self._tree: DraftTree | None = None
        self._certainties: dict[int, float] = {}

    def _prior(self, index: int) -> float:
        """Return what a depth, counted from 0, is hoped to add in plain rounds.

        A drafter that is better than most pays where the usual one does not: it is tried.
        """
        before = self._draft.seconds(index) if index else 0.0
        takes = (self._draft.seconds(index + 1) - before) / self._seconds(1)
        return max(self._hoped[index], _TRIED * takes)

    def begin(self) -> None:
        """Start an answer: what was learnt stays where point masses change no text."""
        if self._forgets:
            self._start_anew()
        self._recovery, self._tree = _RECOVERY, None  # another text: it may pay here
        self._account.grant(LOST_ANEW)

    def depth_to_ask(self) -> int:
        """Return how deep the drafter shall be asked to draft in this round; 0: not at all."""
        self._rests = self._account.room <= 0.0
        self._tree, self._asked = None, 0 if self._rests else self._deepest_that_pays()
        if self._asked:
            self._draft.start()
        return self._asked

    def _deepest_that_pays(self) -> int:
        """Return the depth that was worth most lately, less what it takes; 0 where none was."""
        plain = self._seconds(1)
        worth, most, best = 0.0, 0.0, 0
        for depth, added in enumerate(self._added, 1):
            worth += added
            left = worth - self._draft.seconds(depth) / plain
            if left > most:
                most, best = left, depth
        return best

    def best(self, values: Sequence[float], parents: Sequence[int], most: int) -> list[int]:
        """Return the nodes to keep, rising, at most `most`; parents come before their children.

        `values` are products of the drafter's probabilities along the nodes' paths.
        """
        chances: list[float] = []
        certainties: list[float] = []
        depths: list[int] = []
        for value, parent in zip(values, parents, strict=True):
            if parent == ROOT:
                above, reached, depth = 1.0, 1.0, 1
            else:
                above, reached, depth = values[parent], chances[parent], depths[parent] + 1
            x = log_odds(min(1.0, value / above) if above > 0.0 else 0.0)
            certainties.append(x)
            chances.append(reached * self._odds.chance(x))
            depths.append(depth)
        # Among equals the earlier: a parent comes before its child.
        order = sorted(range(len(chances)), key=chances.__getitem__, reverse=True)
        prices = self._prices(min(most, self.most))
        count, surplus = _best_count([chances[node] for node in order], *prices)
        worth = [
            _best_count([chances[node] for node in order if depths[node] <= depth], *prices)[1]
            for depth in range(1, self._asked)
        ]
        self._learn_worth([*worth, surplus])
        kept = sorted(order[:count])
        self._certainties = {place: certainties[node] for place, node in enumerate(kept)}
        return kept

    def _learn_worth(self, worth: Sequence[float]) -> None:
        """Learn what drafts of each depth were worth, up to the one that was asked for."""
        self._rounds = min(self._rounds + 1.0, _MOST_ROUNDS)
        plain, above = self._seconds(1), 0.0
        for index, seconds in enumerate(worth):
            added, above = (seconds - above) / plain, seconds
            self._added[index] += (added - self._added[index]) / self._rounds
        self._hope(len(worth), _DEEPER)

    def _hope(self, first: int, share: float) -> None:
        """Go back this share of the way to what is hoped of the depths from `first` on."""
        for index in range(first, len(self._added)):
            self._added[index] += share * (self._prior(index) - self._added[index])

    def drafted(self, tree: DraftTree) -> DraftTree:
        """Note the tree of the nodes that `best` kept, in their order; return it."""
        self._tree = tree
        self._draft.end(self._asked)
        return tree

    def observe(self, outcome: RoundOutcome) -> None:
        """End the round: learn which nodes were accepted."""
        start = outcome.start
        accepted = self._learn(outcome.tokens[start : start + len(outcome.path)])
        drafted = 0 if self._tree is None else len(self._tree)
        spent = self._seconds(drafted + 1)
        if self._asked:
            spent += self._draft.seconds(self._asked)
        spent /= self._seconds(1)
        self._account.allow(accepted + 1)
        if self._asked:
            self._account.lose(spent - (accepted + 1))
            if self._silent:
                change = 1.0 / _PATIENCE if accepted else _PATIENCE
                self._recovery = min(_RECOVERY, self._recovery * change)
        elif not self._rests:  # while it rests nothing is forgotten
            self._odds.recover(self._recovery)
            self._hope(0, self._recovery)
            self._rounds += self._recovery * (_PRIOR_ROUNDS - self._rounds)
        self._silent = not self._asked
        self._tokens = _ROUNDS * self._tokens + accepted + 1
        self._spent = _ROUNDS * self._spent + spent
        self._tree, self._asked = None, 0

    def _learn(self, tokens: Sequence[int]) -> int:
        """Learn from the children of every node that was reached; return how many were."""
        tree, node, accepted = self._tree, ROOT, 0
        if tree is None:
            return 0
        children: dict[int, list[int]] = {}
        for child, parent in enumerate(tree.parents):
            children.setdefault(parent, []).append(child)
        # Behind the last node that was accepted all children were refused.
        for token in (*tokens, None):
            below = children.get(node, ())
            chosen = next((child for child in below if tree.tokens[child] == token), None)
            for child in below:
                self._odds.learn(self._certainties[child], child == chosen)
            if chosen is None:
                break
            node, accepted = chosen, accepted + 1
        return accepted

    def _prices(self, most: int) -> tuple[float, list[float]]:
        """Return what a token is worth, and what 1, 2, .. `most` nodes add to T, in seconds."""
        plain = self._seconds(1)
        # Plain decoding is always there to be had.
        token = min(self._spent / self._tokens, 1.0) * plain
        return token, [self._seconds(n + 1) - plain for n in range(1, most + 1)]


def _best_count(
    chances: Sequence[float], token: float, takes: Sequence[float]
) -> tuple[int, float]:
    """Return how many of these nodes, falling, to verify, and what that is worth in seconds."""
    best, most, worth = 0, 0.0, 0.0
    for n, (chance, seconds) in enumerate(zip(chances, takes, strict=False), 1):
        worth += token * chance
        if worth - seconds > most:
            best, most = n, worth - seconds
    return best, most
