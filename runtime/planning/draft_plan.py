"""How much a round drafts, by optimal stopping: one plan for chains and trees."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specrun.runtime.planning.acceptance import AcceptanceOdds, log_odds
from specrun.runtime.planning.account import Account
from specrun.runtime.planning.curves import DraftCost
from specrun.runtime.round.drafter import RoundOutcome
from specrun.runtime.trees.tree import ROOT, DraftTree

# A round that drafts d depths and verifies n nodes takes D(d) + T(n + 1) seconds, D the drafter's
# own and T the target's. It yields 1 + sum c tokens, c the chance of a node that it and all nodes
# above it are accepted. Rounds follow each other, so tokens a second over all of them count. They
# are most where every round maximises
#
#     s sum c - T(n + 1) - D(d)
#
# with s the seconds that a token takes at that maximum (the renewal theorem; the iteration
# s <- seconds / tokens is Dinkelbach's). A chance is a logistic function of the drafter's certainty
# (`AcceptanceOdds`); s follows the last rounds.
#
# **Nodes that are known** (`best`). A node's chance is less than its parent's, so the n nodes of
# the highest chances are a tree, and of a chain they are its beginning. EAGLE-2 reranks by the
# drafter's own probabilities (Li et al. 2024, section 4.2). Here they are calibrated by recent
# acceptance, and their number is chosen. To choose nodes by their probability is exact for
# point masses only.
#
# **A chain, one token after the other** (`start`, `goes_on`, `takes`). With n tokens drafted,
# reached with the chance r_n, the same rule adds another one if for some k >= 1
#
#     s r_n (a + a a_1 + .. + a a_1 .. a_(k-1)) > T(n + 1 + k) - T(n + 1) + (k - 1) d
#
# where d is a step of D, a the chance of the next token, and a_j = m + c^j (a - m) that of those
# whose distributions are not known yet: like this one at first and usual, m, further on, for
# certain tokens come in runs. Steps of T require a look k tokens ahead, because they make the
# second token after them cheap. Before the drafter computes its next distribution, a is expected
# from the last one, and pays for d too. If that is too little for the first token, a drafter makes
# proposals now and then all the same (`_Learnt.hopes`). Only distributions of tokens not drawn yet
# and earlier rounds are read, so drafts stay exact. T and d may be learnt by the clock if tokens
# are chosen, for such drafts change no text. Lengths of drawn drafts decide which text a seed
# gives. So they depend on this answer and on costs that were known before it: not on the clock, on
# other conversations or on earlier answers. Their account and their hope follow the same rules as
# those of chosen tokens, but begin anew with each answer.
#
# **Depths that are computed at once** (`depth_to_ask`). How deep has to be decided before anything
# is known of the round. A chain is to have as many tokens as would be computed one after the
# other if all were usual. A tree is to have as many depths as were worth most lately, less D.
# Each of its drafts shows the worth of all smaller depths and nothing of larger ones. For those the
# prior returns little by little, so they are tried again. If no depth was worth its D nothing is
# drafted, until the prior is back.
#
# A drafter whose certainty has to be computed to be known may lose time however well drafts end.
# An `Account` holds the loss of rounds with drafts against plain decoding. While nothing more may
# be lost, nothing is drafted.


MOST_DRAFTED = 15
"""Tokens of a draft at most: with the root 16, the last size at which batches are still cheap."""

_USUAL = 0.75  # the chance of a token or of a node's best child, if nothing is known
_SLOPE_POINTS, _SLOPE_DRAWN = 1.0, 0.5
_ROUNDS = 0.98  # memory of tokens and seconds
_PRIOR_TOKENS, _PRIOR_CHANCES, _MOST_CHANCES = 6.0, 10.0, 90.0
_PRIOR_DRAFTS, _MOST_DRAFTS = 4.0, 20.0
_RECOVERY, _PATIENCE = 0.03, 0.8  # of the way back to the prior, in a round without a draft
_DEEPER = 0.005  # the same, of the depths below a draft
_TRIED = 1.5  # the least hope of an untried depth, over its time
_ALIKE = 0.8  # how far from the usual chance the next token's is, as a share of how far this one's
_LONGEST_WAIT = 64  # rounds
_DRAWN_WAIT = 16  # rounds until drawn tokens are hoped for: the account of each answer begins anew
_STALE = 0.02  # change of s or m from which thresholds are worked out again


@dataclass(slots=True)
class _Learnt:
    """The counts of earlier rounds for one kind of drafts, chosen tokens or drawn ones."""

    odds: AcceptanceOdds
    tokens: float
    rounds: float
    """Their time, in rounds of plain decoding."""
    prior: list[float]
    worth: list[float]
    """The gain of each depth of a tree, in plain rounds, before any draft and lately."""
    drafts: float = _PRIOR_DRAFTS  # how many the worth is the mean of
    account: Account = field(default_factory=lambda: Account())
    usual: float = _USUAL
    chances: float = _PRIOR_CHANCES  # how many the usual one is the mean of
    recovery: float = _RECOVERY
    idle: bool = False  # nothing was tried in the round before
    wait: int = 1  # rounds in which a chain has no token, until it drafts in hope
    waited: int = 1

    def expect(self, chance: float) -> None:
        """Count a chance as usual as any of the last ones."""
        self.chances = min(self.chances + 1.0, _MOST_CHANCES)
        self.usual += (chance - self.usual) / self.chances

    def learn_worth(self, worth: Sequence[float]) -> None:
        """Count a draft of a tree that was worth so much down to each of its depths."""
        self.drafts = min(self.drafts + 1.0, _MOST_DRAFTS)
        above = 0.0
        for index, rounds in enumerate(worth):
            added, above = rounds - above, rounds
            self.worth[index] += (added - self.worth[index]) / self.drafts

    def hopes(self, cost: float) -> bool:
        """Return whether to compute a distribution although a usual one does not pay.

        A drafter that is better than most pays where the usual one does not, and its certainty
        shows it. After rounds that drafted nothing, the wait is twice as long.
        """
        return self.waited >= self.wait and self.account.room > cost

    def hoped(self, *, in_vain: bool) -> None:
        """Note whether a distribution was computed in vain."""
        self.waited, self.wait = 1, min(2 * self.wait, _LONGEST_WAIT) if in_vain else 1

    def end_round(self, *, idle: bool, accepted: int) -> None:
        """Forget a little in an idle round, so that drafts are tried again some day.

        If they were tried in vain, less: drafts that never pay cost less and less.
        """
        if idle:
            self.odds.recover(self.recovery)
            self.usual += self.recovery * (_USUAL - self.usual)
            self.chances += self.recovery * (_PRIOR_CHANCES - self.chances)
        elif self.idle:
            change = 1.0 / _PATIENCE if accepted else _PATIENCE
            self.recovery = min(_RECOVERY, self.recovery * change)
        self.idle = idle


class _Thresholds:
    """The least r_n at which a chain goes on, if a token is worth `token` seconds and `usual` m.

    The first distribution costs `step`, another one `further`: as much, or nothing in a block.
    They depend on the chance of the last distribution that was seen, in whole log-odds (`level`,
    None before the first). Each is worked out when it is first needed.
    """

    def __init__(
        self, token: float, usual: float, costs: Sequence[float], step: float, further: float
    ) -> None:
        self.token, self.usual = token, usual
        self._costs, self._step, self._further = costs, step, further
        self._known: dict[tuple[int, int | None, bool], float] = {}

    def hold(
        self, token: float, usual: float, step: float, seconds: Callable[[int], float]
    ) -> bool:
        """Return whether they are near enough to those of these values."""
        pairs = [(token, self.token), (usual, self.usual), (step, self._step)]
        # A curve that is learnt bends: its ends and its middle suffice.
        last = len(self._costs) - 1
        pairs += [(seconds(n + 1), self._costs[n]) for n in (0, 1, last // 2, last)]
        return all(abs(now - was) <= _STALE * was for now, was in pairs)

    def to_ask(self, n: int, level: int | None) -> float:
        """Return the least r_n at which the drafter computes another distribution."""
        return self._least(n, level, asks=True)

    def to_take(self, n: int, level: int) -> float:
        """Return the least r_n a at which the token of a known distribution is drafted."""
        return self._least(n, level, asks=False)

    def _least(self, n: int, level: int | None, *, asks: bool) -> float:
        if (known := self._known.get((n, level, asks))) is not None:
            return known
        ahead = 0.0 if level is None else 1.0 / (1.0 + math.exp(-level)) - self.usual
        least, yielded, share = math.inf, 0.0, 1.0
        here, spent = self._costs[n], 0.0
        if asks:  # the next distribution, too, is only expected, and costs a step
            ahead *= _ALIKE
            share, spent = self.usual + ahead, self._further if n else self._step
        for costs in self._costs[n + 1 :]:
            yielded += share
            least = min(least, (costs - here + spent) / (self.token * yielded))
            ahead *= _ALIKE
            share *= self.usual + ahead
            spent += self._further
        self._known[n, level, asks] = least
        return least


class Plan(ABC):
    """How much of a draft is computed and verified.

    It receives rounds and reads certainties before tokens are drawn, so that drafts stay exact.
    """

    is_threshold: bool = False
    """Whether each token's certainty decides alone, however little another token costs."""

    @abstractmethod
    def begin(self, *, alike: bool = False) -> None:
        """Start an answer; `alike`: as any other, whatever earlier ones taught."""

    def depth_to_ask(self) -> int | None:
        """Start a round of chosen tokens; return how many depths to compute at once, None: all."""
        return None

    def best(self, values: Sequence[float], parents: Sequence[int], most: int) -> list[int]:
        """Return the nodes to keep, rising, at most `most`; parents come before their children."""
        return list(range(min(most, len(values))))

    @abstractmethod
    def start(self, *, points: bool, greedy: bool = False) -> None:
        """Start a round that drafts chosen tokens (`points`) or drawn ones in turn."""

    def goes_on(self) -> bool:
        """Return whether the drafter computes another distribution."""
        return True

    @abstractmethod
    def takes(self, certainty: float) -> bool:
        """Return whether a token is drafted whose distribution has this greatest probability."""

    @abstractmethod
    def drafted(self, tree: DraftTree) -> DraftTree:
        """Note the tree of the nodes that were kept or taken, in their order; return it."""

    @abstractmethod
    def observe(self, outcome: RoundOutcome) -> None:
        """End the round: learn which nodes were accepted."""


