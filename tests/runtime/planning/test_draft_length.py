"""Draft length by optimal stopping: exact by enumeration, by the formula, and what it gains."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import pytest
from support.enumeration import TOLERANCE, drafter_bias, law_with_drafter
from support.scripted import LawTable, law_of
from support.simulated_machine import draft_cost, end_chain
from support.tree_laws import drawn_chain

from specrun.runtime.acceptance import build_rule
from specrun.runtime.laws import Law
from specrun.runtime.planning import CostCurve, DraftPlan, LiveCurve
from specrun.runtime.planning.acceptance import AcceptanceOdds, log_odds
from specrun.runtime.planning.curves import DraftCost
from specrun.runtime.round import Drafter, DraftRequest
from specrun.runtime.round.drafter import RoundOutcome
from specrun.runtime.trees import DraftTree

# So steep that some tokens of the tables pay and others do not.
STEEP = CostCurve.flat([1.0, 1.45, 1.9, 2.3, 3.0])
STEPS = CostCurve.flat([1.0, 1.6, 1.62, 1.64, 2.4, 2.42, 2.44, 2.46, 4.0])


class StoppedChain(Drafter):
    """The shipped chain and the shipped stop over a table of laws."""

    name = "chain"

    def __init__(self, drafts: LawTable, *, looks_at_the_draw: bool = False) -> None:
        self._drafts, self._wrong = drafts, looks_at_the_draw
        self.length = DraftPlan(STEEP.seconds, draft_cost(0.02), 3)
        self.lengths: list[int] = []

    def propose(self, request: DraftRequest) -> DraftTree:
        self.length.start(points=False)

        def law_after(drafted: list[int]) -> Law:
            return law_of(self._drafts([*request.tokens, *drafted]))

        if not self._wrong:
            tree = drawn_chain(law_after, request, min(3, request.max_depth), self.length)
        else:
            # The mistake: whether a token is drafted hangs on the probability of the drawn token.
            tokens: list[int] = []
            laws: list[Law] = []
            while len(tokens) < min(3, request.max_depth) and self.length.goes_on():
                law = law_after(tokens)
                token = request.noise.choose(law)
                if not self.length.takes(law.probability(token)):
                    break
                tokens.append(token)
                laws.append(law)
            tree = DraftTree.chain(tokens, laws)
        self.lengths.append(len(tree))
        return self.length.drafted(tree)

    def observe(self, outcome: RoundOutcome) -> None:
        self.length.observe(outcome)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("rule", ["exact", "token", "kseq"])
def test_stopping_by_laws_and_earlier_rounds_is_exact(rule: str, seed: int) -> None:
    """The joint rule of blocks holds, too: what is kept of a chain does not hang on where it ends,
    as long as that was settled before the draws that are left out."""
    table, drafts = LawTable(3, seed), LawTable(3, seed + 500)
    assert drafter_bias(build_rule(rule), lambda: StoppedChain(drafts), table, 4) < TOLERANCE


@pytest.mark.parametrize("rule", ["exact", "token"])
def test_a_stop_that_looks_at_the_draw_is_biased(rule: str) -> None:
    def make(seed: int) -> Callable[[], Drafter]:
        return lambda: StoppedChain(LawTable(3, seed + 500), looks_at_the_draw=True)

    assert any(
        drafter_bias(build_rule(rule), make(seed), LawTable(3, seed), 4) > 1e-2 for seed in range(5)
    )


def test_the_lengths_of_these_chains_differ() -> None:
    """Otherwise the two tests above would be about chains of a fixed length."""
    firsts: list[set[int]] = []
    for seed in range(5):
        made: list[StoppedChain] = []

        def make(seed: int = seed, made: list[StoppedChain] = made) -> Drafter:
            made.append(StoppedChain(LawTable(3, seed + 500)))
            return made[-1]

        # With four tokens to come a chain of 3 fits: shorter ones were stopped.
        law_with_drafter(build_rule("exact"), make, LawTable(3, seed), 4)
        firsts.append({drafter.lengths[0] for drafter in made})
    assert set().union(*firsts) >= {1, 2, 3}
    # In one answer, by the tokens that were drawn above.
    assert any(len(lengths) > 1 for lengths in firsts)


# -- the rule --------------------------------------------------------------------------------------


def lengths_for(length: DraftPlan, certainties: list[float]) -> int:
    """Return how many tokens of a chain with these certainties are drafted."""
    length.start(points=True)
    drafted = 0
    while drafted < len(certainties) and length.goes_on() and length.takes(certainties[drafted]):
        drafted += 1
    return drafted


@pytest.mark.parametrize("curve", [STEEP, STEPS], ids=["steep", "steps"])
@pytest.mark.parametrize("token", [0.5, 0.8])
@pytest.mark.parametrize("usual", [0.3, 0.7, 0.9])
def test_thresholds_are_those_of_the_formula(curve: CostCurve, token: float, usual: float) -> None:
    """At every length: drafted exactly where some number of further tokens is worth its cost, if
    they are as good as the last one at first and as usual further on."""
    step, most = 0.03, 8
    length = DraftPlan(curve.seconds, draft_cost(step), most)
    length.start(points=True)
    learnt = length._learnt[True]
    learnt.usual, learnt.tokens, learnt.rounds = usual, 1.0, token
    length._thresholds = None
    length.start(points=True)
    known = length._thresholds
    assert known is not None
    for n, level in itertools.product(range(most), (None, -2, 0, 4)):
        last = usual if level is None else 1.0 / (1.0 + math.exp(-level))
        # The chances of what may come after a token of the chance `last`.
        after = [usual + 0.8**place * (last - usual) for place in range(1, most + 1)]
        for reach in (0.053, 0.21, 0.41, 0.61, 0.83, 0.99):
            extra = [
                curve.seconds(n + 1 + k) - curve.seconds(n + 1) for k in range(1, most - n + 1)
            ]
            asked = [
                token * reach * sum(math.prod(after[: j + 1]) for j in range(k)) - cost - k * step
                for k, cost in enumerate(extra, 1)
            ]
            assert (reach > known.to_ask(n, level)) == (max(asked) > 0.0)
            if level is None:
                continue
            taken = [
                token * reach * sum(math.prod(after[:j]) for j in range(k)) - cost - (k - 1) * step
                for k, cost in enumerate(extra, 1)
            ]
            assert (reach > known.to_take(n, level)) == (max(taken) > 0.0)


def test_the_odds_follow_what_was_accepted() -> None:
    """Newton's steps find a logistic law: slope 1.5 and bias -1, of 4,000 observations."""
    random_, odds = random.Random(1), AcceptanceOdds(0.5)
    for _ in range(4000):
        x = random_.uniform(-3.0, 3.0)
        odds.learn(x, random_.random() < 1.0 / (1.0 + math.exp(1.0 - 1.5 * x)))
    # They look back about 50 observations, so they are near it and no nearer.
    for x in (-2.0, 0.0, 2.0):
        assert odds.chance(x) == pytest.approx(1.0 / (1.0 + math.exp(1.0 - 1.5 * x)), abs=0.15)


