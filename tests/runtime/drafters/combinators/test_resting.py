"""`auto` rests where its own choosing takes more than a token allows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from support.scripted import PLAIN, outcome_of

from specrun.runtime.drafters.combinators import ArmForecast, AutoDrafter, ChoiceLog
from specrun.runtime.laws import SeededNoise
from specrun.runtime.planning import SHARE, SHARES_OF_AUTO, START, Account
from specrun.runtime.round import Drafter, DraftRequest, NoDrafter
from specrun.runtime.round.drafter import NOTHING, RoundOutcome
from specrun.runtime.trees import DraftTree

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


class Machine:
    """Its clock goes on by what is done: a plain round takes 1 second, being asked `own`."""

    def __init__(self, own: float) -> None:
        self.now, self.own, self.n_called = 0.0, own, 0
        self.member: Ponders

    def __call__(self) -> float:
        return self.now


class Ponders(Drafter):
    """Takes its time to say what it promises, and that only from token `from_on` to `until`."""

    def __init__(
        self,
        machine: Machine,
        from_on: int = 10**9,
        until: int = 10**9,
        *,
        finds_text: bool = True,
    ) -> None:
        self.name, self.max_nodes = "ponders", 4
        self.n_heard, self.n_asked = 0, 0
        self.finds_text, self._machine = finds_text, machine
        self._from, self._until = from_on, until

    def forecast(self, request: DraftRequest) -> float:
        self._machine.now += self._machine.own
        self.n_asked += 1
        return 2.0 if self._from <= len(request.tokens) < self._until else 1.0

    def propose(self, request: DraftRequest) -> DraftTree:
        if len(request.tokens) >= self._until:
            self._machine.now += self._machine.own
            return DraftTree()
        return DraftTree.chain([1] * min(4, request.max_depth, request.max_nodes))

    def observe(self, outcome: RoundOutcome) -> None:
        self.n_heard += 1


def ponder(auto: AutoDrafter, machine: Machine, rounds: int, *, heeds: bool = True) -> list[int]:
    """Play a text's rounds, in which whatever is drafted is accepted; return nodes drafted.

    Who `heeds` pauses does not ask in them."""
    tokens, drafted = list(PROMPT), list[int]()
    if not auto._replay:  # to forget is to begin, too, and would take a log
        auto.begin(())
    auto.begin(tokens)
    for _ in range(rounds):
        asked = not (heeds and auto.pause.rounds)
        if not asked:
            auto.pause.rounds -= 1
        request = DraftRequest(tokens, PLAIN, SeededNoise(0), 9, 9)
        tree = auto.propose(request) if asked else NOTHING
        machine.n_called += asked
        machine.now += 1.0
        tokens += [*tree.tokens, 2]
        drafted.append(len(tree))
        if asked:
            auto.observe(outcome_of(tokens, tree, tuple(range(len(tree))), 2))
    return drafted


def pondering(
    own: float, *, replay: Sequence[ChoiceLog] = (), draft: float = 1000.0, **options: Any
) -> tuple[AutoDrafter, Machine]:
    machine = Machine(own)
    # Probed it is not: an arm that costs a thousand rounds.
    forecasts = [ArmForecast(most=4, draft=draft), ArmForecast()]
    machine.member = Ponders(machine, **options)
    members = [machine.member, NoDrafter()]
    return AutoDrafter(members, clock=machine, forecasts=forecasts, replay=replay), machine


AWAKE = 2  # rounds: the first of all, which is not booked, and the last before a rest


@pytest.mark.parametrize("length", [12, 400])
@pytest.mark.parametrize("own", [0.04, 0.2, 2.0])
@pytest.mark.parametrize("heeds", [True, False])
def test_where_choosing_takes_more_than_a_token_allows_it_rests(
    own: float, length: int, heeds: bool
) -> None:
    """Whatever it takes, and however short the texts are: a share of a token, and what may be lost
    at first."""
    auto, machine = pondering(own)
    for _ in range(1200 // length):
        assert not any(ponder(auto, machine, length, heeds=heeds))
        report = auto.report()
        assert sum(arm["rounds"] for arm in report["arms"]) == length
        assert sum(arm["tokens"] for arm in report["arms"]) == length
        assert sum(rounds for _, rounds in report["choices"]) == length
        assert report["arms"][1]["tokens_per_second"] == pytest.approx(1.0, rel=0.2 + own)
    assert machine.now <= 1200 * (1.0 + SHARES_OF_AUTO * SHARE) + START + AWAKE * own
    if own >= 0.2:  # rests are long
        assert machine.n_called < 1200 / 3 if heeds else machine.n_called == 1200


@pytest.mark.parametrize("own", [0.04, 0.2])
def test_probes_that_find_nothing_take_no_more_than_choosing_may(own: float) -> None:
    """A member that is tried again and again, and has nothing to say whenever it is."""
    auto, machine = pondering(own, until=0, draft=0.0)
    for _ in range(30):
        assert not any(ponder(auto, machine, 40))
    assert machine.member.n_heard > 4  # it was tried
    # Of a probe, which is not broken off by a rest, four rounds may come on top.
    assert machine.now <= 1200 * (1.0 + SHARES_OF_AUTO * SHARE) + START + (AWAKE + 4) * own


def test_without_booking_it_short_texts_lose_a_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: an `auto` that does not count what choosing takes breaks that bound."""
    monkeypatch.setattr(Account, "asking", lambda _self, _seconds, _plain: 0.0)
    auto, machine = pondering(0.2)
    for _ in range(100):
        ponder(auto, machine, 12)
    assert machine.now > 1200 * 1.1


