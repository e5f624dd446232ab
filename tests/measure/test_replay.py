"""Replays: the rounds of decoding itself, bounds where drafting does not pay, the command."""

from __future__ import annotations

import dataclasses
import json
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from support.commands import run_measure

from measure.replay.recorded_texts import read_texts, write_texts
from measure.replay.replay import ReplayClock, ReplayText, replay, replay_all
from specrun.bindings.errors import FileMissingError, ModelError, OptionError
from specrun.runtime.acceptance import ExactRule
from specrun.runtime.drafters.break_even import BreakEven, TimedDrafter
from specrun.runtime.drafters.combinators import AutoDrafter
from specrun.runtime.drafters.lookahead import (
    JacobiDrafter,
    LookaheadDrafter,
    NgramPool,
    NgramStore,
    PlannedGuesses,
)
from specrun.runtime.drafters.retrieval import (
    ContextIndex,
    Continuation,
    PromptLookupDrafter,
    RestDrafter,
)
from specrun.runtime.laws import SamplingParams
from specrun.runtime.planning import START, TYPICAL_GPU, CostCurve, LiveCurve
from specrun.runtime.round import CachedText, Conversation, Drafter, DraftRequest, NoDrafter
from specrun.runtime.round.drafter import Pause
from specrun.runtime.round.loop import DecodeSettings, RoundLimits, decode_rounds
from specrun.runtime.trees import DraftTree

VOCAB = 60
CPU = CostCurve((1, 2, 3, 4, 6, 8, 16, 32), *2 * ((1.0, 1.38, 1.63, 1.98, 2.2, 2.5, 4.0, 7.0),))


def lookahead() -> LookaheadDrafter:
    return _lookahead(CPU)


def _lookahead(curve: CostCurve) -> LookaheadDrafter:
    guesses, store = PlannedGuesses(curve), NgramStore(NgramPool(8))
    return LookaheadDrafter(ngram=8, width=0, guesses=guesses, store=store)


MATCHING: dict[str, Callable[[], Drafter]] = {
    "prompt-lookup": lambda: PromptLookupDrafter(costs=CPU),
    "lookahead": lookahead,
    "rest": lambda: RestDrafter(ContextIndex.of_text(copies(4000, 3, seed=99), VOCAB), costs=CPU),
}


def copies(length: int, mean: float, *, seed: int) -> list[int]:
    """Return a text of random tokens and earlier passages of so many tokens on average."""
    rng = random.Random(seed)
    tokens = [rng.randrange(1, VOCAB) for _ in range(100)]
    while len(tokens) < length:
        size = 1 + int(rng.expovariate(1.0 / mean))
        start = rng.randrange(len(tokens))
        tokens += [*tokens[start : start + size], rng.randrange(1, VOCAB)]
    return tokens[:length]


def text_of(tokens: Sequence[int], prompt: int = 100) -> ReplayText:
    return ReplayText("text", tuple(tokens[:prompt]), tuple(tokens[prompt:]))


class Writer:
    """A target that writes a known text, whatever is drafted."""

    def __init__(self, text: Sequence[int]) -> None:
        self.text, self._length, self._tree = text, 0, DraftTree()

    def evaluate(self, text: CachedText, tree: DraftTree) -> Writer:
        self._length, self._tree = len(text.tokens), tree
        return self

    def commit(self, text: CachedText, tree: DraftTree, path: Sequence[int]) -> None:
        text.commit(tree.tokens[node] for node in path)

    def logits(self, row: int) -> np.ndarray:
        depth = 0 if row == 0 else self._tree.depths[row - 1]
        position = self._length + depth
        return 9.0 * np.eye(VOCAB, dtype=np.float32)[self.text[min(position, len(self.text) - 1)]]


