"""`measure soak`: sound sessions pass, and each kind of failure is reported."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.commands import results_of
from support.commands import run_measure as run

from measure.soak import soak as soak_module
from measure.soak.resources import Resources, growth_of, read_resources
from measure.soak.setups import Setup, random_setup
from measure.soak.soak import SoakOptions, SoakResult, difference, open_runtime, soak
from specrun.bench.prove import faults
from specrun.bench.prove.faults import InjectedInterrupt, take_answer
from specrun.runtime.engine import Runtime
from specrun.runtime.laws import SamplingParams

MB = 1_000_000


def held(sessions: int, *, first: int = 0) -> SoakOptions:
    return SoakOptions(seconds=float("inf"), first=first, sessions=sessions)


@pytest.fixture(scope="module")
def result() -> SoakResult:
    return soak(held(6))


def test_sound_sessions_pass(result: SoakResult) -> None:
    assert result.failures == ()
    assert result.passed
    assert result.sessions + result.refused == 6
    assert result.answers == sum(result.faults.values()) > 30
    assert 0 < result.cut < result.answers
    assert {"none", "interrupted", "decode failed"} < set(result.faults)
    assert len(result.drafters) > 3
    assert result.growth == ()  # too short to tell


def test_a_session_can_be_repeated() -> None:
    again = [soak(held(1, first=3)) for _ in range(2)]
    assert again[0].answers > 1
    assert (again[0].answers, again[0].tokens, again[0].faults) == (
        *(again[1].answers, again[1].tokens, again[1].faults),
    )


def test_setups_that_cannot_be_compared_are_not_drawn() -> None:
    """A text depends on drafts that were drawn: those of a drafter with a past need greedy
    decoding, and a lossy rule's text depends on any draft."""
    setups = [random_setup(random.Random(seed)) for seed in range(400)]
    assert all(setup.greedy for setup in setups if setup.drafter.startswith("ouroboros"))
    looked_up = [setup for setup in setups if setup.drafter.startswith("lookahead")]
    assert looked_up
    assert {setup.rule for setup in looked_up} <= {"exact", "token", "kseq"}
    assert not all(setup.greedy for setup in setups)
    assert any(setup.rule.startswith("cascade") for setup in setups)


# -- what has to be seen ---------------------------------------------------------------------------


class OtherSeed(Runtime):
    """Answers with another seed from its second answer on."""

    answers = 0

    def stream(self, prompt, params=None, **options):  # type: ignore[no-untyped-def]
        type(self).answers += 1
        if type(self).answers > 1 and params is not None:
            params = params.replace(seed=1)
        return super().stream(prompt, params, **options)


class StaysBusy(Runtime):
    """Forgets to end an answer that was cut short."""

    kept: list[object] = []  # noqa: RUF012 - of the class, so that nothing ends them

    def stream(self, prompt, params=None, **options):  # type: ignore[no-untyped-def]
        stream = super().stream(prompt, params, **options)
        self.kept.append(stream)
        return stream


@pytest.mark.parametrize(
    ("kind", "n", "said"),
    [(OtherSeed, 1, "is not a fresh session's"), (StaysBusy, 3, "BusyError")],
)  # sessions 8 to 10 drop streams
def test_a_faulty_runtime_is_reported(kind: type[Runtime], n: int, said: str) -> None:
    def opened(setup: Setup, drafter: str, target: Path) -> Runtime:
        runtime = open_runtime(setup, drafter, target)
        runtime.__class__ = kind
        return runtime

    result = soak(held(n, first=8), opened=opened)
    assert not result.passed
    assert any(said in failure for failure in result.failures)
    assert all(failure.startswith("session ") for failure in result.failures)


def test_what_differs_is_said(tiny_model: Path) -> None:
    with Runtime(tiny_model, "none", n_ctx=256, n_threads=1) as runtime:
        greedy = SamplingParams(temperature=0.0)
        short, long = (runtime.generate((3, 1, 4), greedy, max_tokens=n) for n in (4, 8))
        other = runtime.generate((3, 1, 5), greedy, max_tokens=8)
    assert difference(long, long, ended=True) is None
    assert difference(short, long, ended=False) is None
    assert "token 4 of the answer" in str(difference(short, long, ended=True))
    assert "token" in str(difference(long, other, ended=True))


def samples(sizes: Sequence[float], handles: Sequence[int] = (9,)) -> list[Resources]:
    return [
        Resources(int(size * MB), handles[min(index, len(handles) - 1)], 2)
        for index, size in enumerate(sizes)
    ]


def test_what_grows_is_seen() -> None:
    warm = [50 + min(n, 50) + n % 3 for n in range(200)]
    flat = growth_of(samples(warm))
    assert [growth.name for growth in flat] == ["memory", "handles", "threads"]
    assert [growth.is_flat for growth in flat] == [True, True, True]
    leaking = growth_of(samples([size + 0.1 * n for n, size in enumerate(warm)]))
    assert [growth.is_flat for growth in leaking] == [False, True, True]
    handles = growth_of(samples(warm, [9] * 150 + [10]))
    assert [growth.is_flat for growth in handles] == [True, False, True]
    assert growth_of(samples([100] * 99)) == ()


def test_open_files_are_counted(tmp_path: Path) -> None:
    before = read_resources()
    with (tmp_path / "open").open("w"):
        assert read_resources().n_handles == before.n_handles + 1
    assert before.n_bytes > MB
    assert before.n_threads >= 1


# -- faults ----------------------------------------------------------------------------------------


def test_an_interrupt_comes_at_its_line(tiny_model: Path) -> None:
    before = sys.gettrace()
    with Runtime(tiny_model, "none", n_ctx=256, n_threads=1) as runtime:
        stream = runtime.stream((3, 1, 4), max_tokens=8)
        with pytest.raises(InjectedInterrupt), faults._interrupt_at(200):
            stream.drain()
        assert stream.result.finish_reason == "cancelled"
        with faults._interrupt_at(10**9):
            assert len(runtime.generate((3, 1, 4), max_tokens=8).token_ids) == 8
    assert sys.gettrace() is before


def test_an_evaluation_fails_once(tiny_model: Path) -> None:
    with Runtime(tiny_model, "none", n_ctx=256, n_threads=1) as runtime:
        stream = runtime.stream((3, 1, 4), max_tokens=60)
        assert not take_answer(runtime, stream, "decode failed", random.Random(1))
        assert 0 < len(stream.result.token_ids) < 30
        assert len(runtime.generate((3, 1, 4), max_tokens=60).token_ids) == 60


def test_a_runtime_that_answers_twice_at_once_is_reported(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Runtime(tiny_model, "none", n_ctx=256, n_threads=1) as runtime:
        stream = runtime.stream((3, 1, 4), max_tokens=60)
        monkeypatch.setattr(runtime, "generate", lambda *_, **__: None)
        with pytest.raises(AssertionError, match="a second answer was given"):
            take_answer(runtime, stream, "asked", random.Random(1))
        stream.close()


# -- the command -----------------------------------------------------------------------------------


def test_the_command_reports_what_it_did() -> None:
    done = run("soak", "--minutes", "9", "--sessions", "2", "--json")
    assert done.exit_code == 0
    (found,) = results_of(done)
    assert found["answers"] > 2
    assert found["failures"] == []


def test_the_command_fails_with_its_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak_module, "difference", lambda *_: "made up")
    done = run("soak", "--minutes", "9", "--sessions", "1", "-o", "md")
    assert done.exit_code == 1
    assert "session 0 (" in done.stderr
    assert "made up" in done.stderr
    assert "failures" in done.stdout