def test_where_choosing_takes_little_it_never_rests() -> None:
    auto, machine = pondering(0.009)
    ponder(auto, machine, 400)
    assert machine.member.n_asked > 180  # in every second round in the end


def test_what_begins_to_promise_is_noticed_after_a_rest() -> None:
    auto, machine = pondering(0.2, from_on=len(PROMPT) + 300)
    drafted = ponder(auto, machine, 450)
    assert not any(drafted[:300])
    assert sum(drafted[300:]) > 200
    # What it won it may lose again: it goes on without rests.
    assert sum(map(bool, drafted[-50:])) == 50


def test_choosing_loses_no_more_than_drafting_had_saved() -> None:
    """Ten drafts save forty rounds, of which eight may be lost again, in whatever text."""
    start = len(PROMPT) + 1
    auto, machine = pondering(0.2, from_on=start, until=start + 50)
    assert sum(ponder(auto, machine, 20)) >= 40
    began, n_asked = machine.now, machine.member.n_asked
    machine.member._from = 10**9
    for _ in range(100):
        assert not any(ponder(auto, machine, 12))
    # The tokens of that text allow something, too: what may be saved up so are 2 rounds.
    assert machine.now - began <= 1200 * (1.0 + SHARES_OF_AUTO * SHARE) + START + 8.0 + AWAKE * 0.2
    assert machine.member.n_asked - n_asked >= 30  # it was not asleep all the time


def test_members_that_must_hear_of_every_round_keep_it_awake() -> None:
    auto, machine = pondering(0.2, finds_text=False)
    ponder(auto, machine, 100)
    assert machine.member.n_heard == 100


def test_what_rested_knows_the_text_when_the_next_answer_begins() -> None:
    """Nothing of it is new: no time is granted to read it."""
    auto, machine = pondering(0.2)
    ponder(auto, machine, 100)
    auto.report()
    assert len(auto._known) == len(PROMPT) + 100


def test_a_replayed_answer_follows_its_log_however_the_last_one_ended() -> None:
    """The first log is used up, and a rest follows; the second's drafts are made all the same."""
    first, second = (ChoiceLog(["ponders", "none"], runs) for runs in ([[1, 5]], [[0, 20]]))
    auto, machine = pondering(2.0, replay=[first, second])
    assert not any(ponder(auto, machine, 60))
    assert auto._rest.left
    assert all(ponder(auto, machine, 20))
