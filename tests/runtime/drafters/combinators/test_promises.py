"""What members of `auto` promise of a single round, and what is made of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.scripted import PLAIN, outcome_of

from specrun.runtime.drafters.combinators import (
    Arm,
    ArmChooser,
    ArmForecast,
    AutoDrafter,
    ChoiceLog,
)
from specrun.runtime.drafters.retrieval import PromptLookupDrafter
from specrun.runtime.laws import SeededNoise
from specrun.runtime.planning import CostCurve
from specrun.runtime.round import Drafter, DraftRequest, NoDrafter
from specrun.runtime.round.drafter import RoundOutcome
from specrun.runtime.trees import DraftTree

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4]


class Machine:
    """Counts rounds, and takes a second for a plain one and a tenth for each drafted token."""

    def __init__(self) -> None:
        self.now, self.round = 0.0, 0

    def __call__(self) -> float:
        return self.now


class Part(Drafter):
    """Drafts `n` tokens, all right in the rounds that `right` names, and promises `promised`.

    It promises in those rounds alone; `asked` are those in which it was asked what it promises.
    """

    def __init__(
        self,
        machine: Machine,
        name: str,
        n: int,
        *,
        promised: float = 0.0,
        right: Callable[[int], bool] = lambda _: True,
        finds_text: bool = False,
    ) -> None:
        self.name, self.max_nodes, self.finds_text = name, n, finds_text
        self.right, self._promised, self._machine = right, promised, machine
        self.asked, self.heard = list[int](), list[int]()

    def forecast(self, request: DraftRequest) -> float:
        self.asked.append(self._machine.round)
        if not self._promised:
            return 0.0
        return self._promised if self.right(self._machine.round) else 1.0

    def propose(self, request: DraftRequest) -> DraftTree:
        return DraftTree.chain([1] * min(self.max_nodes, request.max_depth, request.max_nodes))

    def observe(self, outcome: RoundOutcome) -> None:
        self.heard.append(self._machine.round)


def play(auto: AutoDrafter, machine: Machine, rounds: int) -> list[tuple[str, int]]:
    """Return who was chosen in each round, and how much was drafted."""
    tokens, played = list(PROMPT), []
    auto.begin(tokens)
    for machine.round in range(rounds):
        tree = auto.propose(DraftRequest(tokens, PLAIN, SeededNoise(0), 9, 9))
        assert auto._chosen is not None
        part = auto._members[auto._chosen]
        played.append((part.name, len(tree)))
        machine.now += 1.0 + 0.1 * len(tree)
        is_right = not isinstance(part, Part) or part.right(machine.round)
        path = tuple(range(len(tree))) if is_right else ()
        tokens += [*(tree.tokens[node] for node in path), 2]
        auto.observe(outcome_of(tokens, tree, path, 2))
    return played


# Measured already: a model of 2 tokens a round, a search of the text that is mostly wrong, and
# plain decoding.
KNOWN = [Arm(40.0, 80.0, 48.0), Arm(40.0, 42.0, 60.0), Arm(40.0, 40.0, 40.0)]


def model_and_search(promised: float) -> tuple[AutoDrafter, Machine, Part]:
    """A model that is right with one token, and a search that is, with eight, in every fifth round
    and says so."""
    machine = Machine()
    search = Part(
        machine, "search", 8, promised=promised, right=lambda at: at % 5 == 0, finds_text=True
    )
    parts = [Part(machine, "model", 1), search, NoDrafter()]
    forecasts = [ArmForecast(most=1), ArmForecast(most=8), ArmForecast()]
    known = [arm.for_another_text() for arm in KNOWN]
    auto = AutoDrafter(parts, clock=machine, forecasts=forecasts, shared=known)
    return auto, machine, search


def test_a_promise_takes_a_round_from_a_slower_drafter() -> None:
    auto, machine, search = model_and_search(promised=4.0)
    played = play(auto, machine, 100)
    taken = [at for at, (name, _) in enumerate(played) if name == "search"]
    assert len([at for at in taken if at % 5 == 0]) >= 18  # but for probes
    assert len([at for at in taken if at % 5]) <= 4
    assert all(
        drafted == 8 for at, (_, drafted) in enumerate(played) if at % 5 == 0 and at in taken
    )
    # It is not taken for a drafter that is always as fast, which it would be used as.
    assert auto._chooser.arms[1].rate < auto._chooser.arms[0].rate
    assert [name for name, _ in played].count("model") >= 70
    assert len(search.heard) >= len(taken)


def test_a_promise_of_less_than_the_drafter_in_use_gives_is_not_taken() -> None:
    auto, machine, _ = model_and_search(promised=1.6)
    played = play(auto, machine, 100)
    assert [name for name, _ in played].count("search") <= 4


@pytest.mark.parametrize(("promised", "drafted"), [(4.0, 8), (1.0, 1)])
def test_a_draft_that_is_promised_is_not_limited(promised: float, drafted: int) -> None:
    """The fastest drafter, of which no more than one token at a time was seen yet."""
    machine = Machine()
    search = Part(machine, "search", 8, promised=promised, finds_text=True)
    known = [Arm(40.0, 80.0, 44.0, depth=1), Arm(40.0, 40.0, 40.0)]
    forecasts = [ArmForecast(most=8), ArmForecast()]
    auto = AutoDrafter([search, NoDrafter()], clock=machine, forecasts=forecasts, shared=known)
    assert play(auto, machine, 1) == [("search", drafted)]


@pytest.mark.parametrize("known", [True, False])
def test_a_promise_interrupts_the_probe_of_a_drafter_that_was_slower(known: bool) -> None:
    """Not one of a drafter that nobody knows yet: it may be as fast as whatever is promised."""
    chooser = ArmChooser(
        [ArmForecast(most=4), ArmForecast(most=8), ArmForecast()],
        2,
        known=[Arm(40.0, 42.0, 60.0) if known else Arm(), KNOWN[1], KNOWN[2]],
    )
    chooser.begin(0)
    chooser._probing = True
    assert chooser.promising(0, [0.0, 4.0, 0.0]) == (1 if known else None)
    assert chooser.promising(0, [0.0, 1.4, 0.0]) is None


def test_who_promised_learns_what_came() -> None:
    """In the rounds in which it was asked and not chosen, it is told of the text all the same."""
    machine = Machine()
    search = Part(machine, "search", 8, promised=1.2, finds_text=True)
    # An arm that costs a thousand rounds is not tried.
    forecasts = [ArmForecast(most=8, draft=1000.0), ArmForecast()]
    auto = AutoDrafter([search, NoDrafter()], clock=machine, forecasts=forecasts)
    play(auto, machine, 80)
    assert search.asked == search.heard
    assert len(search.asked) > 40


def test_what_was_promised_teaches_prompt_lookup_as_its_drafts_do() -> None:
    """Asked of every token of a text that repeats, it promises as much as one that drafted."""
    said = [7, 8, 9, 5, 3] * 6

    def promise(asks: str) -> float:
        search, tokens = PromptLookupDrafter(costs=CostCurve.flat([1.0] * 32)), list(PROMPT)
        search.begin(tokens)

        def request() -> DraftRequest:
            return DraftRequest(tokens, PLAIN, SeededNoise(0), 9, 9)

        for token in said:
            if asks == "forecasts":
                search.forecast(request())
            elif asks == "drafts":
                search.propose(request())
            tokens.append(token)
            search.observe(outcome_of(tokens, DraftTree(), (), token))
        return search.forecast(request())

    assert promise("forecasts") == promise("drafts") > promise("nothing")


def with_prompt_lookup(*logs: ChoiceLog) -> tuple[AutoDrafter, Machine]:
    """A model of two tokens a round, which only a sure promise is better than."""
    machine = Machine()
    search = PromptLookupDrafter(costs=CostCurve.flat([1.0 + 0.25 * n for n in range(17)]))
    parts = [Part(machine, "model", 1), search, NoDrafter()]
    forecasts = [ArmForecast(most=1), ArmForecast(most=8), ArmForecast()]
    known = [arm.for_another_text() for arm in KNOWN]
    auto = AutoDrafter(parts, clock=machine, forecasts=forecasts, shared=known, replay=logs)
    return auto, machine


def test_a_replay_teaches_as_the_answer_did() -> None:
    """What is drafted follows from what was taught, so a log tells who was asked, and when."""
    auto, machine = with_prompt_lookup()
    played, report = play(auto, machine, 40), auto.report()
    assert len({drafted for name, drafted in played if name != "model"}) > 2
    names = [arm["drafter"] for arm in report["arms"]]
    runs = [report[kind] for kind in ("choices", "depths", "asks")]
    assert play(*with_prompt_lookup(ChoiceLog(names, *runs)), 40) == played
    # Negative control: a log that does not tell it.
    assert play(*with_prompt_lookup(ChoiceLog(names, *runs[:2])), 40) != played


def test_what_was_promised_in_an_answer_that_was_left_teaches_nothing_later() -> None:
    """It ended between a draft and what became of it: nobody hears of a promise in the next one."""
    auto, machine, search = model_and_search(promised=1.2)
    auto.begin(PROMPT)
    for machine.round in range(4):  # until somebody is asked; none of these rounds ends
        auto.propose(DraftRequest(PROMPT, PLAIN, SeededNoise(0), 9, 9))
    assert search.asked
    assert auto._promised
    auto.begin(PROMPT)
    assert not auto._promised
