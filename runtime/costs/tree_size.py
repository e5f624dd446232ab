"""Tree size by optimal stopping: of the nodes that a drafter names, those that pay are verified.

A round that verifies n nodes takes D + T(n + 1) seconds, D the drafter's, and yields 1 + sum c
tokens, c the chance of each node that it and all nodes above it are accepted. With s the seconds
that a token takes at the best choice (see `draft_length`), a round maximises

    s sum c - T(n + 1)

over n, the n nodes of the highest chances: a node's chance is less than its parent's, so they are a
tree (EAGLE-2 reranks by the drafter's own probabilities, Li et al. 2024, section 4.2; here they are
calibrated by what was accepted lately, and their number is chosen). Where the best of it was worth
less than D lately, the drafter is not asked, and asked again some rounds later; and it rests while
rounds in which it was asked lost all that they may lose against plain decoding (`Account`).

Choosing nodes by their probability is exact for point masses only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specrun.runtime.costs.account import LOST_ANEW, account_of_model
from specrun.runtime.costs.draft_length import AcceptanceOdds, log_odds
from specrun.runtime.drafter import RoundOutcome
from specrun.runtime.tree import ROOT, DraftTree

_USUAL = 0.75  # the chance of the best child of a node, where nothing is known
_PRIOR_TOKENS, _PRIOR_ROUNDS, _MOST_ROUNDS = 6.0, 4.0, 20.0
_ROUNDS = 0.98  # memory of tokens and seconds
_RECOVERY, _PATIENCE = 0.03, 0.8  # of the way back to the prior, in a round without a draft


class TreeSize:
    """Chooses the nodes of point masses. `seconds` is T, `draft` D, `most` the largest tree.

    With `forgets` answers begin alike: where a rule's law depends on how much is drafted, a seed
    would not repeat itself otherwise.

    A round asks `pays` before the drafter is evaluated, `best` for the nodes to keep of those that
    it named, and in the end `observe`.
    """

    def __init__(
        self, seconds: Callable[[int], float], draft: float, most: int, *, forgets: bool = False
    ) -> None:
        self.most, self._seconds, self._draft = most, seconds, draft
        self._forgets = forgets
        self._start_anew()

    def _start_anew(self) -> None:
        """Know nothing."""
        seconds, draft, most = self._seconds, self._draft, self.most
        self._odds = AcceptanceOdds(1.0)
        chances = [_USUAL**depth for depth in range(1, most + 1)]
        tokens, best = 1.0, seconds(1)
        for n, chance in enumerate(chances, 1):
            tokens += chance
            best = min(best, (draft + seconds(n + 1)) / tokens)
        self._tokens, self._spent = _PRIOR_TOKENS, _PRIOR_TOKENS * best
        # A drafter that is better than most pays where the usual one does not: it is tried.
        self._prior = self._surplus = max(self._best_count(chances)[1], 1.5 * draft)
        self._rounds = _PRIOR_ROUNDS  # how many the surplus is the mean of
        self._recovery = _RECOVERY
        self._account = account_of_model()
        self._silent = self._asked = self._rests = False
        self._tree: DraftTree | None = None
        self._certainties: dict[int, float] = {}

    def begin(self) -> None:
        """Start an answer: what was learnt stays where point masses change no text."""
        if self._forgets:
            self._start_anew()
        self._recovery, self._tree = _RECOVERY, None  # another text: it may pay here
        self._account.grant(LOST_ANEW)

    def pays(self) -> bool:
        """Whether the drafter shall be asked in this round."""
        self._rests = self._account.room <= 0.0
        self._tree, self._asked = None, self._surplus > self._draft and not self._rests
        return self._asked

    def best(self, values: Sequence[float], parents: Sequence[int], most: int) -> list[int]:
        """Return the nodes to keep, rising, at most `most`; parents come before their children.

        `values` are products of the drafter's probabilities along the nodes' paths.
        """
        chances: list[float] = []
        certainties: list[float] = []
        for value, parent in zip(values, parents, strict=True):
            above, reached = (1.0, 1.0) if parent == ROOT else (values[parent], chances[parent])
            x = log_odds(min(1.0, value / above) if above > 0.0 else 0.0)
            certainties.append(x)
            chances.append(reached * self._odds.chance(x))
        # Among equals the earlier: a parent comes before its child.
        order = sorted(range(len(chances)), key=chances.__getitem__, reverse=True)
        count, surplus = self._best_count([chances[node] for node in order[: min(most, self.most)]])
        self._rounds = min(self._rounds + 1.0, _MOST_ROUNDS)
        self._surplus += (surplus - self._surplus) / self._rounds
        kept = sorted(order[:count])
        self._certainties = {place: certainties[node] for place, node in enumerate(kept)}
        return kept

    def drafted(self, tree: DraftTree) -> DraftTree:
        """Note the tree of the nodes that `best` kept, in their order; return it."""
        self._tree = tree
        return tree

    def observe(self, outcome: RoundOutcome) -> None:
        """End the round: learn which nodes were accepted."""
        start = outcome.start
        accepted = self._learn(outcome.tokens[start : start + len(outcome.path)])
        drafted = 0 if self._tree is None else len(self._tree)
        spent = self._seconds(drafted + 1) + (self._draft if self._asked else 0.0)
        self._account.allow(accepted + 1)
        if self._asked:
            self._account.lose(spent / self._seconds(1) - (accepted + 1))
            if self._silent:
                change = 1.0 / _PATIENCE if accepted else _PATIENCE
                self._recovery = min(_RECOVERY, self._recovery * change)
        elif not self._rests:  # while it rests nothing is forgotten
            self._odds.recover(self._recovery)
            self._surplus += self._recovery * (self._prior - self._surplus)
            self._rounds += self._recovery * (_PRIOR_ROUNDS - self._rounds)
        self._silent = not self._asked
        self._tokens = _ROUNDS * self._tokens + accepted + 1
        self._spent = _ROUNDS * self._spent + spent
        self._tree, self._asked = None, False

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

    def _best_count(self, chances: Sequence[float]) -> tuple[int, float]:
        """Return how many of these nodes, falling, to verify, and what that is worth in seconds."""
        plain = self._seconds(1)
        token = min(self._spent / self._tokens, plain)  # plain decoding is always there to be had
        best, most, tokens = 0, 0.0, 0.0
        for n, chance in enumerate(chances, 1):
            tokens += chance
            gain = token * tokens - (self._seconds(n + 1) - plain)
            if gain > most:
                best, most = n, gain
        return best, most
