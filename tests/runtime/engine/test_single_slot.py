"""One slot: an engine can do what a runtime can, and a runtime what an engine can."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.every_drafter import named
from support.interrupts import Interrupted, sampled_points
from support.tiny_models import F32

from specrun.bindings.errors import BusyError, ClosedError, OptionError
from specrun.runtime import GenerationStream, Runtime, SamplingParams, TokenEvent
from specrun.runtime.engine import Engine

GREEDY = SamplingParams(temperature=0.0)
WHOLE = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=5)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [2, 7, 1, 8]]
OWN, TREE, LOOKUP = "draft(FILE:twin, n=4)", "draft(FILE:twin, tree=2x2)", "prompt-lookup"
LOSSY = "cascade-opt(alpha=0.3)"
OPTIONS = {**F32, "n_ctx": 512}
LENGTH = 24
ALONE: dict[str, tuple[str, dict[str, Any]]] = {
    "a fixed shape": (OWN, {"shape": "fixed"}),
    "a width": ("draft(FILE:twin, n=3, sampling=argmax)", {"shape": 16}),
    "pairs": (OWN, {"shape": "pairs"}),
    "look-ahead positions": ("pass(FILE:pass, n=2)", {}),
    "a token cascade": ("draft(FILE:small)", {"accept": "token-cascade(alpha=0.5)"}),
    "a sequence cascade": ("draft(FILE:small)", {"accept": "sequence-cascade(quantile=0.5)"}),
    "device sampling": (OWN, {"backend_sampling": "on"}),
    "padding": (TREE, {}),
}
"""What only one conversation can have: a drafter, and options."""


def engine_of(files: dict[str, Path], drafter: str, slots: int = 1, **options: Any) -> Engine:
    return Engine(files["shallow"], named(drafter, files), slots=slots, **OPTIONS, **options)


def runtime_of(files: dict[str, Path], drafter: str, **options: Any) -> Runtime:
    return Runtime(files["shallow"], named(drafter, files), **OPTIONS, **options)


@pytest.mark.parametrize("feature", ALONE)
def test_an_engine_of_one_slot_answers_as_a_runtime(files: dict[str, Path], feature: str) -> None:
    """The same ids, the same rounds, and log-probabilities that are equal to the bit."""
    drafter, options = ALONE[feature]
    for params in (GREEDY, WHOLE):
        with runtime_of(files, drafter, **options) as runtime:
            wanted = [runtime.generate(each, params, max_tokens=LENGTH) for each in PROMPTS]
            stream = runtime.stream(PROMPTS[0], GREEDY, max_tokens=8)
            probs = [] if "accept" in options else [event.logprob for event in stream]
            width = runtime.session.target.width
        with engine_of(files, drafter, **options) as engine:
            found = [engine.submit(each, params, max_tokens=LENGTH).result for each in PROMPTS]
            asked = engine.submit(PROMPTS[0], GREEDY, max_tokens=8, logprobs=True)
            # In a cascade the target has no row for what the small model said.
            assert [event.logprob for event in asked if "accept" not in options] == probs
            load = engine.statistics().load
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours.token_ids == theirs.token_ids
            assert ours.stats.rounds == theirs.stats.rounds
            assert ours.stats.drafted == theirs.stats.drafted
            assert ours.stats.width == width
            assert ours.usage == theirs.usage
        assert load.evaluations == load.texts > 0


def public_names(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def test_runtime_and_engine_have_the_same_methods() -> None:
    """But for a drafter of its own: an engine's thread owns those."""
    assert public_names(Runtime) ^ public_names(Engine) == {"start_drafter"}


