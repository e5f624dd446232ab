"""The engine: every conversation gets the text that it gets alone, whatever the others do."""

from __future__ import annotations

import asyncio
import functools
import gc
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from support.every_drafter import DRAFTERS, named
from support.held_engine import answered_together
from support.tiny_models import F32

from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import (
    ClosedError,
    ContextFullError,
    OptionError,
)
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.engine import Engine, Session
from specrun.runtime.engine.schedule import Schedule

WHOLE = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
GREEDY = SamplingParams(temperature=0.0)
PROMPTS: list[list[int]] = [
    [3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4],
    [3, 1, 4, 1, 5, 9, 2, 6, 5, 3],
    [2, 7, 1, 8, 2, 8],
    [9, 9, 8, 9, 9],
    [7],
]
LENGTH = 24


def sized(n_ctx: int) -> ContextOptions:
    return ContextOptions(**{**F32, "n_ctx": n_ctx})


def alone(
    target: Path, drafter: str, params: SamplingParams, prompts: Sequence[Sequence[int]] = PROMPTS
) -> list[list[int]]:
    """The answers of a runtime, one after the other."""
    with Runtime(target, drafter, context=sized(512)) as runtime:
        return [runtime.generate(prompt, params, max_tokens=LENGTH).token_ids for prompt in prompts]


@functools.cache
def plain(target: Path, temperature: float) -> list[list[int]]:
    """The answers without drafts, each alone."""
    params = GREEDY if temperature == 0.0 else WHOLE.replace(seed=5)
    return alone(target, "none", params)


def is_drawn(drafter: str) -> bool:
    """Whether drafts may be drawn at temperature 1: then only the law is the target's own."""
    drawn = ("draft(", "partial(", "ngram(", "early-exit(", "sampling=", "auto(")
    return any(name in drafter for name in drawn)


TOGETHER = [
    (target, drafter)
    for target, drafter in DRAFTERS
    if "pass(" not in drafter and "space(" not in drafter
]


@pytest.mark.parametrize(("target", "drafter"), TOGETHER)
def test_texts_are_those_of_each_alone(files: dict[str, Path], target: str, drafter: str) -> None:
    expression = named(drafter, files)
    options = sized(512)
    with Engine(files[target], expression, slots=3, context=options) as engine:
        for params in (GREEDY, WHOLE.replace(seed=5)):
            if params is not GREEDY and is_drawn(drafter):
                continue
            results = answered_together(engine, PROMPTS, params, max_tokens=LENGTH)
            wanted = plain(files[target], params.temperature)
            assert [each.token_ids for each in results] == wanted
        load = engine.statistics().load
    assert load.texts_per_evaluation is not None
    assert load.texts_per_evaluation > 1.5, "conversations were not evaluated together"


