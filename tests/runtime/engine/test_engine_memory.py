"""Memory of an engine: a context that is chosen holds a whole text of every slot."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tiny_models import F32

from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime import Runtime
from specrun.runtime.engine import Engine
from specrun.runtime.language import quoted
from specrun.runtime.memory import MemoryDevice, fit
from specrun.runtime.memory.shape import HOST

MIB = 1 << 20
TRAINED = 8192


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("memory") / "wide.gguf"
    spec = RandomLlama(320, 256, 6, 4, 2, 1024, context=TRAINED, file_type="F16")
    write_random_llama(path, spec)
    return path


def limited(monkeypatch: pytest.MonkeyPatch, mebibytes: int) -> MemoryDevice:
    host = MemoryDevice("CPU", mebibytes * MIB)
    monkeypatch.setattr(fit, "this_machine", lambda: host)
    return host


def chosen(wide: Path, drafter: str, slots: int) -> tuple[int, Engine]:
    with Engine(
        wide, drafter, slots=slots, devices=["none"], n_ctx=0, n_batch=512, n_threads=1
    ) as engine:
        return engine.n_ctx, engine


def test_each_slot_gets_the_trained_length_where_that_fits(wide: Path) -> None:
    n_ctx, engine = chosen(wide, "none", 3)
    assert n_ctx == 3 * TRAINED
    assert engine.memory_line == ""  # as expected


def test_slots_times_length_is_what_fits(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = limited(monkeypatch, 90)
    n_ctx, engine = chosen(wide, "none", 3)
    assert engine.fitted is not None
    each = engine.fitted.plan.settings.n_ctx
    assert 4096 <= each < TRAINED
    assert n_ctx == 3 * each
    assert engine.fitted.plan.total(HOST) <= host.budget
    line = f"{each:,} tokens of context for 3 conversations each, {n_ctx:,} together, what fits"
    assert line in engine.memory_line
    # One conversation in the same memory would have more: the plan counts all of them.
    with Runtime(wide, "none", devices=["none"], n_ctx=0, n_threads=1) as runtime:
        assert runtime.n_ctx > each


def test_every_slots_draft_model_is_counted(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, 220)
    plans = {}
    for drafter in ("none", f"draft({quoted(str(wide))}, n=2)"):
        _, engine = chosen(wide, drafter, 3)
        assert engine.fitted is not None
        plans[drafter] = engine.fitted.plan.settings.n_ctx
    assert plans["none"] > [*plans.values()][1]


def test_a_context_that_is_given_is_shared(wide: Path) -> None:
    with Engine(wide, "none", slots=3, devices=["none"], **{**F32, "n_ctx": 3072}) as engine:
        assert engine.n_ctx == 3072
        assert engine.fitted is None
