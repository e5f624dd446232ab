"""Trees of retrieved continuations, and the probability that they hold."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

from specrun.bindings.errors import OptionError
from specrun.runtime.drafters.likely_trees import Guess, TreeLimits, grow_likely, most_worthwhile
from specrun.runtime.drafters.retrieval.ngram_index import FOUND_AGAIN
from specrun.runtime.planning import CostCurve, MatchAcceptance
from specrun.runtime.round.drafter import Drafter, DraftRequest, RoundOutcome
from specrun.runtime.trees import MAX_NODES, check_leaves
from specrun.runtime.trees.tree import DraftTree

# == The evidence for a match's continuation =======================================================
#
# Retrieved texts differ in kind: one place, several that agree, several that do not (prediction
# by partial matching tells the same cases apart, Cleary & Witten 1984), or a place found again
# after an edit. For each kind, length of match and rank among the continuations, `MatchAcceptance`
# learns how often the next token was that one.


LONGEST_MATCH = 16
"""Matches of more tokens count as this long: they are as good as certain."""

RANKS = 3
"""Continuations told apart by rank; further ones are trusted as the last, and teach nothing."""


class Evidence(IntEnum):
    """The evidence for the next token of the best continuation: the places of the longest match."""

    ONE_PLACE = 0
    SEVERAL_PLACES = 1
    """All of them go on alike."""
    MOST_PLACES = 2
    """A clear majority of them."""
    DISAGREEING = 3
    REALIGNED = 4
    """The place that the text had left for an edit; its match begins anew behind that."""

    def kind(self, length: int) -> int:
        """Return the number in `MatchAcceptance` of matches so long: an evidence's in a row."""
        return self * (LONGEST_MATCH + 1) + min(length, LONGEST_MATCH)


# Before anything was seen: the odds that a match of L tokens holds are L ** slope / doubt.
_SLOPE = (1.3, 1.3, 1.0, 0.7)
_DOUBT = (4.0, 0.6, 1.2, 1.5)
_REALIGNED = (0.1, 0.55, 0.7)  # by the tokens matched since the edit
_SHARES = (0.6, 0.25, 0.15)  # of the others, the share of each rank
_RUNNERS_UP = (0.25, 0.1)  # of the rest after the first, if the longest do not disagree


def _priors(evidence: Evidence, length: int) -> list[float]:
    if evidence is Evidence.REALIGNED:
        first = _REALIGNED[min(length, len(_REALIGNED) - 1)]
    elif not length:
        return [0.0] * RANKS
    else:
        odds = length ** _SLOPE[evidence] / _DOUBT[evidence]
        first = odds / (odds + 1.0)
        if evidence is Evidence.DISAGREEING:
            return [first * share for share in _SHARES]
    return [first, *((1.0 - first) * share for share in _RUNNERS_UP)]


MATCH_PRIORS = [
    _priors(evidence, length) for evidence in Evidence for length in range(LONGEST_MATCH + 1)
]
"""By kind (`Evidence.kind`) and rank."""


# == Trees of continuations ========================================================================
#
# LLMA (Yang et al. 2023) and prompt lookup copy one continuation; REST (He et al. 2023, section
# 3.2) merges all of them into a trie and keeps the most frequent prefixes. Here a node's
# probability is estimated: its parent's, times the trust in a match that long, times its share
# among the continuations that agree so far. Nodes are taken in that order, and as many as gain more
# tokens than their evaluation costs. Retrieved texts show which matches hold, drafted or not.


_LEAST_GAIN = 1.1  # expected speed-up from which a round is drafted for: Python costs something too
_FOUND_AGAIN_COUNTS = 2  # tokens by which a match behind an edit is better than it looks
_MAJORITY = 0.6
_LEAST_PROBABILITY = 0.05  # no batch is so cheap that such a node pays


@dataclass(slots=True)  # not frozen: that costs a call for every field, in every round
class Continuation:
    """The continuation of an earlier place of the last tokens; `weight` ranks equal matches."""

    tokens: Sequence[int]
    match: int
    weight: float = 1.0
    realigned: bool = False

    @property
    def reach(self) -> int:
        """How long a match it is as good as."""
        return self.match + _FOUND_AGAIN_COUNTS * self.realigned

    @property
    def votes(self) -> float:
        """Its weight among others: a token more of context double, up to where no doubt is."""
        return float(self.weight * 2.0 ** min(self.reach, LONGEST_MATCH))


