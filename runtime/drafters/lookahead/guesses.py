"""Lookahead decoding's verification branch: which n-grams of the pool are drafted, as point masses.

`LatestGuesses` is the paper's (Fu et al. 2024, section 3.2): the G n-grams of the root's token that
were used last, and as many nodes. `PlannedGuesses` drafts what should pay: it grows a tree of the
pool's continuations where they are likely, and keeps as much of it as yields the most tokens for
the cost of evaluating it.

How likely they are, `MatchAcceptance` counts on the text. A guess that is a point mass is accepted
exactly if it is the token that comes. So every committed token tells for all that the pool would
have guessed whether it would have been accepted, without evaluating it: estimates cost nothing and
depend on tokens alone, never on time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from specrun.bindings.errors import OptionError
from specrun.runtime.costs import CostCurve
from specrun.runtime.drafter import DraftRequest
from specrun.runtime.drafters.likely_trees import RecentOdds, grow_likely, most_worthwhile
from specrun.runtime.drafters.lookahead.ngram_pool import NgramPool
from specrun.runtime.tree import ROOT, TreeBuilder

# First estimates: by the number of matched tokens, and the share of that for the second, third, ...
# continuation.
_BY_MATCH = (0.1, 0.25, 0.35, 0.4, 0.45, 0.65, 0.8)
_BY_RANK = (1.0, 0.3, 0.15, 0.1)
_WEIGHT = 4.0  # how many observations the first estimate counts for
_MEMORY = 48.0  # observations after which older ones begin to fade


class MatchAcceptance:
    """The share of accepted tokens by rank and matched length, up to the longest class."""

    ranks = len(_BY_RANK)

    def __init__(self) -> None:
        self._hits = [[_WEIGHT * match * rank for rank in _BY_RANK] for match in _BY_MATCH]
        self._trials = [[_WEIGHT] * len(_BY_RANK) for _ in _BY_MATCH]
        self._lately = RecentOdds()

    def probability(self, matched: int, rank: int) -> float:
        """Return the estimate for a continuation of this rank after 1 or more matched tokens."""
        row = min(matched, len(_BY_MATCH)) - 1
        # The mean of a Beta law, whose prior is in the counts from the start.
        return self._lately.applied(self._hits[row][rank] / self._trials[row][rank])

    def count(self, continuations: Sequence[tuple[int, int]], token: int) -> None:
        """Count which of the continuations (token, matched length), by rank, the next token was."""
        # One observation a token: the ranks are not independent, exactly one of them can come.
        if continuations:
            guess, matched = continuations[0]
            self._lately.observe(self.probability(matched, 0), guess == token)
        for rank, (guess, matched) in enumerate(continuations[: self.ranks]):
            row = min(matched, len(_BY_MATCH)) - 1
            if self._trials[row][rank] >= _MEMORY:  # older observations count half from now on
                self._hits[row][rank] /= 2.0
                self._trials[row][rank] /= 2.0
            self._hits[row][rank] += guess == token
            self._trials[row][rank] += 1.0


# A draft must promise more than what Python takes for it, and estimates are not exact.
_WORTH = 1.08
_UNLIKELY = 0.02


def add_phrases(
    builder: TreeBuilder,
    phrases: Iterable[Sequence[int]],
    max_depth: int,
    max_nodes: int,
    end_tokens: frozenset[int] = frozenset(),
) -> None:
    """Add phrases below the root as point masses; those that begin alike share their nodes."""
    # Nodes of other branches in the builder are not counted, as room is for these alone.
    limit = len(builder) + max_nodes
    known: dict[tuple[int, int], int] = {}
    for phrase in phrases:
        parent = ROOT
        for token in phrase[: max(0, max_depth)]:
            node = known.get((parent, token))
            if node is None:
                if len(builder) >= limit:
                    break
                node = known[parent, token] = builder.add(parent, token)
            parent = node
            if token in end_tokens:
                break


class Guesses(Protocol):
    """Drafts from a pool, and learns from the text how far to trust it."""

    max_nodes: int
    max_leaves: int

    def add_to(
        self, tree: TreeBuilder, pool: NgramPool, request: DraftRequest, room: int, beside: int
    ) -> None:
        """Add up to `room` guesses after the request, to be evaluated with `beside` other nodes."""

    def learn(self, pool: NgramPool, tokens: Sequence[int], start: int) -> None:
        """Compare what the pool would have guessed with the tokens from `start` on, new to it."""

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
        self, tree: TreeBuilder, pool: NgramPool, request: DraftRequest, room: int, beside: int
    ) -> None:
        """Add them; those that begin alike share their nodes."""
        guesses = pool.guesses(request.tokens[-1], self.max_leaves)
        room = min(room, self.max_nodes)
        add_phrases(tree, guesses, request.max_depth, room, request.end_tokens)

    def learn(self, pool: NgramPool, tokens: Sequence[int], start: int) -> None:
        """Nothing to learn: every guess is drafted."""

    def forget(self) -> None:
        """Nothing was learned."""


class PlannedGuesses:
    """A tree of at most `max_leaves` paths and `max_nodes` nodes, cut where it pays best.

    A node's probability is its parent's times the measured acceptance of such a continuation
    (`MatchAcceptance`). Nodes are taken from the most probable down, and as many as yield the most
    tokens a second on this cost curve (`likely_trees`).
    """

    def __init__(
        self, curve: CostCurve, *, max_leaves: int = 4, max_nodes: int = 12, depth: int = 8
    ) -> None:
        self.max_leaves = max_leaves
        self.max_nodes = max_nodes if max_leaves else 0
        self._depth, self._curve = depth, curve
        self._acceptance = MatchAcceptance()

    def add_to(
        self, tree: TreeBuilder, pool: NgramPool, request: DraftRequest, room: int, beside: int
    ) -> None:
        """Add the tree that should pay best, if any does."""
        # n - 1 tokens are the longest beginning of an n-gram that leaves one token to guess.
        tail = tuple(request.tokens[1 - pool.n :])

        def below(path: tuple[int, ...]) -> Iterator[tuple[int, float, tuple[int, ...]]]:
            found = continuations(pool, (tail + path)[1 - pool.n :], MatchAcceptance.ranks)
            for rank, (token, matched) in enumerate(found):
                yield token, self._acceptance.probability(matched, rank), (*path, token)

        root: tuple[int, ...] = ()
        likely = grow_likely(
            root,
            below,
            nodes=min(room, self.max_nodes),
            depth=min(request.max_depth, self._depth),
            leaves=self.max_leaves,
            end_tokens=request.end_tokens,
            least=_UNLIKELY,
        )
        chances = [guess.probability for guess in likely]
        count, _ = most_worthwhile(chances, self._curve, _WORTH, beside)
        nodes = {ROOT: ROOT}
        for number, guess in enumerate(likely[:count]):
            nodes[number] = tree.add(nodes[guess.parent], guess.token)

    def learn(self, pool: NgramPool, tokens: Sequence[int], start: int) -> None:
        """Count for every token from `start` on which of the pool's continuations it was."""
        for end in range(max(start, 1), len(tokens)):
            # Drafted or not: a point mass would have been accepted exactly if it is the next token.
            tail = tokens[max(0, end - pool.n + 1) : end]
            self._acceptance.count(continuations(pool, tail, MatchAcceptance.ranks), tokens[end])

    def forget(self) -> None:
        """Return to the first estimates."""
        self._acceptance = MatchAcceptance()


def continuations(pool: NgramPool, tail: Sequence[int], limit: int) -> list[tuple[int, int]]:
    """Return tokens that followed this tail in the pool, each with the length of its match.

    The longest match comes first, of equal ones the most recently used; a token is named once.
    """
    found: dict[int, int] = {}
    # Longer matches first, so that setdefault keeps the best evidence of a token.
    for matched in range(min(len(tail), pool.n - 1), 0, -1):
        before = tuple(tail[len(tail) - matched + 1 :])
        for rest in pool.guesses(tail[-matched]):
            if len(rest) < matched or rest[: matched - 1] != before:
                continue
            found.setdefault(rest[matched - 1], matched)
            if len(found) >= limit:
                return list(found.items())
    return list(found.items())
