"""Handing out: tokens given to a consumer while a device evaluates the next round.

No device is here, so a context is told that it has one: the order of calls is then a device's.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.tiny_models import F32

from specrun.bindings.errors import DecodeError
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.language import quoted
from specrun.runtime.round import TokenEvent

NO_END = {319: float("-inf"), 318: float("-inf"), 317: float("-inf")}
GREEDY = SamplingParams(temperature=0.0, logit_bias=NO_END)
WARM = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, logit_bias=NO_END)
PROMPT = list(b"the quick brown fox, the quick")


@pytest.fixture(params=["none", "draft", "prompt-lookup"])
def runtime(request, tiny_model, tiny_flat_twin) -> Iterator[Runtime]:
    drafter = f"draft({quoted(str(tiny_flat_twin))}, n=4)"
    given = drafter if request.param == "draft" else request.param
    with Runtime(tiny_model, given, **F32) as opened:
        yield opened


@pytest.fixture
def device(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    monkeypatch.setattr(runtime.session.target.context, "waits_for_device", True)
    return runtime


def _stream(runtime: Runtime, params: SamplingParams = GREEDY, *, logprobs: bool = False, n=24):
    return runtime.session.stream(PROMPT, params, seed=3, max_tokens=n, logprobs=logprobs)


def _said(events: list[TokenEvent]) -> list[tuple[int, str, str, int]]:
    return [(event.token_id, event.text, event.origin, event.round) for event in events]


def _evaluations(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows with every evaluation of the target."""
    context = runtime.session.target.context
    evaluated: list[int] = []
    decode = context.decode

    def counted(batch):
        evaluated.append(batch.n_tokens)
        return decode(batch)

    monkeypatch.setattr(context, "decode", counted)
    return evaluated


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "warm"])
def test_the_same_events_as_a_loop_gets(runtime, monkeypatch, params):
    looped = list(_stream(runtime, params))
    expected = _stream(runtime, params).drain()
    for waits in (False, True):
        monkeypatch.setattr(runtime.session.target.context, "waits_for_device", waits)
        handed: list[TokenEvent] = []
        result = _stream(runtime, params).hand_to(handed.append)
        assert _said(handed) == _said(looped)
        drained = _stream(runtime, params).drain()
        for ended in (result, drained):
            assert (ended.text, ended.token_ids) == (expected.text, expected.token_ids)
            assert ended.finish_reason == expected.finish_reason
            assert ended.stats.rounds == expected.stats.rounds
        assert runtime.session.target.context.while_computing is None


def test_a_round_is_handed_out_while_the_next_is_evaluated(device, monkeypatch):
    evaluated, at = _evaluations(device, monkeypatch), []
    _stream(device).hand_to(lambda event: at.append((event.round, len(evaluated))))
    rounds = dict(at)
    first, last = rounds[0], max(rounds)
    # All but the last are said when one more evaluation has begun.
    assert all(rounds[number] == first + number for number in range(last))
    assert rounds[last] == first + last - 1 or last == 0


def test_without_a_device_it_is_handed_out_before(runtime, monkeypatch):
    evaluated, at = _evaluations(runtime, monkeypatch), []
    _stream(runtime).hand_to(lambda event: at.append((event.round, len(evaluated))))
    first = at[0][1]
    assert [count for _, count in at] == [first + number for number, _ in at]


@pytest.mark.parametrize("how", ["stop strings", "log-probabilities"])
def test_what_decides_or_reads_rows_is_handed_out_before(device, monkeypatch, how):
    whole = _stream(device).drain()
    evaluated, at = _evaluations(device, monkeypatch), []
    logprobs = how == "log-probabilities"
    params = GREEDY if logprobs else GREEDY.replace(stop=(whole.text[8:11],))

    def consume(event: TokenEvent) -> None:
        at.append((event.round, len(evaluated)))
        if logprobs:
            assert event.logprob <= 0.0

    result = _stream(device, params, logprobs=logprobs).hand_to(consume)
    assert [count for _, count in at] == [at[0][1] + number for number, _ in at]
    if not logprobs:
        assert result.text == whole.text[: whole.text.index(whole.text[8:11])]
        assert result.finish_reason == "stop"


def test_what_was_decided_before_a_failure_is_said(device, monkeypatch):
    context = device.session.target.context
    decode, calls, handed = context.decode, [], []

    def fails_at_last(batch):
        calls.append(1)
        if len(calls) == 5:
            raise DecodeError("no more", -3)
        return decode(batch)

    monkeypatch.setattr(context, "decode", fails_at_last)
    stream = _stream(device)
    with pytest.raises(DecodeError):
        stream.hand_to(handed.append)
    tokens = [event.token_id for event in handed]
    assert tokens == stream.result.token_ids
    assert device.session.conversation.tokens[len(PROMPT) :] == tokens
    monkeypatch.setattr(context, "decode", decode)
    assert context.while_computing is None
    _stream(device).drain()


@pytest.mark.parametrize("problem", [KeyboardInterrupt, ValueError])
def test_a_consumer_that_raises_ends_the_answer(device, problem):
    whole = _stream(device).drain().token_ids
    seen: list[int] = []

    def consume(event: TokenEvent) -> None:
        seen.append(event.token_id)
        if len(seen) == 7:
            raise problem

    stream = _stream(device)
    with pytest.raises(problem):
        stream.hand_to(consume)
    assert seen == whole[:7]
    assert stream.result.token_ids == whole[:7]
    assert stream.result.finish_reason == "cancelled"
    assert _stream(device).drain().token_ids == whole
