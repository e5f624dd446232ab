"""How many drafts a recurrent target can take back: as many as pay, and as there is memory for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from support.tiny_nextn import write_tiny_qwen35

from specrun.bindings.errors import OutOfMemoryError
from specrun.bindings.machine import Device
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.engine import Engine
from specrun.runtime.memory import fit
from specrun.runtime.memory.count import parts_of, state_bytes
from specrun.runtime.planning import TYPICAL_CPU, CostCurve, kept_states

STATE = 4 * 3 * (3 * 128 + 16 * 64)  # of three layers: three inputs of a convolution, a matrix


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen35(tmp_path_factory.mktemp("kept states") / "qwen35.gguf")


def curve(*seconds: float) -> CostCurve:
    return CostCurve.flat(seconds)


def having(monkeypatch: pytest.MonkeyPatch, n_bytes: int) -> None:
    def room(_devices: Sequence[Device]) -> int:
        return n_bytes

    monkeypatch.setattr(fit, "state_room", room)
    monkeypatch.setattr(kept_states, "state_room", room)


def test_a_state_is_counted_as_llama_cpp_makes_it(qwen: Path) -> None:
    assert state_bytes(qwen) == STATE


def test_as_many_as_pay(qwen: Path) -> None:
    """Where nine of ten drafts are right, by the curve: flat, of a CPU, steep, and with a step."""
    kept = kept_states.kept_states
    assert kept(qwen, curve(*[1.0] * 16)) == 15
    assert kept(qwen, TYPICAL_CPU) == 5
    assert kept(qwen, curve(1.0, 1.9, 2.9, 3.9, 4.9, 5.9)) == 1
    assert kept(qwen, curve(1.0, 1.02, 1.03, 1.04, 2.4, 2.6, 2.8, 3.0)) == 3
    assert kept(qwen, curve(1.0, 1.1, 1.2, 1.3, 1.8, 1.8, 1.8, 1.8, 1.3, 3.0, 5.0)) == 8


def test_no_more_than_memory_holds(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of what is left beside the weights, for each of all conversations."""
    flat, weights = curve(*[1.0] * 16), sum(t.n_bytes for t in parts_of_target(qwen))
    having(monkeypatch, weights + 4 * 8 * STATE)
    assert kept_states.kept_states(qwen, flat) == 8
    assert kept_states.kept_states(qwen, flat, n_texts=4) == 2
    having(monkeypatch, weights // 2)
    assert kept_states.kept_states(qwen, flat) == 1


def parts_of_target(path: Path):  # type: ignore[no-untyped-def]
    from specrun.bindings.gguf import read_header

    return read_header(path).tensors


@pytest.mark.parametrize(
    ("drafter", "drafted"),
    [
        ("none", 0),
        ("mtp", 5),
        ("mtp(n=9)", 9),
        ("prompt-lookup", 5),
        ("jacobi", 4),
        ("auto", 5),
        ("auto(mtp, prompt-lookup(n=7))", 7),
        ("relay(mtp@3, prompt-lookup@12)", 15),
    ],
)
def test_the_plan_counts_the_states_that_the_context_has(
    qwen: Path, drafter: str, drafted: int
) -> None:
    with Runtime(qwen, drafter, n_ctx=256) as runtime:
        context = runtime.session.target.context.options
        (target,) = parts_of(qwen, drafter, context, n_kept=5)
    assert context.n_rollback == target.n_rollback == drafted  # type: ignore[union-attr]


def test_the_text_stays_whoever_drafts_and_however_much(qwen: Path) -> None:
    params = SamplingParams(temperature=0.8, seed=3)
    texts = []
    for drafter in ("none", "auto", "mtp", "relay(mtp, prompt-lookup)"):
        with Runtime(qwen, drafter, n_ctx=256, n_threads=1, flash_attention="off") as runtime:
            texts.append(runtime.generate([5, 200, 7, 5, 200], params, max_tokens=30).token_ids)
    assert texts == [texts[0]] * 4


def test_too_little_memory_is_said_with_both_numbers_and_what_helps(
    qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    having(monkeypatch, 30 * STATE)
    with pytest.raises(
        OutOfMemoryError,
        match=r"drafts of 12 tokens need 13 recurrent states for each of 3 conversations, 644 KiB "
        r"together, and 495 KiB are free. What helps: drafts of at most 9 tokens \(n=9\); "
        r"2 conversations \(--parallel\); fewer programs beside it",
    ):
        Engine(qwen, "mtp(n=12)", slots=3, n_ctx=768)
    having(monkeypatch, STATE)
    with pytest.raises(OutOfMemoryError, match=r"plain decoding \(--drafter none\)"):
        Runtime(qwen, "mtp(n=12)")
