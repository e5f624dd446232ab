"""The verification branch: which n-grams of a pool are drafted below the root, as point masses.

`LatestGuesses` is the paper's (Fu et al. 2024, section 3.2): the G n-grams of the root's token that
were used last, and as many nodes. `PlannedGuesses` drafts what should pay: it grows a tree of the
pool's continuations where they are likely, and keeps as much of it as yields the most tokens for
the cost of evaluating it.

How often a pool of n-grams is right, by how much of the context matched: counted on the text,
drafted or not.

A guess that is a point mass is accepted exactly if it is the token that comes. So every committed
token tells for all that the pool would have guessed whether it would have been accepted, without
evaluating it: estimates cost nothing and depend on tokens alone, never on time. A text is short and
classes are many, so all share one more number: how much better or worse guesses have been lately
than their classes say, in log-odds; it notices within some tokens that a text has changed.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Protocol

from specrun.bindings.errors import OptionError
from specrun.runtime.costs import CostCurve
from specrun.runtime.drafter import DraftRequest
from specrun.runtime.drafters.lookahead.ngram_pool import NgramPool
from specrun.runtime.drafters.recent_odds import RecentOdds
from specrun.runtime.tree import ROOT, TreeBuilder

# First estimates: by the number of matched tokens, and what is left of them for the second, third,
# ... continuation.
_BY_MATCH = (0.1, 0.25, 0.35, 0.4, 0.45, 0.65, 0.8)
_BY_RANK = (1.0, 0.3, 0.15, 0.1)
_WEIGHT = 4.0  # how many observations the first estimate counts for
_MEMORY = 48.0  # observations after which older ones begin to fade


class MatchAcceptance:
    """The share of accepted tokens by matched length (those above the last class count to it) and
    rank."""

    ranks = len(_BY_RANK)

    def __init__(self) -> None:
        self._hits = [[_WEIGHT * match * rank for rank in _BY_RANK] for match in _BY_MATCH]
        self._trials = [[_WEIGHT] * len(_BY_RANK) for _ in _BY_MATCH]
        self._lately = RecentOdds()

    def probability(self, matched: int, rank: int) -> float:
        """Return the estimate for a continuation of this rank after so many matched tokens (1 or
        more)."""
        row = min(matched, len(_BY_MATCH)) - 1
        return self._lately.applied(self._hits[row][rank] / self._trials[row][rank])

    def count(self, continuations: Sequence[tuple[int, int]], token: int) -> None:
        """Count which of the continuations (token, matched length), by rank, the next token was."""
        if continuations:
            guess, matched = continuations[0]
            self._lately.observe(self.probability(matched, 0), guess == token)
        for rank, (guess, matched) in enumerate(continuations[: self.ranks]):
            row = min(matched, len(_BY_MATCH)) - 1
            if self._trials[row][rank] >= _MEMORY:
                self._hits[row][rank] /= 2.0
                self._trials[row][rank] /= 2.0
            self._hits[row][rank] += guess == token
            self._trials[row][rank] += 1.0


_WORTH = (
    1.08  # a draft must promise more than what Python takes for it, and estimates are not exact
)
_UNLIKELY = 0.02


class Guesses(Protocol):
    """Drafts from a pool, and learns from the text how far to trust it."""

    max_nodes: int
    max_leaves: int

    def add_to(
        self,
        builder: TreeBuilder,
        pool: NgramPool,
        request: DraftRequest,
        max_nodes: int,
        beside: int,
    ) -> None:
        """Add guesses that follow the request's tokens; `beside` other nodes are evaluated with
        them."""

    def learn(self, pool: NgramPool, tokens: Sequence[int], start: int) -> None:
        """Compare what the pool would have guessed with the tokens from `start` on, before the pool
        learns them."""

    def forget(self) -> None:
        """Forget what was learned."""


class LatestGuesses:
    """At most `limit` n-grams that begin with the root's token, the most recently used first."""

    def __init__(self, limit: int, ngram: int) -> None:
        if limit < 0:
            raise OptionError(f"guesses is {limit}: give 0 or more")
        self.max_leaves = limit
        self.max_nodes = limit * (ngram - 1)

    def add_to(
        self,
        builder: TreeBuilder,
        pool: NgramPool,
        request: DraftRequest,
        max_nodes: int,
        beside: int,
    ) -> None:
        """Add them; those that begin alike share their nodes."""
        limit = len(builder) + min(max_nodes, self.max_nodes)
        known: dict[tuple[int, int], int] = {}
        for guess in pool.guesses(request.tokens[-1], self.max_leaves):
            parent = ROOT
            for token in guess[: request.max_depth]:
                node = known.get((parent, token))
                if node is None:
                    if len(builder) >= limit:
                        break
                    node = known[parent, token] = builder.add(parent, token)
                parent = node
                if token in request.end_tokens:
                    break

    def learn(self, pool: NgramPool, tokens: Sequence[int], start: int) -> None:
        """Nothing to learn: every guess is drafted."""

    def forget(self) -> None:
        """Nothing was learned."""


