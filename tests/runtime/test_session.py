"""Sessions: what a cache carries from answer to answer, and that no interruption leaves it wrong.

The yardstick throughout is a fresh runtime: whatever happened before, an answer is the one it would
give.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from support.tiny_models import F32, fresh_logits

from specrun.bindings.errors import (
    BusyError,
    ClosedError,
    ContextFullError,
    OptionError,
    StaleViewError,
)
from specrun.runtime import GenerationResult, Runtime, SamplingParams
from specrun.runtime.language import quoted

NO_END = {319: float("-inf"), 318: float("-inf"), 317: float("-inf")}
GREEDY = SamplingParams(temperature=0.0, logit_bias=NO_END)
WARM = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, logit_bias=NO_END, seed=7)
PROMPT = list(b"the quick brown fox, the quick")
OTHER = list(b"a different question altogether")
DRAFTERS = ["none", "draft", "draft-argmax", "prompt-lookup"]


@pytest.fixture
def expressions(tiny_flat_twin) -> dict[str, str]:
    twin = quoted(str(tiny_flat_twin))
    return {
        "none": "none",
        "draft": f"draft({twin}, n=4)",
        "draft-argmax": f"draft({twin}, n=4, sampling=argmax)",
        "prompt-lookup": "prompt-lookup(n=4, min_ngram=1)",
        "tree": f"draft({twin}, tree=2x2)",
        "cascade": f"cascade(draft({twin}, n=4), prompt-lookup(n=2, min_ngram=1))",
    }


@pytest.fixture
def open_runtime(tiny_model, expressions) -> Iterator:
    """Opens runtimes by the drafter's name; all are closed at the end."""
    opened: list[Runtime] = []

    def build(drafter: str = "none", **options) -> Runtime:
        opened.append(Runtime(tiny_model, expressions.get(drafter, drafter), **{**F32, **options}))
        return opened[-1]

    yield build
    for runtime in opened:
        runtime.close()


def answer(runtime: Runtime, prompt=PROMPT, params=GREEDY, max_tokens=24) -> GenerationResult:
    return runtime.generate(prompt, params, max_tokens=max_tokens)


def fresh(open_runtime, drafter: str, prompt=PROMPT, params=GREEDY, max_tokens=24) -> list[int]:
    return answer(open_runtime(drafter), prompt, params, max_tokens).token_ids


# -- prefixes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_second_turn_reuses_the_first_and_answers_as_a_fresh_runtime(
    open_runtime, drafter, params
):
    runtime = open_runtime(drafter)
    first = answer(runtime, params=params)
    turn = [*PROMPT, *first.token_ids, *b" and then"]
    second = answer(runtime, turn, params)
    # All but the answer's last token, which no evaluation has read.
    assert second.usage.cached_tokens == len(PROMPT) + len(first.token_ids) - 1
    assert second.usage.prompt_tokens == len(turn)
    assert second.token_ids == fresh(open_runtime, drafter, turn, params)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_same_prompt_again_evaluates_one_token(open_runtime, drafter):
    runtime = open_runtime(drafter)
    first = answer(runtime)
    again = answer(runtime)
    assert first.usage.cached_tokens == 0
    assert again.usage.cached_tokens == len(PROMPT) - 1
    assert again.token_ids == first.token_ids


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("shared", [0, 1, 10, 29])
def test_a_prompt_that_departs_reuses_what_is_shared(open_runtime, drafter, shared):
    runtime = open_runtime(drafter)
    answer(runtime)
    prompt = [*PROMPT[:shared], 200, 201, *OTHER]
    result = answer(runtime, prompt)
    assert result.usage.cached_tokens == shared
    assert result.token_ids == fresh(open_runtime, drafter, prompt)


def test_a_prompt_that_is_a_prefix_of_the_last_one(open_runtime):
    runtime = open_runtime("draft")
    answer(runtime)
    result = answer(runtime, PROMPT[:5])
    assert result.usage.cached_tokens == 4
    assert result.token_ids == fresh(open_runtime, "draft", PROMPT[:5])


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_after_many_answers_the_next_logits_are_those_of_a_fresh_evaluation(open_runtime, drafter):
    runtime = open_runtime(drafter)
    prompt = list(PROMPT)
    for turn in range(4):
        prompt += answer(runtime, prompt, WARM.replace(seed=turn), 12).token_ids + list(b" more")
    event = next(runtime.stream(prompt, GREEDY))
    row = fresh_logits(runtime.model, prompt)[-1].astype(np.float64)
    expected = row[event.token_id] - np.log(np.exp(row - row.max()).sum()) - row.max()
    assert event.logprob == pytest.approx(expected, abs=1e-4)


# -- interruptions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["close", "drop", "break"])
@pytest.mark.parametrize("events", [1, 2, 5])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_stream_left_midway_leaves_the_session_usable(open_runtime, drafter, events, how):
    runtime = open_runtime(drafter)
    stream = runtime.stream(PROMPT, WARM, max_tokens=24)
    for count, _event in enumerate(stream, 1):
        if count == events:
            break
    if how == "close":
        stream.close()
    del stream  # without a cycle, this alone must end it
    result = answer(runtime, OTHER, WARM)
    assert result.token_ids == fresh(open_runtime, drafter, OTHER, WARM)