@pytest.mark.parametrize("name", MATCHING)
def test_a_replay_goes_through_the_rounds_of_decoding(name: str) -> None:
    tokens = copies(500, 12, seed=1)
    text = text_of(tokens)
    known = replay(MATCHING[name](), text, CPU)
    drafter = MATCHING[name]()
    drafter.begin(text.prompt)
    limits = RoundLimits(n_ctx=10_000, max_nodes=drafter.max_nodes, max_tokens=None)
    settings = DecodeSettings(ExactRule(), SamplingParams(temperature=0.0), limits)
    rounds = decode_rounds(
        Writer([*tokens, *[0] * 40]), Conversation(drafter, text.prompt), settings
    )  # type: ignore[arg-type]
    decoded = [
        (len(this_round.tree), len(this_round.path))
        for this_round, _ in zip(rounds, known[:-1], strict=False)
    ]
    assert decoded == [(record.drafted, record.accepted) for record in known[:-1]]
    assert (
        name == "rest" or max(record.accepted for record in known) > 4
    )  # its store holds another text
    assert sum(record.tokens for record in known) == 400


def test_plain_decoding_is_the_measure() -> None:
    result = replay_all(NoDrafter(), [text_of(copies(300, 3, seed=2))], CPU)
    assert (result.speed_up, result.late_speed_up, result.mean_accepted_length) == (1.0, 1.0, 1.0)
    assert result.rounds == result.tokens == 200


def test_a_round_costs_what_its_nodes_cost() -> None:
    class Right(NoDrafter):
        max_nodes = 3

        def __init__(self) -> None:
            self.pause = Pause()

        def propose(self, request: object) -> DraftTree:
            return DraftTree.chain([1, 1, 1])

    rounds = replay(
        Right(), ReplayText("ones", (1,), (1,) * 8), CostCurve.flat([2.0, 3.0, 4.0, 5.0])
    )
    assert [
        (this_round.drafted, this_round.accepted, this_round.tokens, this_round.seconds)
        for this_round in rounds
    ] == [(3, 3, 4, 5.0)] * 2
    result = replay_all(
        Right(), [ReplayText("ones", (1,), (1,) * 8)], CostCurve.flat([2.0, 3.0, 4.0, 5.0])
    )
    assert result.speed_up == pytest.approx(8 * 2.0 / 10.0)
    assert result.late_speed_up is None


def test_what_needs_the_target_is_refused() -> None:
    with pytest.raises(OptionError, match="cannot replay"):
        replay(JacobiDrafter(n=3), text_of(copies(130, 3, seed=0)), CPU)
    with pytest.raises(OptionError, match="no text"):
        replay_all(NoDrafter(), [], CPU)
    with pytest.raises(OptionError, match="at least one token"):
        ReplayText("empty", (1,), ())


# Where drafting does not pay, a matching drafter is plain decoding but for 3 %, once it had 64
# tokens to see it.
NO_USE: dict[str, Callable[[int], list[int]]] = {
    "tokens at random": lambda seed: copies(900, 0.01, seed=seed),
    "pairs that come again": lambda seed: copies(900, 0.8, seed=seed),
    "one of three": lambda seed: _branching(900, 3, seed),
    "one of five": lambda seed: _branching(900, 5, seed),
}


def _branching(length: int, ways: int, seed: int) -> list[int]:
    """Return a text in which every token has so many successors, equally likely."""
    rng = random.Random(seed)
    tokens = [1]
    while len(tokens) < length:
        tokens.append(1 + (tokens[-1] * 7 + 11 * rng.randrange(ways)) % (VOCAB - 1))
    return tokens


@pytest.mark.parametrize("kind", NO_USE)
@pytest.mark.parametrize("name", MATCHING)
def test_where_nothing_repeats_little_is_lost(name: str, kind: str) -> None:
    result = replay_all(MATCHING[name](), [text_of(NO_USE[kind](seed)) for seed in range(3)], CPU)
    assert result.late_speed_up is not None
    assert result.late_speed_up > 0.97