def test_rows_of_another_conversation_would_be_seen(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from specrun.runtime.engine import slots

    placed = slots.PlacedRows

    def first_rows(rows: object, places: range) -> object:
        return placed(rows, range(len(places)))  # type: ignore[arg-type]

    monkeypatch.setattr(slots, "PlacedRows", first_rows)
    with Engine(files["shallow"], "none", slots=3, context=sized(512)) as engine:
        results = engine.generate_many(PROMPTS, GREEDY, max_tokens=LENGTH)
    assert [each.token_ids for each in results] != plain(files["shallow"], 0.0)


def test_log_probabilities_and_statistics_are_each_ones_own(files: dict[str, Path]) -> None:
    options = sized(512)
    with Runtime(files["shallow"], "prompt-lookup(min_ngram=1)", context=options) as runtime:
        wanted = [
            [(e.token_id, e.logprob) for e in runtime.stream(p, GREEDY, max_tokens=LENGTH)]
            for p in PROMPTS
        ]
    with Engine(files["shallow"], "prompt-lookup(min_ngram=1)", slots=4, context=options) as engine:
        streams = [
            engine.submit(prompt, GREEDY, max_tokens=LENGTH, logprobs=True) for prompt in PROMPTS
        ]
        got = [[(event.token_id, event.logprob) for event in stream] for stream in streams]
        stats = [stream.result.stats for stream in streams]
    for ours, theirs in zip(got, wanted, strict=True):
        assert [token for token, _ in ours] == [token for token, _ in theirs]
        assert [value for _, value in ours] == pytest.approx(
            [value for _, value in theirs], abs=1e-5
        )
    for each in stats:
        assert each.rounds > 0
        assert 0.0 < each.target_s <= each.wall_s


@pytest.mark.parametrize("drafter", ["none", "draft(FILE:twin, tree=2x2)", "prompt-lookup"])
def test_a_crowded_cache_changes_no_text(files: dict[str, Path], drafter: str) -> None:
    """Six long conversations in 256 cells: idle texts go, the newest wait, the oldest go on."""
    prompts = [[(7 * place + 3 * row) % 90 for place in range(60 + 20 * row)] for row in range(6)]
    wanted = alone(files["shallow"], "none", GREEDY, prompts)
    options = sized(256)
    with Engine(files["shallow"], named(drafter, files), slots=4, context=options) as engine:
        results = engine.generate_many(prompts, GREEDY, max_tokens=LENGTH)
        again = engine.generate_many(prompts[::-1], GREEDY, max_tokens=LENGTH)
        statistics = engine.statistics()
    assert [each.token_ids for each in results] == wanted
    assert [each.token_ids for each in again] == wanted[::-1]
    assert statistics.load.evicted > 0
    assert statistics.load.waited > 0
    assert statistics.cells <= statistics.n_ctx == 256


def test_the_oldest_takes_the_cells_of_the_newest(files: dict[str, Path]) -> None:
    """Two answers that each fit alone and not together: both end, with their own texts."""
    prompts = [[5, 3] * 20, [4, 9, 1] * 20]
    options = sized(256)
    with Runtime(files["shallow"], "none", context=options) as runtime:
        wanted = [runtime.generate(p, GREEDY, max_tokens=150).token_ids for p in prompts]
    with Engine(files["shallow"], "none", slots=2, context=options) as engine:
        results = engine.generate_many(prompts, GREEDY, max_tokens=150)
        load = engine.statistics().load
    assert [each.token_ids for each in results] == wanted
    assert load.preempted > 0


def test_a_prompt_is_not_read_before_all_of_it_fits(files: dict[str, Path]) -> None:
    """Its cells would go to the older answer, and it would be read again and again."""
    first, second = [5, 3] * 20, [4, 9, 1] * 75
    options = ContextOptions(**{**F32, "n_ctx": 256, "n_batch": 32})
    with Engine(files["shallow"], "none", slots=2, context=options) as engine:
        never = dict.fromkeys(engine.vocabulary.end_of_generation, float("-inf"))
        endless = GREEDY.replace(logit_bias=never)
        older = engine.submit(first, endless, max_tokens=180)
        next(older)
        newer = engine.submit(second, endless, max_tokens=4)
        results, load = [older.drain(), newer.drain()], engine.statistics().load
    assert [len(each.token_ids) for each in results] == [180, 4]
    assert load.preempted == 0
    assert load.pieces <= 2 + -(-len(second) // 32)


def test_a_prefix_that_another_slot_holds_is_not_evaluated_again(files: dict[str, Path]) -> None:
    system = [(11 * place) % 90 for place in range(100)]
    prompts = [[*system, 1 + row, 2] for row in range(3)]
    wanted = alone(files["shallow"], "none", GREEDY, prompts)
    with Engine(files["shallow"], "none", slots=3, context=sized(256)) as engine:
        first = engine.submit(prompts[0], GREEDY, max_tokens=LENGTH).result
        # Where each had cells of its own, three would not fit 256.
        others = engine.generate_many(prompts[1:], GREEDY, max_tokens=LENGTH)
        load, cells = engine.statistics().load, engine.statistics().cells
    assert [each.token_ids for each in (first, *others)] == wanted
    assert others[0].usage.cached_tokens == others[1].usage.cached_tokens == 100
    assert load.shared_prompt_tokens >= 100
    assert load.evicted == load.preempted == 0
    assert cells < 256


def test_an_answer_that_is_cancelled_frees_its_slot(files: dict[str, Path]) -> None:
    with Engine(files["shallow"], "none", slots=1, context=sized(4096)) as engine:
        endless = engine.submit(PROMPTS[0], GREEDY)
        assert next(endless).token_id is not None
        dropped = engine.submit(PROMPTS[1], GREEDY)
        del dropped
        gc.collect(1)  # a whole one takes longer than the endless answer
        waiting = engine.submit(PROMPTS[2], GREEDY, max_tokens=LENGTH)
        endless.cancel()
        assert waiting.result.token_ids == plain(files["shallow"], 0.0)[2]
        assert endless.result.finish_reason == "cancelled"


def test_what_one_asks_wrongly_is_no_matter_for_the_others(files: dict[str, Path]) -> None:
    with Engine(files["shallow"], "none", slots=2, context=sized(256)) as engine:
        good = engine.submit(PROMPTS[0], GREEDY, max_tokens=LENGTH)
        too_long = engine.submit([1] * 300, GREEDY)
        with pytest.raises(ContextFullError, match="300 tokens"):
            list(too_long)
        with pytest.raises(OptionError, match="prompt token 1 is 99999"):
            engine.submit([1, 99999])
        with pytest.raises(OptionError, match=r"max_tokens is 1\.5"):
            engine.submit([1], max_tokens=1.5)  # type: ignore[arg-type]
        assert good.result.token_ids == plain(files["shallow"], 0.0)[0]


def test_streams_of_an_event_loop_and_of_threads(files: dict[str, Path]) -> None:
    wanted = plain(files["shallow"], 0.0)

    async def read(engine: Engine, prompt: Sequence[int]) -> list[int]:
        stream = engine.submit(prompt, GREEDY, max_tokens=LENGTH)
        tokens = [event.token_id async for event in stream]
        assert (await stream.wait()).token_ids == tokens
        return tokens

    async def read_all(engine: Engine) -> list[list[int]]:
        return await asyncio.gather(*(read(engine, prompt) for prompt in PROMPTS))

    with Engine(files["shallow"], "none", slots=2, context=sized(512)) as engine:
        assert asyncio.run(read_all(engine)) == wanted
        found: dict[int, list[int]] = {}

        def ask(index: int) -> None:
            stream = engine.submit(PROMPTS[index], GREEDY, max_tokens=LENGTH)
            found[index] = [event.token_id for event in stream]

        threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(PROMPTS))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [found[index] for index in range(len(PROMPTS))] == wanted


def test_closing_ends_every_answer(files: dict[str, Path]) -> None:
    engine = Engine(files["shallow"], "none", slots=1, context=sized(4096))
    streams = [engine.submit(prompt, GREEDY) for prompt in PROMPTS]
    next(streams[0])
    engine.close()
    engine.close()
    for stream in streams:
        with pytest.raises(ClosedError):
            list(stream)
    with pytest.raises(ClosedError):
        engine.submit(PROMPTS[0])


def test_a_long_prompt_is_read_between_the_rounds_of_others(files: dict[str, Path]) -> None:
    """While 1,000 tokens are read in pieces of 256, another answer has a token after each."""
    with Engine(files["shallow"], "none", slots=2, context=sized(4096)) as engine:
        talker = engine.submit(PROMPTS[0], GREEDY)
        next(talker)
        before = engine.statistics().load
        long = engine.submit([(7 * place) % 90 for place in range(1000)], GREEDY, max_tokens=1)
        assert len(long.result.token_ids) == 1
        load = engine.statistics().load
        talker.cancel()
    pieces = load.pieces - before.pieces
    assert pieces >= 4
    assert load.evaluations - before.evaluations >= pieces


def test_a_short_prompt_does_not_wait_for_a_long_one(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the long one, which was there before, reads a piece of its own every other turn."""
    seen: list[int] = []
    read = Schedule._read_piece

    def noted(schedule: Schedule, session: Session, piece: int) -> None:
        assert session.running is not None
        seen.append(len(session.running.request.prompt))
        read(schedule, session, piece)

    monkeypatch.setattr(Schedule, "_read_piece", noted)
    with Engine(files["shallow"], "none", slots=3, context=sized(4096)) as engine:
        long = engine.submit([(7 * place) % 90 for place in range(1000)], GREEDY, max_tokens=1)
        while not seen:
            time.sleep(0.0005)
        shorts = [
            engine.submit([place + 5, *PROMPTS[0]], GREEDY, max_tokens=1) for place in range(40)
        ]
        results = [long.result, *(each.result for each in shorts)]
    assert all(len(each.token_ids) == 1 for each in results)
    order = "".join("l" if n == 1000 else "s" for n in seen)
    assert "sl" in order, "short prompts waited until the long one was read"
    # Two short prompts fit a turn: the long one is passed over in no two turns.
    assert max(map(len, order[: order.rindex("l")].split("l"))) <= 2


@pytest.mark.parametrize(
    ("slots", "options", "problem"),
    [
        (0, {}, "slots is 0"),
        (2.5, {}, "slots is 2.5"),
        (2, {"drafter": "pass(FILE:pass, n=2)"}, "pass.* give slots=1"),
        (2, {"shape": "fixed"}, "shape is 'fixed'"),
        (2, {"backend_sampling": "on"}, "one conversation at a time"),
        (100, {"drafter": "medusa(FILE:medusa, tree=3x2x1)"}, "at most 42 slots, not 100"),
        (2, {"accept": "token-cascade(alpha=0.5)", "drafter": "draft(FILE:twin)"}, "give slots=1"),
    ],
)
def test_what_an_engine_cannot_do_is_said(
    files: dict[str, Path], slots: int, options: dict[str, str], problem: str
) -> None:
    drafter = named(options.pop("drafter", "none"), files)
    with pytest.raises(OptionError, match=problem):
        Engine(files["shallow"], drafter, slots=slots, **options)


def threads_of_engines() -> Iterator[threading.Thread]:
    return (each for each in threading.enumerate() if each.name == "specrun engine")


def test_conversations_are_as_long_as_the_model_was_trained_for(files: dict[str, Path]) -> None:
    """2,048 cells for two conversations of a model that was trained for 1,024 tokens."""
    prompts = [[(7 * place + row) % 90 for place in range(1000)] for row in range(2)]
    with Engine(files["shallow"], "none", slots=2, context=sized(2048)) as engine:
        results = engine.generate_many(prompts, GREEDY)
        load = engine.statistics().load
        assert engine.n_ctx == 2048
    assert [len(each.token_ids) for each in results] == [25, 25]
    assert [each.finish_reason for each in results] == ["length", "length"]
    assert load.waited == load.preempted == load.evicted == 0


def test_no_thread_is_left(files: dict[str, Path]) -> None:
    before = set(threads_of_engines())
    with Engine(files["shallow"], "none", slots=1, context=sized(256)):
        assert set(threads_of_engines()) - before
    deadline = time.monotonic() + 5.0
    while set(threads_of_engines()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not set(threads_of_engines()) - before