def test_a_loop_left_by_an_exception_leaves_the_session_usable(open_runtime):
    runtime = open_runtime("draft")

    def consume():
        for _event in runtime.stream(PROMPT, GREEDY):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        consume()
    assert answer(runtime).token_ids == fresh(open_runtime, "draft")


def test_a_cancelled_answer_says_so_and_keeps_its_text(open_runtime):
    stream = open_runtime("draft").stream(PROMPT, GREEDY, max_tokens=20)
    events = [next(stream) for _ in range(3)]
    stream.close()
    assert stream.result.finish_reason == "cancelled"
    assert stream.result.token_ids == [event.token_id for event in events]
    assert stream.result.usage.completion_tokens == 3
    assert list(stream) == []


@pytest.mark.parametrize("stop", [(), ("z",)], ids=["", "stop"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_drained_answer_is_the_streamed_one_and_makes_no_event(
    open_runtime, monkeypatch, drafter, stop
):
    letters = dict.fromkeys(range(97, 123), 8.0)
    params = WARM.replace(logit_bias={**NO_END, **letters}, stop=stop)
    events = list(stream := open_runtime(drafter).stream(PROMPT, params, max_tokens=24))
    streamed = stream.result
    monkeypatch.setattr("specrun.runtime.engine.answer.TokenEvent", None)
    drained = answer(open_runtime(drafter), params=params)
    assert drained.token_ids == streamed.token_ids == [event.token_id for event in events]
    assert drained.text == streamed.text == "".join(event.text for event in events)
    assert drained.finish_reason == streamed.finish_reason
    assert drained.usage == streamed.usage
    counted = ("rounds", "drafted", "accepted", "acceptance_by_position", "tested_by_position")
    for name in counted:
        assert getattr(drained.stats, name) == getattr(streamed.stats, name)
    with pytest.raises(TypeError):  # the control: a stream does make them
        next(open_runtime(drafter).stream(PROMPT, params))


@pytest.mark.parametrize("events", [1, 2, 4])
def test_a_stream_that_is_drained_midway_ends_as_one_that_is_iterated(open_runtime, events):
    whole = answer(open_runtime("draft"))
    stream = open_runtime("draft").stream(PROMPT, GREEDY, max_tokens=24)
    first = [next(stream) for _ in range(events)]
    result = stream.drain()
    assert [event.token_id for event in first] == whole.token_ids[:events]
    assert (result.token_ids, result.text) == (whole.token_ids, whole.text)
    assert list(stream) == []


def test_a_second_call_while_one_streams_is_refused(open_runtime):
    runtime = open_runtime("draft")
    stream = runtime.stream(PROMPT, GREEDY, max_tokens=8)
    first = next(stream)
    with pytest.raises(BusyError, match="close"):
        answer(runtime)
    with pytest.raises(BusyError):
        next(runtime.stream(OTHER, GREEDY))
    # The refusal did not disturb the one that streams.
    assert [first.token_id, *(event.token_id for event in stream)] == fresh(
        open_runtime, "draft", max_tokens=8
    )
    answer(runtime)


def test_of_two_streams_made_at_once_the_second_to_start_is_refused(open_runtime):
    runtime = open_runtime()
    first, two = (
        runtime.stream(PROMPT, GREEDY, max_tokens=3),
        runtime.stream(OTHER, GREEDY, max_tokens=3),
    )
    next(two)
    with pytest.raises(BusyError):
        next(first)
    assert len(list(two)) == 2


@pytest.mark.parametrize("drafter", ["none", "draft"])
def test_closing_the_runtime_ends_a_stream_with_an_error(open_runtime, drafter):
    runtime = open_runtime(drafter)
    stream = runtime.stream(PROMPT, GREEDY)
    event = next(stream)
    runtime.close()
    with pytest.raises(ClosedError):
        list(stream)
    assert stream.result.token_ids == [event.token_id]
    assert stream.result.finish_reason == "cancelled"
    with pytest.raises((ClosedError, StaleViewError)):  # not freed memory
        _ = event.logprob


def test_a_stream_that_was_never_started_outlives_the_runtime(open_runtime):
    runtime = open_runtime()
    stream = runtime.stream(PROMPT, GREEDY)
    runtime.close()
    with pytest.raises(ClosedError):
        next(stream)
    assert stream.result.token_ids == []


# -- the end of the context ------------------------------------------------------------------------


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafter", ["draft-argmax", "prompt-lookup"])
def test_a_full_context_ends_the_answer_at_the_same_token_with_and_without_drafter(
    open_runtime, drafter, params
):
    prompt = [*PROMPT] * 8  # 240 of 256 positions
    plain = answer(open_runtime("none"), prompt, params, None)
    result = answer(open_runtime(drafter), prompt, params, None)
    assert plain.finish_reason == result.finish_reason == "length"
    # The last token needs no position: it is read from the row of the one before.
    assert len(plain.token_ids) == 256 - len(prompt) + 1
    assert result.token_ids == plain.token_ids


@pytest.mark.parametrize("length", [255, 256])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_prompt_that_just_fits(open_runtime, drafter, length):
    prompt = (PROMPT * 9)[:length]
    runtime = open_runtime(drafter)
    result = answer(runtime, prompt)
    assert result.finish_reason == "length"
    assert result.token_ids == fresh(open_runtime, "none", prompt)
    assert len(result.token_ids) == 257 - length
    assert answer(runtime).token_ids == fresh(open_runtime, drafter)  # room again


def test_a_prompt_larger_than_the_context_is_refused(open_runtime):
    runtime = open_runtime("draft")
    with pytest.raises(ContextFullError, match=r"257 tokens and the context 256.*-c") as caught:
        answer(runtime, (PROMPT * 9)[:257])
    assert caught.value.exit_code == 5
    assert answer(runtime).token_ids == fresh(open_runtime, "draft")


def test_a_drafter_with_a_shorter_context_drafts_on(open_runtime, tiny_folder, tiny_model):
    from support.tiny_models import CHAT

    from specrun.convert.random_model import RandomLlama, write_random_llama

    path = tiny_folder / "short.gguf"
    write_random_llama(path, RandomLlama(**{**CHAT, "context": 256, "scale": 2.0}), force=True)
    with Runtime(
        tiny_model, f"draft({quoted(str(path))}, n=4)", **{**F32, "n_ctx": 512}
    ) as runtime:
        result = answer(runtime, (PROMPT * 9)[:250], max_tokens=30)
        assert result.stats.drafted > 3 * result.stats.rounds
        expected = answer(open_runtime("none", n_ctx=512), (PROMPT * 9)[:250], max_tokens=30)
        assert result.token_ids == expected.token_ids


# -- limits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["", []], ids=["text", "tokens"])
def test_an_empty_prompt_is_refused(open_runtime, prompt):
    with pytest.raises(OptionError, match="empty"):
        answer(open_runtime(), prompt)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("max_tokens", [0, 1, 2, 5, 6])
def test_max_tokens_is_kept_to_the_token(open_runtime, drafter, max_tokens):
    result = answer(open_runtime(drafter), max_tokens=max_tokens)
    assert len(result.token_ids) == max_tokens == result.usage.completion_tokens
    assert result.finish_reason == "length"
    assert result.token_ids == fresh(open_runtime, "none", max_tokens=max_tokens)


@pytest.mark.parametrize("limit", [-1, 1.5, 2.0, "3", True, float("inf")], ids=repr)
def test_a_limit_that_is_no_count_is_refused(open_runtime, limit):
    with pytest.raises(OptionError, match=f"max_tokens is {limit!r}: give a whole number"):
        answer(open_runtime(), max_tokens=limit)


def test_a_limit_of_numpys_is_a_number(open_runtime):
    assert len(answer(open_runtime(), max_tokens=np.int64(2)).token_ids) == 2


# -- stop strings ----------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("start", [0, 3, 7])
@pytest.mark.parametrize("length", [1, 3, 6])
def test_a_stop_string_across_tokens_and_rounds(open_runtime, drafter, start, length):
    letters = dict.fromkeys(range(97, 123), 8.0)  # so that the text is made of whole characters
    params = GREEDY.replace(logit_bias={**NO_END, **letters})
    whole = answer(open_runtime("none"), params=params)
    runtime = open_runtime(drafter)
    stop = runtime.vocabulary.detokenize(whole.token_ids[start : start + length])
    result = answer(runtime, params=params.replace(stop=stop))
    assert result.text == whole.text[: whole.text.index(stop)]
    assert result.finish_reason == "stop"
    assert result.token_ids == whole.token_ids[: len(result.token_ids)]
    assert (
        answer(runtime, params=params).token_ids == whole.token_ids
    )  # nothing is left of the early end


def test_a_stop_string_that_never_comes_changes_nothing(open_runtime):
    runtime = open_runtime("draft")
    plain = answer(runtime)
    result = answer(runtime, params=GREEDY.replace(stop=("\x00never\x00",)))
    assert (result.text, result.token_ids, result.finish_reason) == (
        plain.text,
        plain.token_ids,
        "length",
    )


# -- ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_an_end_token_ends_the_answer_even_when_drafted(open_runtime, drafter):
    params = WARM.replace(logit_bias={319: 4.0, 318: float("-inf"), 317: float("-inf")})
    endings = set()
    for seed in range(12):
        result = answer(open_runtime("none"), params=params.replace(seed=seed), max_tokens=40)
        runtime = open_runtime(drafter)
        other = answer(runtime, params=params.replace(seed=seed), max_tokens=40)
        for ended in (result, other):
            assert 319 not in ended.token_ids[:-1]
            assert (ended.finish_reason == "stop") == (ended.token_ids[-1] == 319)
            assert "<|end|>" not in ended.text
        if drafter != "draft":
            assert other.token_ids == result.token_ids
        endings.add(other.finish_reason)
        turn = [*PROMPT, *other.token_ids, *b"x"]
        assert answer(runtime, turn).token_ids == fresh(open_runtime, drafter, turn)
    assert "stop" in endings