def counted(found: Sequence[tuple[int, Sequence[int]]]) -> list[Continuation]:
    """Return places of a store as continuations: equal ones are one with more weight."""
    alike = Counter((match, tuple(known)) for match, known in found)
    return [Continuation(known, match, count) for (match, known), count in alike.items()]


def continuation_tree(
    continuations: Sequence[Continuation],
    trust: MatchAcceptance,
    limits: TreeLimits,
    costs: CostCurve,
) -> DraftTree:
    """Return the best nodes as point masses; empty if no draft would pay."""
    taken = likely_nodes(continuations, trust, limits)
    count, _ = most_worthwhile([guess.probability for guess in taken], costs, _LEAST_GAIN)
    if not count:
        return DraftTree()
    # grow_likely orders by probability, so a prefix is a tree: parents come before their children.
    _, parents, tokens = zip(*taken[:count], strict=True)
    return DraftTree.of_points(tokens, parents)


def likely_nodes(
    continuations: Sequence[Continuation], trust: MatchAcceptance, limits: TreeLimits
) -> list[Guess]:
    """Return the best nodes of the continuations' trie, the most probable first."""
    if len(continuations) == 1:  # the usual case by far: its trie is a chain
        alone, path, chain = continuations[0], 1.0, list[Guess]()
        tokens = alone.tokens[: min(limits.nodes, limits.depth)]
        kinds = [_kind(continuations, depth) for depth in range(len(tokens))]
        for depth, (token, chance) in enumerate(zip(tokens, trust.chances(kinds), strict=True)):
            path *= chance
            if path < _LEAST_PROBABILITY:
                break
            chain.append(Guess(path, depth - 1, token))
            if token in limits.end_tokens:
                break
        return chain

    def below(
        node: tuple[int, Sequence[Continuation]],
    ) -> Iterator[tuple[int, float, tuple[int, Sequence[Continuation]]]]:
        depth, through = node  # the continuations that run through it
        alive = [continuation for continuation in through if len(continuation.tokens) > depth]
        if not alive:
            return
        kind = _kind(alive, depth)
        for rank, (token, own) in enumerate(_ranked(alive, depth)):
            yield token, trust.chance(kind, rank), (depth + 1, own)

    return grow_likely((0, continuations), below, limits, _LEAST_PROBABILITY)


def teach(
    trust: MatchAcceptance, continuations: Sequence[Continuation], tokens: Sequence[int]
) -> None:
    """Count in `trust` the continuations against the tokens that really came."""
    alive = continuations
    for depth, token in enumerate(tokens):
        alive = [continuation for continuation in alive if len(continuation.tokens) > depth]
        if not alive:
            return
        ranked = _ranked(alive, depth)
        rank = next((rank for rank, (known, _) in enumerate(ranked) if known == token), None)
        # Before the continuations that failed are dropped: the estimate was made with all of them.
        trust.learn([_kind(alive, depth)] * len(ranked), rank)
        if rank is None:
            return
        alive = ranked[rank][1]


def _ranked(alive: Sequence[Continuation], depth: int) -> list[tuple[int, Sequence[Continuation]]]:
    """Return the tokens that come next, the most votes first, with the continuations of each."""
    if len(alive) == 1:  # where tries thin out
        return [(alive[0].tokens[depth], alive)]
    groups: dict[int, list[Continuation]] = {}
    for continuation in alive:
        groups.setdefault(continuation.tokens[depth], []).append(continuation)
    if len(groups) == 1:
        return [(alive[0].tokens[depth], alive)]
    return sorted(groups.items(), key=lambda group: -sum(place.votes for place in group[1]))


def _kind(alive: Sequence[Continuation], depth: int) -> int:
    """Return the kind of the best match's continuation at `depth`."""
    # Only the longest matches are evidence; shorter ones are among the votes.
    best = alive
    if len(alive) > 1:
        longest = max(continuation.reach for continuation in alive)
        best = [continuation for continuation in alive if continuation.reach == longest]
    first, length = best[0], best[0].match + depth
    if first.realigned and length < FOUND_AGAIN:
        return Evidence.REALIGNED.kind(length)
    if len(best) == 1:
        return (Evidence.ONE_PLACE if first.weight <= 1.0 else Evidence.SEVERAL_PLACES).kind(length)
    weights: dict[int, float] = {}
    for continuation in best:
        token = continuation.tokens[depth]
        weights[token] = weights.get(token, 0.0) + continuation.weight
    if len(weights) == 1:
        return Evidence.SEVERAL_PLACES.kind(length)
    # Without a majority every rank has only a share of the trust.
    majority = max(weights.values()) >= _MAJORITY * sum(weights.values())
    return (Evidence.MOST_PLACES if majority else Evidence.DISAGREEING).kind(length)


