"""Draft length and tree size by optimal stopping."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specrun.runtime.planning.account import LOST_ANEW, Account, account_of_model
from specrun.runtime.planning.curves import DraftCost
from specrun.runtime.round.drafter import RoundOutcome
from specrun.runtime.round.text import common_prefix
from specrun.runtime.trees.tree import ROOT, DraftTree

# == Draft length ==================================================================================
#
# A round of n drafted tokens takes T(n + 1) + n d seconds, d the drafter's own for a token, and
# yields 1 + r_1 + .. + r_n tokens, r_i the probability that the first i are accepted. Rounds follow
# each other, so what counts is tokens a second over all of them; that is greatest where every round
# maximises its tokens times s less its seconds, s being the seconds that a token takes at that
# maximum (the renewal theorem; the iteration s <- seconds / tokens is Dinkelbach's). So with n
# tokens drafted another is, if for some k >= 1
#
#     s r_n (a + a a_1 + .. + a a_1 .. a_(k-1)) > T(n + 1 + k) - T(n + 1) + (k - 1) d
#
# where a is the chance of the next token, given those before it, and a_j = m + c^j (a - m) that of
# those whose laws are not known yet: as good as this one at first, and as usual, m, further on, for
# tokens that are certain come in runs. Looking k tokens ahead is what steps of T ask for, which
# make the second token after them cheap. Before the drafter is asked for its next law, a is what
# the last one lets expect, and pays for d too.
#
# The chance is a logistic function of the drafter's certainty, the greatest probability of its law
# before the draw. Two numbers fit it to what was accepted lately, by Newton's steps; s and m follow
# the last rounds too. Nothing is read but laws of tokens not drawn yet and earlier rounds, so
# drafts stay exact. T and d may be learnt by the clock where tokens are chosen, for such drafts
# change no text; of drawn ones the same text and costs lead to the same lengths.
#
# A drafter whose certainty must be asked for to be known may lose by being asked, however well
# chains end. What rounds in which it was asked lost against plain decoding is booked (`Account`);
# while nothing more may be lost, it rests.


MOST_DRAFTED = 15
"""Tokens of a draft at most: with the root 16, the last size at which batches are still cheap."""

_USUAL = 0.75  # the chance of a token, where nothing is known
_BIAS, _SLOPE_POINTS, _SLOPE_DRAWN = 0.4, 1.0, 0.5
_PRIOR = (4.0, 2.0)  # how firmly bias and slope are believed, in Newton's weights
_MEMORY, _ROUNDS = 0.98, 0.98  # of observations, of rounds
_PRIOR_TOKENS, _PRIOR_CHANCES, _MOST_CHANCES = 6.0, 10.0, 90.0
_RECOVERY, _PATIENCE = 0.03, 0.8  # of the way back to the prior, in a round without a draft
_SURE = 8.0  # log-odds beyond which certainties are alike
_ALIKE = 0.8  # how far from the usual chance the next token's is, as a share of how far this one's
_STALE = 0.02  # change of s or m from which thresholds are worked out again


class AcceptanceOdds:
    """The chance that a drafted token is accepted, by the drafter's certainty.

    Log-odds are `bias + slope x`, x the log-odds of the certainty. Observations fade, so that it
    follows the text.
    """

    def __init__(self, slope: float) -> None:
        self._start = slope
        self.bias, self.slope = _BIAS, slope
        self._weights = (0.0, 0.0, 0.0)  # Newton's matrix without the prior's

    def chance(self, x: float) -> float:
        """Return the probability of being accepted."""
        return 1.0 / (1.0 + math.exp(-self.log_odds(x)))

    def log_odds(self, x: float) -> float:
        """Return the log-odds of being accepted."""
        return self.bias + self.slope * x

    def learn(self, x: float, accepted: bool) -> None:
        """Take one step towards what was seen."""
        chance = self.chance(x)
        weight, error = chance * (1.0 - chance), accepted - chance
        a, b, c = (_MEMORY * old for old in self._weights)
        self._weights = a, b, c = a + weight, b + weight * x, c + weight * x * x
        a, c = a + _PRIOR[0], c + _PRIOR[1]
        # The inverse of [[a, b], [b, c]] times the gradient (1, x) error.
        share = error / (a * c - b * b)
        self.bias += share * (c - b * x)
        self.slope = max(0.0, self.slope + share * (a * x - b))

    def recover(self, share: float) -> None:
        """Go back this share of the way to what is believed of any text: nothing was tried."""
        self.bias += share * (_BIAS - self.bias)
        self.slope += share * (self._start - self.slope)


@dataclass(slots=True)
class _Learnt:
    """What earlier rounds taught about one kind of drafts, chosen tokens or drawn ones."""

    odds: AcceptanceOdds
    usual: float
    tokens: float
    rounds: float
    """What they took, in rounds of plain decoding."""
    account: Account
    chances: float = _PRIOR_CHANCES  # how many the usual one is the mean of
    recovery: float = _RECOVERY
    silent: bool = False  # the round before drafted nothing

    def expect(self, chance: float) -> None:
        """Count a chance as usual as any of the last ones."""
        self.chances = min(self.chances + 1.0, _MOST_CHANCES)
        self.usual += (chance - self.usual) / self.chances

    def listen(self, drafted: int, accepted: int) -> None:
        """Forget a little in a round without a draft, so that drafts are tried again some day.

        Where they were tried in vain, less: what never pays costs less and less.
        """
        if drafted:
            if self.silent:
                change = 1.0 / _PATIENCE if accepted else _PATIENCE
                self.recovery = min(_RECOVERY, self.recovery * change)
        else:
            self.odds.recover(self.recovery)
            self.usual += self.recovery * (_USUAL - self.usual)
            self.chances += self.recovery * (_PRIOR_CHANCES - self.chances)
        self.silent = not drafted


class _Thresholds:
    """The least r_n at which a chain goes on, where a token is worth `token` seconds and `usual` m.

    They hang on the chance of the last law that was seen, which is told in whole log-odds (`level`,
    None before the first). Each is worked out when it is first asked for.
    """

    def __init__(self, token: float, usual: float, costs: Sequence[float], step: float) -> None:
        self.token, self.usual = token, usual
        self._costs, self._step = costs, step
        self._known: dict[tuple[int, int | None, bool], float] = {}

    def hold(
        self, token: float, usual: float, step: float, seconds: Callable[[int], float]
    ) -> bool:
        """Return whether they are near enough to those of these values."""
        pairs = [(token, self.token), (usual, self.usual), (step, self._step)]
        # A curve that is learnt bends: its ends and its middle tell.
        last = len(self._costs) - 1
        pairs += [(seconds(n + 1), self._costs[n]) for n in (0, 1, last // 2, last)]
        return all(abs(now - was) <= _STALE * was for now, was in pairs)

    def to_ask(self, n: int, level: int | None) -> float:
        """Return the least r_n at which the drafter is asked for a law."""
        return self._least(n, level, asks=True)

    def to_take(self, n: int, level: int) -> float:
        """Return the least r_n a at which the token of a law that is known now is drafted."""
        return self._least(n, level, asks=False)

    def _least(self, n: int, level: int | None, *, asks: bool) -> float:
        key = n, level, asks
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._worked_out(*key)
        return known

    def _worked_out(self, n: int, level: int | None, asks: bool) -> float:
        ahead = 0.0 if level is None else 1.0 / (1.0 + math.exp(-level)) - self.usual
        least, yielded, share = math.inf, 0.0, 1.0
        here, spent = self._costs[n], 0.0
        if asks:  # the next law, too, is only expected, and costs a step
            ahead *= _ALIKE
            share, spent = self.usual + ahead, self._step
        for costs in self._costs[n + 1 :]:
            yielded += share
            least = min(least, (costs - here + spent) / (self.token * yielded))
            ahead *= _ALIKE
            share *= self.usual + ahead
            spent += self._step
        return least


class DraftLength:
    """Says when a chain stops. `seconds` is T, `draft` n d, `most` the longest chain.

    `drawn` are T and n d of drawn tokens, where those of chosen ones are learnt by the clock.

    A round calls `start`, then in turn `goes_on` before the drafter's next law and `takes` with its
    certainty, or `ahead` and `cut` where chosen tokens come several at a time; and in the end
    `observe`.
    """

    def __init__(
        self,
        seconds: Callable[[int], float],
        draft: DraftCost,
        most: int = MOST_DRAFTED,
        *,
        drawn: tuple[Callable[[int], float], DraftCost] | None = None,
    ) -> None:
        self.most, self._seconds, self._draft = most, seconds, draft
        self._costs = {True: (seconds, draft), False: drawn or (seconds, draft)}
        self._learnt: dict[bool, _Learnt] = {}
        self._thresholds: _Thresholds | None = None
        self._now: _Learnt | None = None
        self._drafted: list[float] = []
        self._reached, self._asked = 1.0, 0
        self._level: int | None = None
        self._rests = False

    def begin(self) -> None:
        """Start an answer: what was learnt of chosen tokens stays, as they change no text."""
        # Lengths of drawn drafts decide which text comes: each answer starts alike, so that a seed
        # gives the same one again.
        self._learnt.pop(False, None)
        self._thresholds = None  # those of the last answer may be near enough to be kept, not equal
        for learnt in self._learnt.values():
            learnt.recovery = _RECOVERY  # another text: it may pay here
            learnt.account.grant(LOST_ANEW)

    def start(self, *, points: bool) -> None:
        """Start a round that drafts chosen tokens (`points`) or drawn ones."""
        self._seconds, self._draft = self._costs[points]
        learnt = self._learnt.get(points)
        if learnt is None:
            learnt = self._learnt[points] = self._prior(points)
        self._now, self._drafted, self._reached, self._asked = learnt, [], 1.0, 0
        self._level = None
        self._rests = learnt.account.room <= 0.0
        self._plan(learnt)

    def goes_on(self) -> bool:
        """Whether the drafter shall be asked for another law."""
        assert self._thresholds is not None
        n = len(self._drafted)
        wanted = n < self.most and not self._rests
        asks = wanted and self._reached > self._thresholds.to_ask(n, self._level)
        self._asked += asks
        return asks

    def takes(self, certainty: float) -> bool:
        """Whether a token of a law is drafted whose greatest probability is `certainty`."""
        learnt, n = self._now, len(self._drafted)
        assert learnt is not None
        assert self._thresholds is not None
        x = log_odds(certainty)
        chance = learnt.odds.chance(x)
        learnt.expect(chance)
        level = round(max(-_SURE, min(_SURE, learnt.odds.log_odds(x))))
        if n >= self.most or self._reached * chance <= self._thresholds.to_take(n, level):
            return False
        self._drafted.append(x)
        self._reached *= chance
        self._level = level
        return True

    def ahead(self) -> int:
        """Return how many chosen tokens to compute at once: as many as usual ones are worth it."""
        assert self._now is not None
        assert self._thresholds is not None
        if self._rests:
            return 0
        n, reached = 0, 1.0
        while n < self.most and reached > self._thresholds.to_ask(n, None):
            n, reached = n + 1, reached * self._now.usual
        self._draft.start()
        # Even numbers: each needs a graph of its own.
        return min(n + n % 2, self.most)

    def cut(self, certainties: Sequence[float]) -> int:
        """Return how many of these chosen tokens are drafted, all of which were asked for."""
        self._draft.end(len(certainties))
        count = 0
        while count < len(certainties) and self.takes(certainties[count]):
            count += 1
        self._asked = len(certainties)
        return count

    def observe(self, drafted: Sequence[int], outcome: RoundOutcome) -> None:
        """End the round in which these tokens were drafted."""
        # In an ensemble the path may be another drafter's.
        start = outcome.start
        self.learn(common_prefix(drafted, outcome.tokens[start : start + len(outcome.path)]))

    def learn(self, accepted: int) -> None:
        """End the round: so many of its tokens were accepted."""
        learnt, drafted = self._now, self._drafted
        if learnt is None:
            return
        self._now = None
        # Behind the first token that was refused nothing was tested.
        for index, x in enumerate(drafted[: accepted + 1]):
            learnt.odds.learn(x, index < accepted)
        seconds = self._seconds(len(drafted) + 1)
        if self._asked:
            seconds += self._draft.seconds(self._asked)
        rounds = seconds / self._seconds(1)
        learnt.account.allow(accepted + 1)
        if not self._rests:  # while it rests nothing is learnt, nor forgotten
            learnt.listen(len(drafted), accepted)
            learnt.account.lose(rounds - (accepted + 1))
        learnt.tokens = _ROUNDS * learnt.tokens + accepted + 1
        learnt.rounds = _ROUNDS * learnt.rounds + rounds

    def _prior(self, points: bool) -> _Learnt:
        """Return what is believed before the first round: the best length for a usual drafter."""
        tokens, best, plain = 1.0, 1.0, self._seconds(1)
        for n in range(1, self.most + 1):
            tokens += _USUAL**n
            best = min(best, (self._seconds(n + 1) + self._draft.seconds(n)) / tokens / plain)
        odds = AcceptanceOdds(_SLOPE_POINTS if points else _SLOPE_DRAWN)
        return _Learnt(odds, _USUAL, _PRIOR_TOKENS, _PRIOR_TOKENS * best, account_of_model())

    def _plan(self, learnt: _Learnt) -> None:
        """Have thresholds for what a token is worth now; T may change with the load."""
        # Plain decoding is always there to be had.
        plain, step = self._seconds(1), self._draft.seconds(1)
        token, usual = min(learnt.rounds / learnt.tokens, 1.0) * plain, learnt.usual
        if self._thresholds is None or not self._thresholds.hold(token, usual, step, self._seconds):
            costs = [self._seconds(n + 1) for n in range(self.most + 1)]
            self._thresholds = _Thresholds(token, usual, costs, step)


def log_odds(probability: float) -> float:
    """Return log(p / (1 - p)), cut where certainties are as good as alike."""
    if probability <= 0.0:
        return -_SURE
    if probability >= 1.0:
        return _SURE
    return max(-_SURE, min(_SURE, math.log(probability / (1.0 - probability))))


# == Tree size by optimal stopping: of a draft's nodes, those that pay are verified ================
#
# A round that verifies n nodes takes D(d) + T(n + 1) seconds, D the drafter's for d depths, and
# yields 1 + sum c tokens, c the chance of each node that it and all nodes above it are accepted.
# With s the seconds that a token takes at the best choice (see above), a round maximises
#
#     s sum c - T(n + 1)
#
# over n, the n nodes of the highest chances: a node's chance is less than its parent's, so they are
# a tree (EAGLE-2 reranks by the drafter's own probabilities, Li et al. 2024, section 4.2; here they
# are calibrated by what was accepted lately, and their number is chosen).
#
# How deep the drafter is asked has to be said before anything is known of the round: as deep as was
# worth most lately, less D. Each draft tells what all smaller depths would have been worth, and
# nothing of larger ones: those are hoped for again little by little, and so are tried again. Where
# no depth was worth its D the drafter is not asked, and asked again some rounds later; and it rests
# while rounds in which it was asked lost all that they may lose against plain decoding (`Account`).
#
# Choosing nodes by their probability is exact for point masses only.


_USUAL_CHILD = 0.75  # the chance of the best child of a node, where nothing is known
_TREE_PRIOR_TOKENS, _PRIOR_ROUNDS, _MOST_ROUNDS = 6.0, 4.0, 20.0
_TREE_ROUNDS = 0.98  # memory of tokens and seconds
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
        chances = [_USUAL_CHILD**depth for depth in range(1, most + 1)]
        tokens, best = 1.0, 1.0
        for n, chance in enumerate(chances, 1):
            tokens += chance
            deep = min(n, self._depth)
            best = min(best, (self._draft.seconds(deep) + self._seconds(n + 1)) / tokens / plain)
        # All of it in plain rounds: what one takes in seconds is learnt, too.
        self._tokens, self._spent = _TREE_PRIOR_TOKENS, _TREE_PRIOR_TOKENS * best
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
        self._tokens = _TREE_ROUNDS * self._tokens + accepted + 1
        self._spent = _TREE_ROUNDS * self._spent + spent
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