@pytest.mark.parametrize("of", [engine_of, runtime_of])
def test_every_way_to_read_an_answer_gives_the_same(files: dict[str, Path], of: Any) -> None:
    with runtime_of(files, "none") as plain:
        wanted = [plain.generate(each, GREEDY, max_tokens=LENGTH).token_ids for each in PROMPTS]
    with of(files, OWN) as opened:

        def stream(**options: Any) -> GenerationStream:
            found: GenerationStream = opened.submit(
                PROMPTS[0], GREEDY, max_tokens=LENGTH, **options
            )
            return found

        async def by_token() -> list[int]:
            return [event.token_id async for event in stream()]

        async def by_round() -> list[int]:
            reading, tokens, rounds = stream(), [], []
            async for events in reading.rounds():
                tokens += [event.token_id for event in events]
                rounds += [event.round for event in events]
            assert rounds == sorted(rounds)
            assert (await reading.wait()).token_ids == tokens
            return tokens

        async def at_once() -> list[int]:
            return (await stream().wait()).token_ids

        handed: list[TokenEvent] = []
        assert stream().hand_to(handed.append).token_ids == wanted[0]
        assert [event.token_id for event in handed] == wanted[0]
        assert stream().drain().token_ids == wanted[0]
        for read in (by_token, by_round, at_once):
            assert asyncio.run(read()) == wanted[0]
        last = stream(logprobs=True)
        assert [event.token_id for event in last] == wanted[0]
        assert last.done
        assert last.result.token_ids == wanted[0]
        asked = {"max_tokens": LENGTH}
        assert opened.generate(PROMPTS[1], GREEDY, **asked).token_ids == wanted[1]
        assert [e.token_id for e in opened.stream(PROMPTS[1], GREEDY, **asked)] == wanted[1]
        assert next(opened.stream(PROMPTS[1], GREEDY, **asked)).logprob < 0.0
        many = opened.generate_many(PROMPTS, GREEDY, **asked)
        assert [each.token_ids for each in many] == wanted
        lengths = [3, LENGTH, None]
        each = opened.each_of_many(PROMPTS, GREEDY, max_tokens=lengths, indices=[0, 1, 2])
        assert [next(each).token_ids, next(each).token_ids] == [wanted[0][:3], wanted[1]]
        each.close()  # the third goes on without end: it is cancelled
        assert opened.generate(PROMPTS[0], GREEDY, **asked).token_ids == wanted[0]
        load, (slot,) = opened.statistics().load, opened.slots()
        assert load.evaluations == load.texts > 0
        assert load.pieces > 0
        assert (slot.busy, slot.drafter) == (False, named(OWN, files))
        assert slot.n_cached == opened.statistics().cells == len(PROMPTS[0]) + LENGTH - 1


@pytest.mark.parametrize("of", [engine_of, runtime_of])
def test_an_error_is_raised_however_an_answer_is_read(files: dict[str, Path], of: Any) -> None:
    """By each further reading, too: an answer that failed does not pass for one that ended."""
    with of(files, OWN) as opened:
        stream = opened.submit(PROMPTS[0], GREEDY, max_tokens=450)
        next(stream)
    for read in (stream.drain, lambda: list(stream), lambda: asyncio.run(stream.wait())):
        with pytest.raises(ClosedError):
            read()


@pytest.mark.parametrize("feature", [each for each in ALONE if each not in ("padding", "pairs")])
def test_several_slots_refuse_it_and_name_the_way_out(files: dict[str, Path], feature: str) -> None:
    drafter, options = ALONE[feature]
    with pytest.raises(OptionError, match="slots=1"):
        engine_of(files, drafter, slots=2, **options)


def test_an_engine_keeps_and_takes_up_session_files(files: dict[str, Path], tmp_path: Path) -> None:
    path, turn = tmp_path / "a.session", [*PROMPTS[0], 7, 7]
    with engine_of(files, OWN) as engine:
        first = engine.submit(PROMPTS[0], GREEDY, max_tokens=40)
        next(first)
        assert engine.save_session(path) > len(PROMPTS[0])  # it waited for the answer
        assert first.done
        wanted = engine.submit(turn, GREEDY, max_tokens=LENGTH).result
    with engine_of(files, OWN) as engine:
        assert engine.load_session(path) > len(PROMPTS[0])
        found = engine.submit(turn, GREEDY, max_tokens=LENGTH).result
    assert found.token_ids == wanted.token_ids
    assert found.usage.cached_tokens == wanted.usage.cached_tokens > 0
    with runtime_of(files, OWN) as runtime:
        assert runtime.load_session(path) > 0
        assert runtime.generate(turn, GREEDY, max_tokens=LENGTH).token_ids == wanted.token_ids
    with engine_of(files, OWN, slots=2) as engine:
        for call in (engine.save_session, engine.load_session):
            with pytest.raises(OptionError, match=r"2 slots: give slots=1"):
                call(path)


@pytest.mark.parametrize(
    "chosen",
    [
        {"drafter": "none"},
        {"drafter": TREE},
        {"drafter": LOOKUP},
        {"n_max": 1},
        {"n_max": 0},
        {"accept": "block"},
        {"accept": LOSSY},
        {"accept": LOSSY, "drafter": TREE, "n_max": 2},
    ],
    ids=str,
)
def test_a_runtimes_requests_choose_as_an_engines(
    files: dict[str, Path], chosen: dict[str, Any]
) -> None:
    options: dict[str, Any] = {"others": [named(TREE, files), LOOKUP], "rules": [LOSSY]}
    if "drafter" in chosen:
        chosen = {**chosen, "drafter": named(chosen["drafter"], files)}
    with engine_of(files, OWN, **options) as engine:
        wanted = [
            engine.submit(each, WHOLE, max_tokens=LENGTH, **chosen).result for each in PROMPTS
        ]
    with runtime_of(files, OWN, **options) as runtime:
        assert runtime.drafters == engine.drafters
        assert runtime.rules == engine.rules
        plain = runtime.generate(PROMPTS[0], WHOLE, max_tokens=LENGTH)
        found = [runtime.generate(each, WHOLE, max_tokens=LENGTH, **chosen) for each in PROMPTS]
        again = runtime.generate(PROMPTS[0], WHOLE, max_tokens=LENGTH)
    assert [each.token_ids for each in found] == [each.token_ids for each in wanted]
    assert [each.stats.drafter for each in found] == [each.stats.drafter for each in wanted]
    assert [each.stats.rule for each in found] == [each.stats.rule for each in wanted]
    assert (again.token_ids, again.stats.drafter) == (plain.token_ids, plain.stats.drafter)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"drafter": "ngram(order=2)"}, r"ngram\(order=2\) is none of the engine's"),
        ({"accept": LOSSY}, "is not exact, and the engine was not opened for such rules"),
        ({"n_max": -1}, "n_max is -1"),
        ({"max_token": 3}, "an answer has no option 'max_token': did you mean 'max_tokens'"),
    ],
)
def test_what_a_runtime_does_not_offer_is_said(
    files: dict[str, Path], options: dict[str, Any], problem: str
) -> None:
    with runtime_of(files, OWN) as runtime, pytest.raises(OptionError, match=problem):
        runtime.stream(PROMPTS[0], GREEDY, **options)