@pytest.mark.parametrize(("mean", "least"), [(8, 1.3), (16, 1.6), (32, 1.9)])
@pytest.mark.parametrize("name", ["prompt-lookup", "lookahead"])
def test_copies_are_drafted(name: str, mean: int, least: float) -> None:
    result = replay_all(
        MATCHING[name](), [text_of(copies(900, mean, seed=seed)) for seed in range(3)], CPU
    )
    assert result.speed_up > least


def test_an_edited_copy_is_found_again_behind_its_edits() -> None:
    rng = random.Random(4)
    source = [rng.randrange(1, VOCAB) for _ in range(120)]
    edited = [
        rng.randrange(1, VOCAB) if number % 9 == 8 else token for number, token in enumerate(source)
    ]
    result = replay_all(
        MATCHING["prompt-lookup"](), [ReplayText("edited", tuple(source), tuple(edited))], CPU
    )
    assert result.speed_up > 1.6


def test_a_text_that_begins_to_repeat_is_noticed_without_probes() -> None:
    rng = random.Random(6)
    new = [rng.randrange(1, VOCAB) for _ in range(400)]
    rounds = replay(MATCHING["prompt-lookup"](), text_of([*new, *new[100:300]]), CPU)
    late = rounds[300:]
    assert sum(this_round.tokens for this_round in late) == 200
    assert sum(this_round.seconds for this_round in late) < 200 / 2


def test_auto_replays_the_same_on_the_replays_clock() -> None:
    texts = [text_of(copies(400, 12, seed=seed)) for seed in range(2)]

    def choices() -> object:
        clock = ReplayClock()
        auto = AutoDrafter([MATCHING["prompt-lookup"](), lookahead(), NoDrafter()], clock=clock)
        result = replay_all(auto, texts, CPU, clock=clock)
        assert result.speed_up > 1.2
        return auto.report()

    assert choices() == choices()


def test_auto_gives_up_plain_rounds_for_what_promises_more() -> None:
    """From the first round on where the prompt repeats, and wherever a text begins to."""

    class Slow(NoDrafter):
        name = "slow"

    def choices(text: ReplayText) -> list[int]:
        members = [Slow(), PromptLookupDrafter(costs=CPU), NoDrafter()]
        auto = AutoDrafter(members, clock=(clock := ReplayClock()))
        replay(auto, text, CPU, clock=clock)
        return [index for index, rounds in auto.report()["choices"] for _ in range(rounds)]

    source = tuple(copies(60, 0.01, seed=3))
    assert choices(ReplayText("again", (*source, *source[:20]), source[20:40]))[0] == 1
    assert choices(ReplayText("new", tuple(range(1, 50)), (3, 9, 4)))[0] == 2
    later = choices(ReplayText("later", source, (*range(100, 110), *source[:40])))
    assert later[:2] == [2, 2]
    assert later[-4:].count(1) >= 3
    assert len(later) < 35


STEEP = CostCurve.flat([1.0, 1.7, 1.8, 2.0, 2.2, 2.5, 2.8, 3.2, 3.8, 4.4])


@pytest.mark.parametrize("kind", NO_USE)
@pytest.mark.parametrize("curve", [CPU, STEEP], ids=["usual", "steep"])
def test_what_drafts_where_nobody_names_a_drafter_loses_little_in_200_tokens(
    curve: CostCurve, kind: str
) -> None:
    """As `auto` chooses its members: drafters without a model, by the curve, and plain decoding."""
    for seed in range(4):
        tokens = NO_USE[kind](seed)[:300]
        clock = ReplayClock()
        members = [PromptLookupDrafter(costs=curve), _lookahead(curve), NoDrafter()]
        auto = AutoDrafter(members, clock=clock)
        result = replay_all(auto, [text_of(tokens)], curve, clock=clock)
        assert result.tokens == 200
        assert result.speed_up >= 0.97
    # Tokens that come again do gain: the bound is not kept by drafting nothing.
    auto = AutoDrafter(members, clock=(clock := ReplayClock()))
    again = replay_all(auto, [text_of(copies(900, 32, seed=0))], curve, clock=clock)
    assert again.speed_up > 1.2