def test_certainties_of_nothing_and_of_all_have_odds() -> None:
    assert log_odds(0.0) == -log_odds(1.0) < log_odds(0.25) == -log_odds(0.75)
    assert log_odds(0.5) == 0.0


def test_drawn_drafts_begin_alike_in_every_answer_and_chosen_ones_go_on() -> None:
    """Lengths of drawn drafts decide which text comes; a seed must give it again."""
    length = DraftPlan(STEEP.seconds, draft_cost(0.01), 4)
    length.begin()
    fresh = [lengths_for(DraftPlan(STEEP.seconds, draft_cost(0.01), 4), [0.6] * 4), 0]

    def drawn() -> int:
        length.start(points=False)
        count = 0
        while count < 4 and length.goes_on() and length.takes(0.6):
            count += 1
        return count

    first = drawn()
    for _ in range(40):
        end_chain(length, lengths_for(length, [0.6] * 4), 0)
        end_chain(length, drawn(), 0)
    assert drawn() < first
    assert lengths_for(length, [0.6] * 4) < fresh[0]
    length.begin()
    assert drawn() == first
    assert lengths_for(length, [0.6] * 4) < fresh[0]


# -- what it gains ---------------------------------------------------------------------------------


def speed(curve: CostCurve, chances: list[list[float]], lengths: Callable[[int], int]) -> float:
    """Return the expected tokens a second of rounds whose tokens are accepted with `chances`."""
    tokens = seconds = 0.0
    for number, round_chances in enumerate(chances):
        n = lengths(number)
        tokens += 1.0 + sum(math.prod(round_chances[:i]) for i in range(1, n + 1))
        seconds += curve.seconds(n + 1) + 0.01 * n
    return tokens / seconds


def by_stopping(curve: CostCurve, chances: list[list[float]]) -> float:
    """Return the same where certainties are the chances."""
    random_, length = random.Random(2), DraftPlan(curve.seconds, draft_cost(0.01), 8)
    drafted = []
    for round_chances in chances:
        n = lengths_for(length, round_chances)
        came = list(itertools.takewhile(lambda p: random_.random() < p, round_chances[:n]))
        end_chain(length, n, len(came))
        drafted.append(n)
    return speed(curve, chances, drafted.__getitem__)