class ContinuationDrafter(Drafter):
    """Drafts continuations of earlier occurrences of the last tokens, as a subclass finds them.

    `depth` is the longest path, `nodes` the largest tree, `branches` the most leaves. Drafts are
    point masses, so the text is plain decoding's own at every temperature. How much is drafted
    follows the length of the match, the acceptance so far and `costs`, the price of evaluating n
    tokens; often it is nothing.
    """

    def __init__(
        self, *, depth: int, nodes: int | None, branches: int, name: str, costs: CostCurve
    ) -> None:
        kind = name.partition("(")[0]
        if depth < 1:
            raise OptionError(f"{kind}: n is {depth}: draft at least 1 token (or use none)")
        nodes = depth if nodes is None else nodes
        if not 1 <= nodes <= MAX_NODES:
            raise OptionError(f"{kind}: a tree of {nodes} nodes: give 1 to {MAX_NODES}")
        if branches < 1:
            raise OptionError(f"{kind}: branches is {branches}: give at least 1")
        check_leaves(f"{kind}: branches is {branches}", branches)
        self.name, self.max_nodes = name, nodes
        self.finds_text = self.forecasts = True
        self.max_leaves = min(branches, nodes)
        self._depth, self._costs = depth, costs
        self._trust = MatchAcceptance(MATCH_PRIORS)
        self._retrieved: Sequence[Continuation] = ()
        self._retrieved_at = -1

    def fitting(self, n_batch: int) -> Self:
        """Return the drafter; raises OptionError if its trees do not fit a batch of so many."""
        if self.max_nodes + 1 > n_batch:
            raise OptionError(
                f"{self.name}: a tree of {self.max_nodes} nodes and its root do not fit a batch "
                f"of {n_batch}: lower nodes, or raise the batch size (-b)"
            )
        return self

    def begin(self, tokens: Sequence[int]) -> None:
        """Start an answer: continuations retrieved for an earlier one are not counted."""
        self._let_go()

    @abstractmethod
    def retrieve(self, tokens: Sequence[int], length: int) -> Sequence[Continuation]:
        """Return continuations of earlier occurrences of the last tokens, up to `length` each."""

    def propose(self, request: DraftRequest) -> DraftTree:
        """Return the tree of continuations that pays, empty if none does."""
        self._retrieve(request)
        if not self._retrieved:
            return DraftTree()
        return continuation_tree(self._retrieved, self._trust, self._limits(request), self._costs)

    def forecast(self, request: DraftRequest) -> float:
        """Return the expected gain of the present continuations; `observe` may teach by them."""
        likely, costs = [guess.probability for guess in self.guesses(request)], self._costs
        count, rate = most_worthwhile(likely, costs, _LEAST_GAIN)
        return rate * costs.seconds(1) if count else 1.0

    def guesses(self, request: DraftRequest) -> list[Guess]:
        """Return the likely nodes below the text, whatever they cost; `observe` teaches by them."""
        self._retrieve(request)
        return likely_nodes(self._retrieved, self._trust, self._limits(request))

    def _retrieve(self, request: DraftRequest) -> None:
        """Retrieve once a round, however often a draft is forecast before it is proposed."""
        if self._retrieved_at != len(request.tokens):
            self._retrieved = self.retrieve(request.tokens, self._depth)
            self._retrieved_at = len(request.tokens)

    def observe(self, outcome: RoundOutcome) -> None:
        """Learn how the retrieved continuations fared, those that were not drafted too."""
        if self._retrieved:
            # All that came, also behind the draft: undrafted ones teach at no cost.
            teach(self._trust, self._retrieved, outcome.tokens[self._retrieved_at :])
        self._let_go()

    def rewind(self, length: int) -> None:
        """Teach nothing about guesses that were taken back."""
        if self._retrieved_at > length:
            self._let_go()

    def _limits(self, request: DraftRequest) -> TreeLimits:
        return TreeLimits(
            min(self.max_nodes, request.max_nodes),
            min(self._depth, request.max_depth),
            self.max_leaves,
            request.end_tokens,
        )

    def start_over(self) -> None:
        """Forget the counts of earlier texts."""
        self._trust.forget()

    def _let_go(self) -> None:
        self._retrieved, self._retrieved_at = (), -1