class PlannedGuesses:
    """A tree of at most `max_leaves` paths and `max_nodes` nodes, cut where it pays best on this
    cost curve.

    A node's probability is its parent's times the measured acceptance of such a continuation
    (`MatchAcceptance`). Nodes are taken from the most probable down; n of them yield 1 + sum of
    probabilities for T(n + 1), and the n of the best ratio is drafted, none where plain decoding is
    as good. Only counts of tokens are learned, and the curve is given, so that the same text leads
    to the same drafts.
    """

    def __init__(
        self, curve: CostCurve, *, max_leaves: int = 4, max_nodes: int = 12, depth: int = 8
    ) -> None:
        self.max_leaves = max_leaves
        self.max_nodes = max_nodes if max_leaves else 0
        self._depth = depth
        self._curve = curve
        self._acceptance = MatchAcceptance()

    def add_to(
        self,
        builder: TreeBuilder,
        pool: NgramPool,
        request: DraftRequest,
        max_nodes: int,
        beside: int,
    ) -> None:
        """Add the tree that should pay best, if any does."""
        limit = min(max_nodes, self.max_nodes)
        paths, values = self._likely(pool, request, min(request.max_depth, self._depth), limit)
        places: dict[tuple[int, ...], int] = {(): ROOT}
        for path in paths[: self._worth(values, beside)]:
            places[path] = builder.add(places[path[:-1]], path[-1])

    def learn(self, pool: NgramPool, tokens: Sequence[int], start: int) -> None:
        """Count for every token from `start` on which of the pool's continuations it was."""
        for end in range(max(start, 1), len(tokens)):
            tail = tokens[max(0, end - pool.n + 1) : end]
            self._acceptance.count(continuations(pool, tail, MatchAcceptance.ranks), tokens[end])

    def forget(self) -> None:
        """Return to the first estimates."""
        self._acceptance = MatchAcceptance()

    def _likely(
        self, pool: NgramPool, request: DraftRequest, max_depth: int, limit: int
    ) -> tuple[list[tuple[int, ...]], list[float]]:
        """Return the most probable paths below the root, parents before children, with their
        probabilities."""
        tail = tuple(request.tokens[1 - pool.n :])
        paths: list[tuple[int, ...]] = []
        values: list[float] = []
        with_child: set[tuple[int, ...]] = set()
        n_leaves, order = 0, 0
        queue: list[tuple[float, int, tuple[int, ...]]] = [(-1.0, 0, ())]
        while queue and len(paths) < limit:
            value, _, path = heapq.heappop(queue)
            if path:
                if path[:-1] in with_child or len(path) == 1:
                    if n_leaves >= self.max_leaves:
                        continue
                    n_leaves += 1
                with_child.add(path[:-1])
                paths.append(path)
                values.append(-value)
            if len(path) >= max_depth or (path and path[-1] in request.end_tokens):
                continue
            found = continuations(pool, (tail + path)[1 - pool.n :], MatchAcceptance.ranks)
            for rank, (token, matched) in enumerate(found):
                below = value * self._acceptance.probability(matched, rank)
                if below < -_UNLIKELY:
                    order += 1  # of equals the first found comes first
                    heapq.heappush(queue, (below, order, (*path, token)))
        return paths, values

    def _worth(self, values: Sequence[float], beside: int) -> int:
        """Return how many nodes, the most probable first, yield the most tokens for their time."""
        best, count, tokens = _WORTH / self._curve.seconds(1 + beside), 0, 1.0
        for n, value in enumerate(values, 1):
            tokens += value
            speed = tokens / self._curve.seconds(1 + beside + n)
            if speed > best:
                best, count = speed, n
        return count


def continuations(pool: NgramPool, tail: Sequence[int], limit: int) -> list[tuple[int, int]]:
    """Return tokens that followed this tail in the pool, each with how many of its last tokens
    stood before it.

    The longest match comes first, of equal ones the most recently used; a token is named once.
    """
    found: dict[int, int] = {}
    for matched in range(min(len(tail), pool.n - 1), 0, -1):
        before = tuple(tail[len(tail) - matched + 1 :])
        for rest in pool.guesses(tail[-matched]):
            if (
                len(rest) >= matched
                and rest[: matched - 1] == before
                and rest[matched - 1] not in found
            ):
                found[rest[matched - 1]] = matched
                if len(found) >= limit:
                    return list(found.items())
    return list(found.items())
