"""Grammars that take their time: their conversations wait, and all others go on."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from specrun.runtime import Engine, Grammar, GrammarError, SamplingParams
from specrun.runtime.grammar import state
from specrun.runtime.grammar.process import GrammarProcess, ProcessEnded

BOUND = SamplingParams(temperature=0.0, grammar=Grammar.regex("[a-z ]{20}"))
FREE = SamplingParams(temperature=0.0)


class Delay:
    """Holds back what grammars say until it is let go, from one moment on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free = threading.Event()
        self.free.set()
        self.asked = threading.Event()
        reply = GrammarProcess.reply

        def late(process: GrammarProcess, wait: float | None = None) -> Any:
            if not self.free.wait(wait):
                self.asked.set()
                return None
            return reply(process, wait)

        monkeypatch.setattr(GrammarProcess, "reply", late)


@pytest.mark.parametrize("drafter", ["none", "prompt-lookup", "draft"])
def test_others_go_on_while_a_grammar_is_slow(
    monkeypatch: pytest.MonkeyPatch, drafter: str
) -> None:
    delay = Delay(monkeypatch)
    with Engine.demo(drafter, slots=2, n_threads=1) as engine:
        wanted = engine.submit("def f(", BOUND, max_tokens=30).result
        alone = engine.submit("os.", FREE, max_tokens=40).result
        delay.free.clear()
        slow = engine.submit("def f(", BOUND, max_tokens=30)
        assert delay.asked.wait(10)
        for _ in range(2):
            assert engine.submit("os.", FREE, max_tokens=40).result.token_ids == alone.token_ids
        assert not slow.done
        delay.free.set()
        assert slow.result.text == wanted.text


def test_an_answer_that_waits_for_its_grammar_can_be_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    delay = Delay(monkeypatch)
    with Engine.demo("none", slots=1, n_threads=1) as engine:
        assert engine.submit("def f(", BOUND, max_tokens=2).result.text
        delay.free.clear()
        slow = engine.submit("def f(", BOUND, max_tokens=30)
        assert delay.asked.wait(10)
        slow.cancel()
        assert slow.result.finish_reason == "cancelled"
        assert engine.submit("os.", FREE, max_tokens=3).result.token_ids


def test_a_grammar_that_is_too_slow_ends_its_answer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine.demo("none", slots=2, n_threads=1) as engine:
        assert engine.submit("def f(", BOUND, max_tokens=2).result.text
        reply = GrammarProcess.reply
        begun = time.monotonic()

        def never(process: GrammarProcess, wait: float | None = None) -> Any:
            if time.monotonic() < begun + 0.5:
                return None
            raise ProcessEnded(in_time=False)

        monkeypatch.setattr(GrammarProcess, "reply", never)
        slow = engine.submit("def f(", BOUND, max_tokens=30)
        assert engine.submit("os.", FREE, max_tokens=3).result.token_ids
        with pytest.raises(GrammarError, match=rf"longer than {state.PLACE_SECONDS:g} s"):
            _ = slow.result
        monkeypatch.setattr(GrammarProcess, "reply", reply)
        assert engine.submit("def f(", BOUND, max_tokens=30).result.token_ids