def test_a_drafter_is_not_chosen_while_another_answer_streams(files: dict[str, Path]) -> None:
    with runtime_of(files, OWN) as runtime:
        stream = runtime.stream(PROMPTS[0], GREEDY, max_tokens=LENGTH)
        later = runtime.stream(PROMPTS[1], GREEDY, max_tokens=LENGTH, drafter="none")
        first = next(stream)
        with pytest.raises(BusyError):
            next(later)
        assert runtime.drafter == named(OWN, files)
        tokens = [first.token_id, *(event.token_id for event in stream)]
    with runtime_of(files, "none") as plain:
        assert tokens == plain.generate(PROMPTS[0], GREEDY, max_tokens=LENGTH).token_ids


@pytest.mark.parametrize("drafter", [OWN, LOOKUP, "medusa(FILE:medusa, tree=3x2x1)"])
def test_a_runtimes_traces_are_an_engines(files: dict[str, Path], drafter: str) -> None:
    def told(traces: list[Any]) -> list[dict[str, Any]]:
        dropped = ("seconds", "evaluation")
        return [{k: v for k, v in t.to_dict().items() if k not in dropped} for t in traces]

    with engine_of(files, drafter) as engine:
        asked = engine.submit(PROMPTS[0], WHOLE, max_tokens=LENGTH, trace=True)
        wanted, ids = asked.result, [event.token_id for event in asked]
        traces = asked.take_traces()
    with runtime_of(files, drafter) as runtime:
        stream = runtime.stream(PROMPTS[0], WHOLE, max_tokens=LENGTH, trace=True)
        tokens, seen = [], []
        for event in stream:
            tokens.append(event.token_id)
            seen += stream.take_traces()
            assert len(seen) == event.round + 1  # a round's is there with its first token
    assert tokens == ids == wanted.token_ids
    assert told(seen) == told(traces)
    for ours in seen:
        assert ours.evaluation.texts == 1
        assert ours.evaluation.tokens == ours.evaluation.together == 1 + len(ours.nodes)
        assert 0.0 < ours.evaluation.single_s <= ours.evaluation.expected_s


@pytest.mark.parametrize("other", [TREE, "eagle(FILE:eagle, n=3)", "medusa(FILE:medusa, tree=2x2)"])
def test_an_interrupt_while_drafters_change_leaves_a_session_that_answers_as_a_fresh_one(
    files: dict[str, Path], other: str, whole_sweep: bool
) -> None:
    """Ctrl-C at lines of an answer that chose another drafter than the one before it."""
    chosen = named(other, files)

    def said(runtime: Runtime, place: int, drafter: str | None) -> tuple[list[int], int, int]:
        result = runtime.generate(PROMPTS[place], GREEDY, max_tokens=6, drafter=drafter)
        return result.token_ids, result.stats.drafted, result.stats.accepted

    with runtime_of(files, OWN, others=[chosen]) as runtime:
        fresh = []
        for drafter in (None, chosen):
            runtime.session.forget()
            fresh.append(said(runtime, 1, drafter))
        with Interrupted() as counting:
            said(runtime, 0, None)
            said(runtime, 1, chosen)
        for at in sampled_points(counting.lines, 24, whole=whole_sweep):
            with Interrupted(at):
                said(runtime, 0, None)
                said(runtime, 1, chosen)
            runtime.require_idle()
            where = f"after an interrupt before line {at} of {counting.lines}"
            assert said(runtime, 1, chosen)[0] == fresh[1][0], where
            assert said(runtime, 1, None)[0] == fresh[0][0], where
            runtime.session.forget()
            assert said(runtime, 1, chosen) == fresh[1], where
    assert counting.lines > 500