def texts(kinds: tuple[float, ...], rounds: int = 1500) -> list[list[float]]:
    random_ = random.Random(5)
    return [[random_.choice(kinds) for _ in range(8)] for _ in range(rounds)]


@pytest.mark.parametrize("curve", [STEEP, STEPS], ids=["steep", "steps"])
def test_it_beats_the_best_fixed_length_where_certainties_tell_tokens_apart(
    curve: CostCurve,
) -> None:
    chances = texts((0.99, 0.99, 0.15))
    best = max(speed(curve, chances, lambda _, n=n: n) for n in range(9))  # type: ignore[misc]
    assert by_stopping(curve, chances) > 1.1 * best


def test_a_drafter_that_became_good_is_used_again() -> None:
    chances = [[0.02] * 8] * 200 + [[0.98] * 8] * 400
    length = DraftPlan(STEEP.seconds, draft_cost(0.01), 8)
    random_, drafted = random.Random(3), []
    for round_chances in chances:
        drafted.append(lengths_for(length, [0.5] * 8))
        wanted = round_chances[: drafted[-1]]
        came = list(itertools.takewhile(lambda p: random_.random() < p, wanted))
        end_chain(length, drafted[-1], len(came))
    assert sum(drafted[100:200]) < 20
    assert min(drafted[-100:]) >= 3


def test_drawn_answers_begin_alike_whatever_the_last_one_left() -> None:
    """Thresholds of the last answer may be near enough not to be worked out again: a seed would
    then give another text."""
    used, fresh = (DraftPlan(STEPS.seconds, draft_cost(0.05), 6) for _ in range(2))
    rng = random.Random(47)  # after these rounds the last thresholds are such
    for _ in range(12):
        used.start(points=False)
        while used.goes_on() and used.takes(rng.choice((0.5, 0.7, 0.9))):
            pass
        drafted = len(used._certainties)
        end_chain(used, drafted, rng.randrange(drafted + 1))
    used.begin()
    for length in (used, fresh):
        length.start(points=False)
    ours, others = used._thresholds, fresh._thresholds
    assert ours is not None
    assert others is not None
    assert (ours.token, ours.usual, ours._costs) == (others.token, others.usual, others._costs)


def test_what_the_clock_teaches_of_chosen_tokens_changes_nothing_of_drawn_ones() -> None:
    """Of drawn tokens the length is part of which text comes of a seed."""
    live = LiveCurve(STEPS)
    told, untold = (
        DraftPlan(curve.seconds, draft_cost(0.05), 6, drawn=(STEPS.seconds, draft_cost(0.05)))
        for curve in (live, STEPS)
    )
    for _ in range(9):  # a batch of four takes as long as four of one
        for width, seconds in ((1, 1.0), (2, 2.0), (4, 4.0)):
            live.learn(width, seconds)
    for points, differs in ((False, False), (True, True)):
        lengths = []
        for length in (told, untold):
            length.start(points=points)
            while length.goes_on() and length.takes(0.9):
                pass
            lengths.append(len(length._certainties))
        assert (lengths[0] != lengths[1]) is differs


def drafted_after(many: int, takes: float, *, points: bool) -> list[int]:
    """The lengths of rounds whose tokens are computed one after the other and take so long each.

    A plan that reckons with .05 of a plain round for each reads the clock.
    """
    curve, now, found = CostCurve.flat([1.0 + 0.1 * n for n in range(16)]), 0.0, list[int]()

    def clock() -> float:
        return now

    costs = [DraftCost(lambda n: 0.05 * n, lambda: 1.0, given) for given in (clock, None)]
    plan = DraftPlan(curve.seconds, costs[0], drawn=(curve.seconds, costs[1]))
    for _ in range(many):
        plan.start(points=points)
        count = 0
        while plan.goes_on():
            now += takes
            if not plan.takes(0.8):
                break
            count += 1
        found.append(count)
        end_chain(plan, count, min(count, 2))
    return found


def test_the_clock_says_what_tokens_take_that_come_one_after_the_other() -> None:
    """Whatever computes them: a model a token, or a block for all. Drawn ones follow no clock."""
    as_reckoned, longer = (drafted_after(40, takes, points=True)[-9:] for takes in (0.05, 0.6))
    assert max(longer) < min(as_reckoned)
    drawn = [drafted_after(40, takes, points=False) for takes in (0.05, 0.6)]
    assert drawn[0] == drawn[1]
