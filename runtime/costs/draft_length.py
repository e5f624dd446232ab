"""Draft length by optimal stopping: one more token is drafted where it pays for its evaluation.

A round of n drafted tokens takes T(n + 1) + n d seconds, d the drafter's own for a token, and
yields 1 + r_1 + .. + r_n tokens, r_i the probability that the first i are accepted. Rounds follow
each other, so what counts is tokens a second over all of them; that is greatest where every round
maximises its tokens times s less its seconds, s being the seconds that a token takes at that
maximum (the renewal theorem; the iteration s <- seconds / tokens is Dinkelbach's). So with n
tokens drafted another is, if for some k >= 1

    s r_n (a + a a_1 + .. + a a_1 .. a_(k-1)) > T(n + 1 + k) - T(n + 1) + (k - 1) d

where a is the chance of the next token, given those before it, and a_j = m + c^j (a - m) that of
those whose laws are not known yet: as good as this one at first, and as usual, m, further on, for
tokens that are certain come in runs. Looking k tokens ahead is what steps of T ask for, which make
the second token after them cheap. Before the drafter is asked for its next law, a is what the last
one lets expect, and pays for d too.

The chance is a logistic function of the drafter's certainty, the greatest probability of its law
before the draw. Two numbers fit it to what was accepted lately, by Newton's steps; s and m follow
the last rounds too. Nothing is read but laws of tokens not drawn yet and earlier rounds, so drafts
stay exact. T and d may be learnt by the clock where tokens are chosen, for such drafts change no
text; of drawn ones the same text and costs lead to the same lengths.

A drafter whose certainty must be asked for to be known may lose by being asked, however well chains
end. What rounds in which it was asked lost against plain decoding is booked (`Account`); while
nothing more may be lost, it rests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specrun.runtime.costs.account import LOST_ANEW, Account, account_of_model
from specrun.runtime.costs.live_curve import DraftCost
from specrun.runtime.drafter import RoundOutcome
from specrun.runtime.text import common_prefix

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