# -- a drafter that is named ----------------------------------------------------------------------


ASKED = 0.016  # plain rounds: prompt lookup beside SmolLM2-135M in F16 on two cores


class Lookup(PromptLookupDrafter):
    """Takes `asked` seconds in each round that it is asked in."""

    def __init__(self, clock: ReplayClock, costs: CostCurve, asked: float = ASKED) -> None:
        super().__init__(costs=costs)
        self._clock, self._asked = clock, asked

    def retrieve(self, tokens: Sequence[int], length: int) -> Sequence[Continuation]:
        self._clock.now += self._asked
        return super().retrieve(tokens, length)


class AlwaysInFull(PromptLookupDrafter):
    """A fixed setting: `n` tokens of the best match, whatever they cost."""

    def __init__(self, n: int, min_ngram: int) -> None:
        super().__init__(num_draft_tokens=n, min_ngram=min_ngram, branches=1)

    def propose(self, request: DraftRequest) -> DraftTree:
        found = self.retrieve(request.tokens, min(self.max_nodes, request.max_depth))
        return DraftTree.chain([*found[0].tokens]) if found else DraftTree()


def edited(every: float, *, seed: int, tokens: int = VOCAB) -> ReplayText:
    """Return a text of 250 tokens, and the same with an edit in so many tokens on average."""
    rng = random.Random(seed)
    source = [rng.randrange(1, tokens) for _ in range(250)]
    answer = list[int]()
    for token in source:
        if rng.random() >= 1.0 / every:
            answer.append(token)
        elif rng.random() < 0.6:  # replaced, or left out
            answer.extend(rng.randrange(1, tokens) for _ in range(rng.randrange(1, 4)))
    return ReplayText("edited", (*source, 1, 2), tuple(answer))


NAMED: dict[str, Callable[[int], ReplayText]] = {
    **{name: lambda seed, make=make: text_of(make(seed)[:300]) for name, make in NO_USE.items()},
    **{f"every {n}": lambda seed, n=n: edited(n, seed=seed) for n in (8, 16, 40)},
    # Among so many tokens no short match is false, and lengths that expect some are too short.
    "every 40 of 900": lambda seed: edited(40, seed=seed, tokens=900),
}


# ms of a public report at these widths: a first token costs as much as most drafts gain.
STEEPEST = CostCurve(
    (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 32),
    *2 * ((30, 54, 66, 78, 90, 101, 125, 138, 172, 220, 232, 330, 440),),
)