class DraftPlan(Plan):
    """Chooses by costs how much of a draft is computed and verified. `seconds` is T, `draft` D.

    A draft has at most `most` nodes. It is a chain, or a tree of at most `depth` depths (1: all of
    them cost as much as one). `drawn` are T and D of drawn tokens, if those of chosen ones are
    learnt by the clock.

    A round of point masses whose depths are computed at once begins with `depth_to_ask`, and `best`
    chooses its nodes. Otherwise it begins with `start`: each token needs `goes_on` before its
    distribution is computed, and `takes` before it is drafted. Either way `drafted` notes the tree,
    and `observe` ends the round.
    """

    def __init__(
        self,
        seconds: Callable[[int], float],
        draft: DraftCost,
        most: int = MOST_DRAFTED,
        *,
        depth: int | None = None,
        drawn: tuple[Callable[[int], float], DraftCost] | None = None,
    ) -> None:
        self.most, self._depth = most, depth
        self._seconds, self._draft = seconds, draft
        self._costs = {True: (seconds, draft), False: drawn or (seconds, draft)}
        self._learnt: dict[bool, _Learnt] = {}
        self._thresholds: _Thresholds | None = None
        self._now: _Learnt | None = None  # of the round under way
        self._rests = False
        self._hopes = False  # the round drafted although a usual token does not pay
        self._asked = 0
        self._tree = DraftTree()
        self._certainties: list[float] = []  # of the nodes drafted, as log-odds
        self._reached = 1.0  # the chance of a chain's last token
        self._level: int | None = None  # its own, in log-odds

    def begin(self, *, alike: bool = False) -> None:
        """Start an answer: the counts of chosen tokens stay, unless all begin `alike`."""
        self._learnt.pop(False, None)
        if alike:
            self._learnt.clear()
        self._now = self._thresholds = None  # the last may be near enough to be kept, not equal
        for learnt in self._learnt.values():
            learnt.recovery = _RECOVERY  # another text: it may pay here

    # -- depths at once ----------------------------------------------------------------------------

    def depth_to_ask(self) -> int:
        """Start a round of chosen tokens; return how many depths to compute at once, 0: none."""
        learnt = self._start(points=True)
        if not self._rests:
            deepest = self._deepest_that_pays if self._depth else self._usual_length
            self._asked = deepest(learnt)
        if self._asked:
            self._draft.start()
        return self._asked

    def _usual_length(self, learnt: _Learnt) -> int:
        """Return how many tokens a chain would have if all were usual."""
        thresholds, n, reached = self._known_thresholds(learnt), 0, 1.0
        while n < self.most and reached > thresholds.to_ask(n, None):
            n, reached = n + 1, reached * learnt.usual
        # Even numbers: each needs a graph of its own.
        return min(n + n % 2, self.most)

    def _deepest_that_pays(self, learnt: _Learnt) -> int:
        """Return the depth with the highest recent gain, less its time; 0 if none gained."""
        plain = self._seconds(1)
        worth, most, best = 0.0, 0.0, 0
        for depth, added in enumerate(learnt.worth, 1):
            worth += added
            left = worth - self._draft.seconds(depth) / plain
            if left > most:
                most, best = left, depth
        return best

    def best(self, values: Sequence[float], parents: Sequence[int], most: int) -> list[int]:
        """Return the nodes to keep, rising, at most `most`; parents come before their children.

        `values` are products of the drafter's probabilities along the nodes' paths.
        """
        learnt = self._now or self._start(points=True)
        chances: list[float] = []
        certainties: list[float] = []
        depths: list[int] = []
        odds = learnt.odds
        for value, parent in zip(values, parents, strict=True):
            if parent == ROOT:
                above, reached, depth = 1.0, 1.0, 1
            else:
                above, reached, depth = values[parent], chances[parent], depths[parent] + 1
            x = log_odds(min(1.0, value / above) if above > 0.0 else 0.0)
            certainties.append(x)
            chances.append(reached * odds.chance(x))
            depths.append(depth)
        # Among equals the earlier: a parent comes before its child.
        order = sorted(range(len(chances)), key=chances.__getitem__, reverse=True)
        plain, token = self._seconds(1), self._token(learnt)
        takes = [self._seconds(n + 1) - plain for n in range(1, min(most, self.most) + 1)]
        count, surplus = _best_count([chances[node] for node in order], token, takes)
        if self._depth is None:
            for x in certainties[: count + 1]:
                learnt.expect(odds.chance(x))
        else:
            worth = [
                _best_count([chances[i] for i in order if depths[i] <= depth], token, takes)[1]
                for depth in range(1, self._asked)
            ]
            learnt.learn_worth([seconds / plain for seconds in (*worth, surplus)])
            self._hope(learnt, len(worth) + 1, _DEEPER)
        kept = sorted(order[:count])
        self._certainties = [certainties[node] for node in kept]
        return kept

    def _hope(self, learnt: _Learnt, first: int, share: float) -> None:
        """Go back this share of the way to the prior of the depths from `first` on."""
        worth = learnt.worth
        for index in range(first, len(worth)):
            worth[index] += share * (self._hoped(learnt.prior, index) - worth[index])

    def _hoped(self, prior: Sequence[float], index: int) -> float:
        """Return the expected gain of a depth, counted from 0, in plain rounds.

        A drafter that is better than most pays where the usual one does not: it is tried.
        """
        before = self._draft.seconds(index) if index else 0.0
        takes = (self._draft.seconds(index + 1) - before) / self._seconds(1)
        return max(prior[index], _TRIED * takes)

    # -- one token after the other -----------------------------------------------------------------

    def start(self, *, points: bool, greedy: bool = False) -> None:
        """Start a round that drafts chosen tokens (`points`) or drawn ones in turn."""
        self._thresholds = self._known_thresholds(self._start(points=points))
        self._draft.start()

    def _known_thresholds(self, learnt: _Learnt) -> _Thresholds:
        """Return thresholds for the present worth of a token; T may change with the load."""
        token, usual, step = self._token(learnt), learnt.usual, self._draft.seconds(1)
        known = self._thresholds
        if known is None or not known.hold(token, usual, step, self._seconds):
            costs = [self._seconds(n + 1) for n in range(self.most + 1)]
            further = 0.0 if self._depth == 1 else step
            known = self._thresholds = _Thresholds(token, usual, costs, step, further)
        return known

    def goes_on(self) -> bool:
        """Return whether the drafter computes another distribution."""
        assert self._thresholds is not None
        n = len(self._certainties)
        wanted = n < self.most and not self._rests
        asks = wanted and self._reached > self._thresholds.to_ask(n, self._level)
        if wanted and not asks and not n:
            assert self._now is not None
            self._hopes = asks = self._now.hopes(self._draft.seconds(1) / self._seconds(1))
        self._asked = min(self._asked + asks, self._depth or self.most)
        return asks

    def takes(self, certainty: float) -> bool:
        """Return whether a token is drafted whose distribution has this greatest probability."""
        learnt, n = self._now, len(self._certainties)
        assert learnt is not None
        assert self._thresholds is not None
        x = log_odds(certainty)
        chance, level = learnt.odds.chance(x), learnt.odds.level(x)
        learnt.expect(chance)
        if n >= self.most or self._reached * chance <= self._thresholds.to_take(n, level):
            return False
        self._certainties.append(x)
        self._reached *= chance
        self._level = level
        return True

    # -- either way --------------------------------------------------------------------------------

    def _start(self, *, points: bool) -> _Learnt:
        self._seconds, self._draft = self._costs[points]
        learnt = self._learnt.get(points)
        if learnt is None:
            learnt = self._learnt[points] = self._prior(points=points)
        self._now, self._tree, self._certainties = learnt, DraftTree(), []
        self._reached, self._level, self._asked = 1.0, None, 0
        self._rests = learnt.account.room <= 0.0
        self._hopes = False
        return learnt

    def _prior(self, *, points: bool) -> _Learnt:
        """Return the estimates before the first round: the best draft of a usual drafter."""
        most, depth, plain = self.most, self._depth, self._seconds(1)
        chances = [_USUAL**n for n in range(1, most + 1)]
        tokens, best = 1.0, 1.0
        for n, chance in enumerate(chances, 1):
            tokens += chance
            seconds = self._seconds(n + 1) + self._draft.seconds(min(n, depth or most))
            best = min(best, seconds / tokens / plain)
        odds = AcceptanceOdds(_SLOPE_POINTS if points else _SLOPE_DRAWN)
        takes = [self._seconds(n + 1) - plain for n in range(1, most + 1)]
        worth = [
            _best_count(chances[: most if deep == depth else deep], best * plain, takes)[1] / plain
            for deep in range((depth or 0) + 1)
        ]
        prior = [below - above for above, below in itertools.pairwise(worth)]
        hoped = [self._hoped(prior, index) for index in range(depth or 0)]
        learnt = _Learnt(odds, _PRIOR_TOKENS, _PRIOR_TOKENS * best, prior, hoped)
        learnt.wait = 1 if points else _DRAWN_WAIT
        return learnt

    def _token(self, learnt: _Learnt) -> float:
        """Return s, the seconds that a token is worth; plain decoding is always there to be had."""
        return min(learnt.rounds / learnt.tokens, 1.0) * self._seconds(1)

    def drafted(self, tree: DraftTree) -> DraftTree:
        """Note the tree of the nodes that were kept or taken, in their order; return it."""
        self._tree = tree
        self._draft.end(self._asked)
        return tree

    def observe(self, outcome: RoundOutcome) -> None:
        """End the round: learn which nodes were accepted."""
        learnt, drafted = self._now, len(self._tree)
        if learnt is None:  # nothing was to be drafted
            return
        start = outcome.start
        accepted = self._learn(learnt, outcome.tokens[start : start + len(outcome.path)])
        seconds = self._seconds(drafted + 1)
        if self._asked:
            seconds += self._draft.seconds(self._asked)
        rounds = seconds / self._seconds(1)
        learnt.account.allow(accepted + 1)
        if self._hopes:
            learnt.hoped(in_vain=not drafted)
        else:
            learnt.waited += 1
        if self._rests:  # nothing is learnt, nor forgotten
            learnt.idle = True
        else:
            learnt.account.lose(rounds - (accepted + 1))
            # Of a tree that was computed in vain its worth was learnt; of a chain nothing.
            tried = drafted if self._depth is None else self._asked
            learnt.end_round(idle=not tried, accepted=accepted)
            if not self._asked:
                self._hope(learnt, 0, learnt.recovery)
                learnt.drafts += learnt.recovery * (_PRIOR_DRAFTS - learnt.drafts)
        learnt.tokens = _ROUNDS * learnt.tokens + accepted + 1
        learnt.rounds = _ROUNDS * learnt.rounds + rounds
        self._now = None

    def _learn(self, learnt: _Learnt, tokens: Sequence[int]) -> int:
        """Learn from the children of every node that was reached; return how many were."""
        tree, node, accepted = self._tree, ROOT, 0
        children: dict[int, list[int]] = {}
        for child, parent in enumerate(tree.parents):
            children.setdefault(parent, []).append(child)
        # Behind the last node that was accepted all children were refused. The path may be that of
        # another drafter of an ensemble.
        for token in (*tokens, None):
            below = children.get(node, ())
            chosen = next((child for child in below if tree.tokens[child] == token), None)
            for child in below:
                learnt.odds.learn(self._certainties[child], child == chosen)
            if chosen is None:
                break
            node, accepted = chosen, accepted + 1
        return accepted


def _best_count(
    chances: Sequence[float], token: float, takes: Sequence[float]
) -> tuple[int, float]:
    """Return how many of these nodes, falling, to verify, and its worth in seconds."""
    best, most, worth = 0, 0.0, 0.0
    for n, (chance, seconds) in enumerate(zip(chances, takes, strict=False), 1):
        worth += token * chance
        if worth - seconds > most:
            best, most = n, worth - seconds
    return best, most
