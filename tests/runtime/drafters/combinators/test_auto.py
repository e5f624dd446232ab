"""`auto`: exact whatever it chooses, choices from the past only, logged and replayed, everyone told
of every round but those that find the text themselves."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from support.enumeration import TOLERANCE, Propose, chain, drafter_bias, mixed_tree, top_k_points
from support.scripted import PLAIN, LawTable, ScriptedDrafter, law_of, outcome_of
from support.tiny_models import F32

from specrun.bindings.errors import FileMissingError, OptionError
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.acceptance import ExactRule
from specrun.runtime.drafters.combinators import (
    Arm,
    ArmForecast,
    AutoDrafter,
    ChoiceLog,
    read_choice_logs,
)
from specrun.runtime.drafters.lookahead import (
    LookaheadDrafter,
    NgramPool,
    NgramStore,
    PlannedGuesses,
)
from specrun.runtime.drafters.retrieval import PromptLookupDrafter
from specrun.runtime.language import quoted
from specrun.runtime.laws import SeededNoise
from specrun.runtime.planning import CostCurve
from specrun.runtime.round import Drafter, DraftRequest, NoDrafter
from specrun.runtime.round.drafter import RoundOutcome
from specrun.runtime.trees import DraftTree

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4]


def member(propose: Propose, name: str = "scripted") -> Drafter:
    drafter = ScriptedDrafter(propose)
    drafter.max_nodes, drafter.name = 8, name
    return drafter


READS = 5
"""How often `auto` reads the clock in a round: before and after proposing, before and after it has
told its members, and when the round is counted."""


class ScriptedClock:
    """Evaluations take given seconds, again and again; what `auto` does itself takes `own`."""

    def __init__(self, *seconds: float, own: float = 0.0) -> None:
        self._steps = [step for each in seconds for step in (0.0, own, each, 0.0, 0.0)]
        self._calls = 0
        self._now = 0.0

    def __call__(self) -> float:
        self._now += self._steps[self._calls % len(self._steps)]
        self._calls += 1
        return self._now


@pytest.mark.parametrize("seconds", [(5, 1, 1), (0,)], ids=str)
@pytest.mark.parametrize("seed", [1])
def test_whatever_is_chosen_the_law_is_the_targets(seconds: tuple[float, ...], seed: int) -> None:
    drafts = LawTable(3, seed + 100)

    def make() -> Drafter:
        parts = [
            member(chain(drafts, 2)),
            member(mixed_tree(drafts, seed)),
            member(top_k_points(drafts, 2, 1)),
        ]
        # Plain decoding is known already, so that three tokens see more than its first rounds.
        known = [*(Arm(depth=depth) for depth in (0, 1, 2)), Arm(4.0, 4.0, 4.0)]
        return AutoDrafter([*parts, NoDrafter()], clock=ScriptedClock(*seconds), shared=known)

    assert drafter_bias(ExactRule(), make, LawTable(3, seed), 3) < TOLERANCE


def test_a_choice_that_looks_at_this_rounds_draws_is_caught() -> None:
    """Negative control: of two drafters that have drawn, the one whose token is likelier is
    taken."""
    a, b = LawTable(3, 100, 0.0), LawTable(3, 200, 0.0)

    class Peeks(AutoDrafter):
        def propose(self, request: DraftRequest) -> DraftTree:
            trees = [drafter.propose(request) for drafter in self._members[:2]]
            if not len(trees[0]):
                return trees[0]
            laws = [law_of(table(request.tokens)) for table in (a, b)]
            return max(
                zip(trees, laws, strict=True),
                key=lambda pair: pair[1].probability(pair[0].tokens[0]),
            )[0]

    def make() -> Drafter:
        return Peeks(
            [member(chain(a, 1)), member(chain(b, 1)), NoDrafter()], clock=ScriptedClock(1)
        )

    assert (
        max(drafter_bias(ExactRule(), make, LawTable(3, seed, 0.0), 2) for seed in range(4)) > 1e-2
    )


# -- who is asked and told -------------------------------------------------------------------------


class Witness(Drafter):
    """Proposes a chain, is right or wrong with it, and writes down what it is told."""

    def __init__(self, name: str, n: int) -> None:
        self.name, self.max_nodes, self.n = name, n, n
        self.outcomes: list[RoundOutcome] = []
        self.closed = False

    def propose(self, request: DraftRequest) -> DraftTree:
        return DraftTree.chain([1] * min(self.n, request.max_depth, request.max_nodes))

    def observe(self, outcome: RoundOutcome) -> None:
        self.outcomes.append(outcome)

    def close(self) -> None:
        self.closed = True


def run(auto: AutoDrafter, rounds: int, right: bool) -> list[int]:
    """Play rounds in which all drafts are right, or none; return who was asked."""
    tokens, asked = list(PROMPT), []
    auto.begin(tokens)
    for _ in range(rounds):
        tree = auto.propose(DraftRequest(tokens, PLAIN, SeededNoise(0), 9, 9))
        asked.append(auto._chosen)
        path = tuple(range(len(tree))) if right else ()
        tokens += [*(tree.tokens[node] for node in path), 2]
        auto.observe(outcome_of(tokens, tree, path, 2))
    return asked  # type: ignore[return-value]


def test_the_fastest_is_used_and_everyone_hears_of_every_round() -> None:
    for right, expected in ((True, "long"), (False, "none")):
        parts = [Witness("short", 1), Witness("long", 4), NoDrafter()]

        auto = AutoDrafter(parts, clock=ScriptedClock(1))
        if not right:  # rounds of one length: a draft gains nothing, so let it cost
            auto._clock = _CostsMore(auto)
        asked = run(auto, 120, right)
        assert [parts[place].name for place in asked[-40:]].count(expected) > 30
        for part in parts[:2]:
            assert isinstance(part, Witness)
            assert len(part.outcomes) == 120
            for outcome, index in zip(part.outcomes, asked, strict=True):
                own = outcome.tree.n_candidates if parts[index] is part else len(outcome.path)
                assert len(outcome.tree) == own
        auto.close()
        assert all(part.closed for part in parts[:2] if isinstance(part, Witness))


def test_members_that_find_the_text_hear_of_their_own_rounds_alone() -> None:
    finder, other = Witness("finder", 4), Witness("other", 1)
    finder.finds_text = True
    auto = AutoDrafter([finder, other, NoDrafter()], clock=ScriptedClock(1, 2))
    asked = run(auto, 60, True)
    assert 0 < asked.count(0) < 60
    assert len(finder.outcomes) == asked.count(0)
    assert len(other.outcomes) == 60


@pytest.mark.parametrize("told_last", [True, False], ids=["told of the last", "never told"])
@pytest.mark.parametrize("kind", ["prompt-lookup", "lookahead"])
def test_what_finds_the_text_needs_no_telling(kind: str, told_last: bool) -> None:
    """After forty rounds of which it hears the last, it drafts as one that heard all.

    Lookahead learns of what it is told, so that without any it drafts otherwise.
    """

    def made() -> Drafter:
        if kind == "prompt-lookup":
            return PromptLookupDrafter(costs=CostCurve.flat([1.0] * 32))
        pool = NgramPool(4, per_key=4, max_keys=64)
        guesses = PlannedGuesses(CostCurve.flat([1.0] * 32))
        return LookaheadDrafter(ngram=4, width=0, guesses=guesses, store=NgramStore(pool))

    said = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3] * 4
    trees = []
    for hears_all in (True, False):
        drafter, tokens = made(), list(PROMPT)
        assert drafter.finds_text
        drafter.begin(tokens)
        for number, token in enumerate(said, 1):
            tokens.append(token)
            if hears_all or (told_last and number == len(said)):
                drafter.observe(outcome_of(tokens, DraftTree(), (), token))
        trees.append(drafter.propose(DraftRequest(tokens, PLAIN, SeededNoise(0), 9, 9)))
    assert len(trees[0])
    assert (trees[0] == trees[1]) == (told_last or kind == "prompt-lookup")


class _CostsMore:
    """Half a second more for every round in which something was drafted."""

    def __init__(self, auto: AutoDrafter) -> None:
        self._auto = auto
        self._now = 0.0
        self._calls = 0

    def __call__(self) -> float:
        drafts = (
            self._auto._chosen is not None and self._auto._members[self._auto._chosen].max_nodes > 0
        )
        evaluated = self._calls % READS == 2
        self._now += (1.5 if drafts else 1.0) if evaluated else 0.0
        self._calls += 1
        return self._now


def test_reports_count_and_replay() -> None:
    parts: Callable[[], list[Drafter]] = lambda: [  # noqa: E731
        Witness("short", 1),
        Witness("long", 4),
        NoDrafter(),
    ]
    auto = AutoDrafter(parts(), clock=ScriptedClock(1, 2))
    asked = run(auto, 50, True)
    report = json.loads(json.dumps(auto.report()))
    assert [index for index, rounds in report["choices"] for _ in range(rounds)] == asked
    assert [arm["rounds"] for arm in report["arms"]] == [asked.count(number) for number in range(3)]
    depths = [depth for depth, rounds in report["depths"] for _ in range(rounds)]
    long = [depth for depth, index in zip(depths, asked, strict=True) if index == 1]
    assert report["arms"][1]["tokens"] == sum(1 + (depth or 4) for depth in long)
    again = AutoDrafter(parts(), replay=[_log(report)], clock=ScriptedClock(3))
    assert run(again, 50, True) == asked
    assert len(run(again, 5, True)) == 5  # the log is used up: measured from here on


def test_drafts_are_short_at_first_and_a_replay_allows_as_much() -> None:
    """A model of a tenth of the target drafts 1 token, then 2, 4 and all 9, as they are right."""

    def auto(replay: Sequence[ChoiceLog] = ()) -> tuple[AutoDrafter, Witness]:
        long = Witness("long", 9)
        forecasts = [ArmForecast(most=9, draft=0.1), ArmForecast()]
        clock = ScriptedClock(1)
        return AutoDrafter(
            [long, NoDrafter()], clock=clock, forecasts=forecasts, replay=replay
        ), long

    first, long = auto()
    run(first, 12, True)
    drafted = [outcome.tree.n_candidates for outcome in long.outcomes]
    assert drafted[:2] == [0, 0]
    assert sorted(drafted) == drafted
    assert {1, 9} <= set(drafted)
    again, replayed = auto([_log(json.loads(json.dumps(first.report())))])
    again._clock = ScriptedClock(9, 1, 5)  # would choose otherwise
    run(again, 12, True)
    assert [outcome.tree.n_candidates for outcome in replayed.outcomes] == drafted
    old = auto([ChoiceLog(["long", "none"], [[0, 12]])])  # of a version that limited nothing
    run(old[0], 12, True)
    assert {outcome.tree.n_candidates for outcome in old[1].outcomes} == {9}


def test_a_conversation_begins_with_what_another_has_measured() -> None:
    def auto() -> AutoDrafter:
        return AutoDrafter([Witness("long", 4), NoDrafter()], clock=ScriptedClock(1), shared=known)

    known: list[Arm] = []
    first, unused = auto(), auto()
    assert run(first, 30, True)[:2] == [1, 1]
    first.close()
    assert run(auto(), 5, True) == [0] * 5
    unused.close()  # it has measured nothing, and leaves nothing
    forgetful = auto()
    forgetful.begin(())
    assert run(forgetful, 5, True)[:2] == [1, 1]
    assert run(auto(), 5, True) == [0] * 5


def _log(report: dict) -> ChoiceLog:  # type: ignore[type-arg]
    return ChoiceLog(
        [arm["drafter"] for arm in report["arms"]], report["choices"], report["depths"]
    )


def test_one_drafter_is_no_choice() -> None:
    with pytest.raises(OptionError, match="nothing to choose from"):
        AutoDrafter([NoDrafter()])


# -- with models -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("auto")
    write_random_llama(folder / "target.gguf", RandomLlama(vocab_size=400, seed=1, scale=4.0))
    write_random_llama(
        folder / "drafter.gguf", RandomLlama(vocab_size=400, seed=1, layers=1, scale=2.5)
    )
    return folder / "target.gguf", quoted(str(folder / "drafter.gguf"))


ARMS = (
    "draft(FILE, n=3, SAMPLING), cascade(draft(FILE, n=5, SAMPLING), "
    "prompt-lookup(min_ngram=1)), prompt-lookup"
)


def test_texts_are_plain_decodings(models: tuple[Path, str]) -> None:
    target, file = models
    point_masses = ARMS.replace("FILE", file).replace("SAMPLING", "sampling=argmax")
    settings = [SamplingParams(temperature=0.0)]
    settings += [
        SamplingParams(temperature=t, top_k=0, top_p=1.0, min_p=0.0, seed=4) for t in (0.8, 1.0)
    ]
    with (
        Runtime(target, "none", **F32) as plain,
        Runtime(target, drafter=f"auto({point_masses})", **F32) as runtime,
    ):
        for params in settings:
            wanted = plain.generate(PROMPT, params, max_tokens=100).token_ids
            assert runtime.generate(PROMPT, params, max_tokens=100).token_ids == wanted


def test_sampled_answers_are_repeated_by_replaying_their_choices(
    models: tuple[Path, str], tmp_path: Path
) -> None:
    target, file = models
    arms = ARMS.replace("FILE", file).replace("SAMPLING", "sampling=with")
    log, wanted = tmp_path / "a log.json", []
    params = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=4)
    with Runtime(target, drafter=f"auto({arms})", **F32) as runtime, log.open("w") as file_of_logs:
        for prompt in (PROMPT, PROMPT[:5]):
            result = runtime.generate(prompt, params, max_tokens=60)
            wanted.append((result.token_ids, _decisions(result.stats.drafting)))
            json.dump(result.to_dict(), file_of_logs)
            file_of_logs.write("\n")
    with Runtime(target, drafter=f"auto({arms}, replay={quoted(str(log))})", **F32) as runtime:
        for prompt, (tokens, choices) in zip((PROMPT, PROMPT[:5]), wanted, strict=True):
            result = runtime.generate(prompt, params, max_tokens=60)
            assert (result.token_ids, _decisions(result.stats.drafting)) == (tokens, choices)


def _decisions(drafting: Mapping[str, object]) -> tuple[object, object, object]:
    return drafting["choices"], drafting["depths"], drafting["asks"]


def test_a_draft_model_larger_than_its_target_is_not_tried(
    models: tuple[Path, str], tmp_path: Path
) -> None:
    """Sizes alone say so: 40 tokens cannot pay for one of its rounds. A small one is tried."""
    large, small = RandomLlama(vocab_size=400, width=256, ffn=1024, layers=4, seed=1), models[1]
    write_random_llama(tmp_path / "large.gguf", large)
    target = tmp_path / "target.gguf"
    write_random_llama(target, RandomLlama(vocab_size=400, seed=1, width=128, ffn=512, layers=4))
    tried = []
    for file in (quoted(str(tmp_path / "large.gguf")), small):
        with Runtime(target, drafter=f"auto(draft({file}, n=3))", **F32) as runtime:
            stats = runtime.generate(PROMPT, SamplingParams(temperature=0.0), max_tokens=40).stats
        tried.append(stats.drafting["arms"][0]["rounds"])
    assert tried[0] == 0 < tried[1]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is empty"),
        ("[1, 2]", "not a log"),
        ("{", "not a log"),
        ('{"arms": [], "choices": [[0, 1]]}', "not a log"),
        ('{"arms": [{"drafter": "none"}], "choices": [[0, -1]]}', "not a log"),
        ('{"arms": [{"drafter": "none"}], "choices": [[0, 99999999999]]}', "not a log"),
        ('{"arms": [{"drafter": "none"}], "choices": [], "depths": [[-1, 1]]}', "not a log"),
        ('{"arms": [{"drafter": "none"}], "choices": [], "asks": [[2, 1]]}', "not a log"),
        ('{"stats": {"drafting": {"choices": []}}}', "not a log"),
        (
            '{"arms": [{"drafter": "other"}, {"drafter": "none"}], "choices": [[0, 1]]}',
            "cannot be replayed with",
        ),
    ],
)
def test_files_that_are_no_logs_are_refused(
    models: tuple[Path, str], tmp_path: Path, text: str, problem: str
) -> None:
    (tmp_path / "log").write_text(text)
    with pytest.raises(OptionError, match=problem):
        Runtime(
            models[0], drafter=f"auto(prompt-lookup, replay={quoted(str(tmp_path / 'log'))})", **F32
        )


def test_a_missing_log_and_expressions_that_make_no_sense(
    models: tuple[Path, str], tmp_path: Path
) -> None:
    with pytest.raises(FileMissingError):
        read_choice_logs(tmp_path / "missing")
    for expression, problem in (
        ("auto(none)", "nothing to choose from"),
        ("auto(prompt-lookup, prompt-lookup)", "twice"),
        ("auto(reply=a.json)", "did you mean 'replay'"),
    ):
        with pytest.raises(OptionError, match=problem):
            Runtime(models[0], drafter=expression, **F32)


def test_bare_auto_chooses_from_what_there_is(models: tuple[Path, str]) -> None:
    with Runtime(models[0], drafter="auto", **F32) as runtime:
        stats = runtime.generate(PROMPT, SamplingParams(temperature=0.0), max_tokens=20).stats
    assert [arm["drafter"] for arm in stats.drafting["arms"]] == [
        "prompt-lookup",
        "lookahead",
        "none",
    ]


class Promising(Witness):
    """Promises twice the speed, and is always wrong."""

    def forecast(self, request: DraftRequest) -> float:
        return 2.0


def test_promises_are_believed_only_while_anything_may_be_lost() -> None:
    """Of 200 rounds that would all be drafted on such a promise, some few are."""
    parts = [Promising("promising", 4), NoDrafter()]
    auto = AutoDrafter(parts, clock=ScriptedClock(1))
    auto._clock = _CostsMore(auto)
    asked = run(auto, 200, right=False)
    assert 2 <= asked.count(0) < 20


class Asked(Witness):
    """Notes the rounds in which it is asked what it promises, and promises in some."""

    def __init__(self, promises: frozenset[int]) -> None:
        super().__init__("asked", 4)
        self.asked, self._promises = list[int](), promises

    def forecast(self, request: DraftRequest) -> float:
        self.asked.append(len(request.tokens))
        return 9.0 if len(request.tokens) in self._promises else 1.0


def test_forecasts_are_asked_for_less_often_where_nothing_is_promised() -> None:
    """After 32 in vain every second round's, until something is promised."""
    promised = len(PROMPT) + 101
    asked = Asked(frozenset({promised, promised + 1}))
    # Nothing is drafted but what is promised: an arm that costs a thousand rounds is not tried.
    forecasts = [ArmForecast(most=4, draft=1000.0), ArmForecast()]
    auto = AutoDrafter([asked, NoDrafter()], clock=ScriptedClock(1), forecasts=forecasts)
    chosen = run(auto, 140, right=False)
    gaps = [int(gap) for gap in np.diff(asked.asked)]
    kept = next(place for place, at in enumerate(asked.asked) if at >= promised)
    assert set(gaps[:31]) == {1}
    assert set(gaps[31:kept]) == {2}
    assert chosen.index(0) == asked.asked[kept] - len(PROMPT)