def test_what_would_gain_and_does_not_fit_is_saved_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an empty account no more may be lost than one token costs, which gains nothing here.
    Gemma 3 270M Q4_K_M, one thread, as it was measured."""
    curve = CostCurve.flat([1.0, 2.0, 2.2, 2.3, 3.6, 3.9])

    def speed() -> float:
        clock = ReplayClock()
        live = LiveCurve(dataclasses.replace(curve, spread=(0.02,) * len(curve.sizes)))
        lookup = Lookup(clock, live)
        drafter = TimedDrafter(lookup, live, clock, "paying")
        drafter._break_even.account.lose(START)
        passage = tuple(copies(300, 0.01, seed=3))
        text = ReplayText("again", (*passage, *passage[:9]), passage[9:209])
        return replay_all(drafter, [text], curve, clock=clock).speed_up

    assert speed() > 1.2
    monkeypatch.setattr(BreakEven, "tokens_for", lambda *_: 0)  # the control:
    assert speed() == 1.0  # it never drafts


@pytest.mark.parametrize("kind", NAMED)
@pytest.mark.parametrize(
    "curve", [CPU, STEEP, STEEPEST, TYPICAL_GPU], ids=["usual", "steep", "steepest", "flat"]
)
def test_a_named_drafter_gives_what_its_best_fixed_setting_gives_and_stops_if_it_does_not_pay(
    curve: CostCurve, kind: str
) -> None:
    """At least .95 of its best setting, and .97 of plain decoding. It sees that to be asked takes
    `ASKED` of a plain round, and sleeps where that is too much. The curve is known, as after a
    first contact."""
    known = CostCurve(curve.sizes, curve.reused, curve.rebuilt, (0.02,) * len(curve.sizes))
    texts = [NAMED[kind](seed) for seed in range(4)]

    def speed(make: Callable[[ReplayClock], Drafter], text: ReplayText) -> float:
        return replay_all(make(clock := ReplayClock()), [text], curve, clock=clock).speed_up

    def named(clock: ReplayClock) -> Drafter:
        live = LiveCurve(known)
        lookup = Lookup(clock, live, ASKED * curve.seconds(1))
        return TimedDrafter(lookup, live, clock, "paying")

    found = [speed(named, text) for text in texts]
    assert min(found) >= 0.97
    fixed = max(
        statistics.harmonic_mean([speed(lambda _: AlwaysInFull(n, m), text) for text in texts])  # noqa: B023
        for n in (2, 4, 6, 9, 15)
        for m in (2, 4)
    )
    share = statistics.harmonic_mean(found) / max(1.0, fixed)
    assert share >= 0.95


def test_texts_are_kept_and_read(tmp_path: Path) -> None:
    texts = [ReplayText("a b", (1, 2), (3, 0), frozenset({0})), ReplayText("c", (1,), (2,))]
    path = tmp_path / "texts.jsonl"
    write_texts(texts, path)
    assert read_texts(path) == texts
    with pytest.raises(OptionError, match="already exists"):
        write_texts(texts, path)
    for wrong in ('{"prompt": [1], "answer": "x"}', "[]", "{", '{"prompt": [1], "answer": [true]}'):
        path.write_text(wrong)
        with pytest.raises((ModelError, OptionError), match="line 1"):
            read_texts(path)
    path.write_text("\n")
    with pytest.raises(OptionError, match="holds no texts"):
        read_texts(path)
    with pytest.raises(FileMissingError):
        read_texts(tmp_path / "none.jsonl")


def replayed(*arguments: object) -> Result:
    return run_measure("replay", *arguments)


def test_the_command_records_and_replays(tiny_model: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept.jsonl"
    base = ["-m", tiny_model, "-t", "1", "-c", "512", "--curve", "cpu", "--json"]
    asked = ("-p", "one two one two one", "-p", "a b a b a", "-n", "20")
    done = replayed(*base, *asked, "--keep", kept)
    assert done.exit_code == 0, done.output
    results = json.loads(done.stdout)["results"]
    assert [result["drafter"] for result in results] == ["prompt-lookup", "lookahead"]
    assert {result["n_texts"] for result in results} == {2}
    together = tmp_path / "together.jsonl"
    assert replayed(*base, *asked, "--keep", together, "--parallel", "2").exit_code == 0
    assert together.read_text() == kept.read_text()
    again = replayed(*base, "--texts", kept)
    assert json.loads(again.stdout)["results"] == results
    table = replayed("-m", tiny_model, "--texts", kept, "--curve", "cpu", "-o", "md").stdout
    assert table.startswith("| texts ")
    for wrong, message in (
        (["--texts", kept, "-p", "x"], "leave out"),
        (["-p", "x", "--keep", kept], "exists"),
        (["-p", "x", "--curve", "steep"], "no cost curve"),
        (["-p", "x", "--drafter", "jacobi"], "cannot replay"),
        (["--texts", kept, "--curve", "cpu", "--demo"], "exclude"),
    ):
        refused = replayed("-m", tiny_model, "-t", "1", "-n", "4", *wrong)
        assert refused.exit_code == 2, refused.output
        assert message in refused.stderr
