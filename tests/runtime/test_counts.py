"""Accepted tokens are those that were handed out, wherever an answer ends within a round."""

from __future__ import annotations

import pytest

from specrun.runtime.engine import Engine, Runtime
from specrun.runtime.laws import SamplingParams

ASK = [{"role": "user", "content": "What does shutil.copytree do?"}]


@pytest.fixture(scope="module")
def runtime():
    with Runtime.demo("draft(n=8)", n_ctx=256, n_threads=1, trust=True) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def whole(runtime, prompt):
    """An answer at temperature 0, whose text has many places to stop at."""
    return runtime.generate(prompt, SamplingParams(temperature=0.0), max_tokens=40)


@pytest.fixture(scope="module")
def prompt(runtime):
    return runtime.chat_prompt(ASK)


def ends(text: str) -> list[str]:
    return [text[place : place + 3] for place in range(1, len(text) - 3, 4)]


def test_a_stop_string_within_a_round(runtime, prompt, whole):
    cut = 0
    for stop in ends(whole.text):
        params = SamplingParams(temperature=0.0, stop=(stop,))
        drained = runtime.generate(prompt, params, max_tokens=40)
        events = list(runtime.stream(prompt, params, max_tokens=40))
        drafted = sum(event.origin == "drafted" for event in events)
        assert drained.stats.accepted == drafted <= drained.usage.completion_tokens
        assert drained.stats.accepted <= drained.stats.drafted
        assert len(events) == drained.usage.completion_tokens
        cut += drained.stats.accepted + drained.stats.rounds > len(events)
    assert cut  # some of them end within a round


@pytest.mark.parametrize("most", range(1, 14))
def test_a_limit_within_a_round(runtime, prompt, most):
    result = runtime.generate(prompt, SamplingParams(temperature=0.0), max_tokens=most)
    assert result.stats.accepted <= result.usage.completion_tokens <= most


def test_a_stream_that_is_left_within_a_round(runtime, prompt):
    for count in range(1, 12):
        stream = runtime.stream(prompt, SamplingParams(temperature=0.0), max_tokens=40)
        taken = [next(stream) for _ in range(count)]
        stream.close()
        drafted = sum(event.origin == "drafted" for event in taken)
        assert stream.result.stats.accepted == drafted
        assert stream.result.usage.completion_tokens == count


def test_several_answers_of_an_engine(prompt, whole):
    with Engine.demo("draft(n=8)", slots=2, n_ctx=512, n_threads=1, trust=True) as engine:
        streams = [
            engine.submit(prompt, SamplingParams(temperature=0.0, stop=(stop,)), max_tokens=40)
            for stop in ends(whole.text)[:6]
        ]
        for stream in streams:
            drafted = sum(event.origin == "drafted" for event in stream)
            assert stream.result.stats.accepted == drafted
            assert drafted <= stream.result.usage.completion_tokens
