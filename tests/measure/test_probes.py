"""The timing proxies, on a scripted clock: every second of a round belongs to exactly one part."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support.scripted import PLAIN, LawTable, ScriptedDrafter, TableTarget, conversation_of

from measure.overhead import probes
from measure.overhead.device import DeviceCounts
from measure.overhead.probes import Stopwatch, TimedDrafter, TimedRule
from specrun.runtime.acceptance import build_rule
from specrun.runtime.laws import SeededNoise
from specrun.runtime.round.loop import DecodeSettings, RoundLimits, decode_rounds
from specrun.runtime.trees import DraftTree


class Clock:
    """Moves on only where the script says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(probes, "time", SimpleNamespace(perf_counter=clock))
    return clock


def test_parts_add_up_to_the_round(clock: Clock) -> None:
    native, device = {"target": 0.0, "drafter": 0.0}, DeviceCounts(busy_s=100.0)
    watch = Stopwatch(lambda: native["target"], lambda: native["drafter"], device)

    def spend(part: str, seconds: float, inside: str = "", native_s: float = 0.0) -> None:
        clock.now += seconds
        setattr(watch, part, getattr(watch, part) + seconds)
        if inside:
            native[inside] += native_s

    watch.begin_round()
    spend("draft", 5.0, "drafter", 4.0)
    spend("evaluate", 10.0, "target", 8.0)
    watch.law += 2.0
    spend("rule", 3.0)
    spend("commit", 1.0)
    clock.now += 0.5
    device.hidden_s, device.busy_s = 2.0, 104.5
    watch.begin_round()
    (times,) = watch.rounds
    assert (times.draft, times.batch, times.law, times.acceptance, times.commit, times.text) == (
        1,
        2,
        2,
        1,
        1,
        0.5,
    )
    assert (times.target_native, times.drafter_native) == (8.0, 4.0)
    assert times.overhead == 7.5
    # Of 8 s in native calls 2 are not the device's, and 1.5 it stood still.
    assert (times.device.busy_s, times.exposed, times.share) == (4.5, 9.0, 9.0 / 13.5)


def test_where_the_drafter_is_not_asked_a_round_begins_with_its_evaluation(clock: Clock) -> None:
    watch = Stopwatch(lambda: 0.0, lambda: 0.0, DeviceCounts())
    for asked in (True, False, False, True, False):
        if asked:
            watch.begin_round()
            clock.now += 1.0
        watch.begin_evaluation()
        clock.now += 10.0
    assert [times.overhead for times in watch.rounds] == [11.0, 10.0, 10.0, 11.0]


def test_an_abandoned_round_is_not_counted(clock: Clock) -> None:
    watch = Stopwatch(lambda: 0.0, lambda: 0.0, DeviceCounts())
    watch.begin_round()
    watch.abandon()
    clock.now += 100.0
    watch.begin_round()
    assert watch.rounds == []


def test_wrapped_parts_decode_the_same_tokens(clock: Clock) -> None:
    def run(wrapped: bool) -> list[int]:
        drafter, rule = (
            ScriptedDrafter(lambda request: DraftTree.chain([1, 2][: request.max_depth])),
            build_rule("exact"),
        )
        watch = Stopwatch(lambda: 0.0, lambda: 0.0, DeviceCounts())
        conversation = conversation_of(
            TimedDrafter(drafter, watch) if wrapped else drafter, [1, 2], SeededNoise(5)
        )
        limits = RoundLimits(n_ctx=64, max_nodes=8, max_tokens=20)
        settings = DecodeSettings(TimedRule(rule, watch) if wrapped else rule, PLAIN, limits)
        n = sum(1 for _ in decode_rounds(TableTarget(LawTable(5, 3)), conversation, settings))
        assert len(watch.rounds) == (n - 1 if wrapped else 0)
        return conversation.tokens

    assert run(True) == run(False)
