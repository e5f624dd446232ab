"""First contact: a file that is new here is measured once, kept, and padded by what was found."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
from support.tiny_models import F32
from support.tiny_nextn import write_tiny_qwen35

from specrun.bindings.contexts.batch import Batch
from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.contexts.rows import Rows
from specrun.bindings.errors import OutOfMemoryError
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.memory import LoadOptions
from specrun.runtime.planning import CONTACT_SIZES, CostCurve, load_curve, measure, save_curve
from specrun.runtime.round import TargetModel
from specrun.runtime.round.padding import PaddedTarget

# Seconds of an evaluation by its tokens, in ms: an H200 with Q4_K_M, with two in between.
STEPPED = {1: 2.8, 2: 2.8, 3: 3.2, 4: 3.6, 5: 4.0, 6: 4.4, 8: 5.1, 9: 2.1, 12: 2.0, 16: 2.1}
TIMES = {**STEPPED, 17: 2.2, 24: 2.3, 32: 2.6, 64: 9.0}
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4] * 3


class Device(Context):
    """A context whose evaluations claim to take `TIMES`, `slower` times as long each new time."""

    factor, slower = 1.0, 1.0
    widths: list[int] = []  # noqa: RUF012 - of all devices

    def decode(self, batch: Batch) -> Rows:
        before = self.native_seconds
        rows = super().decode(batch)
        Device.widths.append(batch.n_tokens)
        self.native_seconds = before + 1e-3 * TIMES[batch.n_tokens] * Device.factor
        Device.factor *= Device.slower
        return rows


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> type[Device]:
    Device.widths, Device.factor, Device.slower = [], 1.0, 1.0
    monkeypatch.setattr(measure, "Context", Device)
    monkeypatch.setattr(measure, "_LEAST_BYTES", 0)
    return Device


_files = itertools.count()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A file that no other test has loaded: profiles know files by their content."""
    path = tmp_path / "target.gguf"
    write_random_llama(path, RandomLlama(vocab_size=64, layers=2, scale=4.0, seed=3))
    path.write_bytes(path.read_bytes() + b"\0" * (1 + next(_files)))
    return path


def stored(path: Path, **options: Any) -> CostCurve | None:
    return load_curve(path, ContextOptions(**{**F32, **options}), 0)


def test_the_first_load_measures_and_the_next_one_knows(target: Path, device: type[Device]) -> None:
    """All widths, each after another one and again, at most 2 x 13 x 2 + what was doubted."""
    with Runtime(target, "prompt-lookup", **F32) as runtime:
        line, kind = runtime.contact_line, type(runtime.session.target)
        assert runtime.environment.known.seconds(5) == pytest.approx(2.0e-3)  # as 12 take
    assert line.startswith("measured once in ")
    assert "32 tokens take 0.9 times as long as one" in line
    assert "--no-measure" in line
    assert kind is PaddedTarget
    assert set(device.widths) == {*CONTACT_SIZES, 64}  # 64: the text in front of them
    assert 50 <= len(device.widths) <= 90
    curve, measured = stored(target), len(device.widths)
    assert curve is not None
    assert (curve.sizes, curve.is_first) == (CONTACT_SIZES, True)
    assert curve.reused == pytest.approx([1e-3 * TIMES[n] for n in CONTACT_SIZES])
    with Runtime(target, "prompt-lookup", **F32) as runtime:
        assert runtime.contact_line == ""
        assert type(runtime.session.target) is PaddedTarget
    assert len(device.widths) == measured


def test_a_cache_of_another_kind_has_a_curve_of_its_own(target: Path, device: type[Device]) -> None:
    with Runtime(target, "prompt-lookup", **F32):
        found = stored(target)
    device.slower = 1.0
    device.factor = 2.0
    with Runtime(target, "prompt-lookup", **{**F32, "cache_type_k": "f16"}) as runtime:
        assert runtime.contact_line
    other = stored(target, cache_type_k="f16")
    assert stored(target) == found
    assert found is not None
    assert other is not None
    assert other.seconds(1) == pytest.approx(2 * found.seconds(1))


def test_what_would_teach_nothing_or_was_not_wanted_is_not_measured(
    target: Path, device: type[Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    for drafter, options in (("none", {}), ("prompt-lookup", {"measure": False})):
        with Runtime(target, drafter, **F32, **options) as runtime:
            assert runtime.contact_line == ""
    assert device.widths == []
    device.factor = 0.5  # 1.4 ms a token: its rounds teach it in a moment
    with Runtime(target, "prompt-lookup", **F32) as runtime:
        assert runtime.contact_line == ""
    assert set(device.widths) == {1, 64}
    monkeypatch.setattr(measure, "_LEAST_BYTES", 32 << 20)  # as it is: no tiny model is tried
    device.widths.clear()
    with Runtime(target, "prompt-lookup", **F32) as runtime:
        assert runtime.contact_line == ""
    assert device.widths == []
    assert stored(target) is None


def test_a_busy_machine_spoils_nothing(target: Path, device: type[Device]) -> None:
    """Every evaluation takes 3 % longer than the one before: medians are far above the least."""
    device.slower = 1.03
    with Runtime(target, "prompt-lookup", **F32) as runtime:
        assert "too busy" in runtime.contact_line
        assert runtime.environment.known.source == "typical"
    assert stored(target) is None
    device.slower = device.factor = 1.0
    with Runtime(target, "prompt-lookup", **F32) as runtime:
        assert "measured once" in runtime.contact_line


def test_where_it_cannot_be_measured_the_model_is_loaded_all_the_same(
    target: Path, device: type[Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> Rows:
        raise OutOfMemoryError("there is no room for 64 tokens")

    monkeypatch.setattr(device, "decode", full)
    with Runtime(target, "prompt-lookup", **F32) as runtime:
        assert runtime.contact_line.endswith("there is no room for 64 tokens")
        assert len(runtime.generate(PROMPT, SamplingParams(seed=1), max_tokens=4).token_ids) == 4


def test_a_longer_measurement_replaces_it(
    target: Path, device: type[Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    loading = LoadOptions(ContextOptions(**F32), n_gpu_layers=0)
    with Runtime(target, "prompt-lookup", **F32):
        pass
    full = CostCurve((1, 2, 64), (1.0, 1.0, 2.0), (1.0, 1.0, 2.0))
    monkeypatch.setattr(measure, "measure_target_costs", lambda *_, **__: full)
    found = measure.target_curve(target, loading, seconds=0.1)
    assert found == full == stored(target)
    monkeypatch.setattr(measure, "measure_target_costs", None)
    assert measure.target_curve(target, loading, seconds=0.1) == full


def test_a_recurrent_model_is_measured_as_its_text_goes_on(
    tmp_path: Path, device: type[Device]
) -> None:
    """Its state drops nothing: each evaluation follows the one before. It is padded to no more
    tokens than there are states for, 6 here, so its plans see a step behind them."""
    path = tmp_path / "hybrid.gguf"
    write_tiny_qwen35(path, seed=99)
    with Runtime(path, "prompt-lookup(branches=1)", **F32) as runtime:
        assert "measured once" in runtime.contact_line
        assert type(runtime.session.target) is TargetModel
        assert runtime.environment.n_kept == 5
        known = runtime.environment.known
        assert [known.seconds(n) for n in (8, 9)] == pytest.approx([5.1e-3, 2.1e-3])


def test_the_text_is_that_without_a_measurement(target: Path, device: type[Device]) -> None:
    """Padded and not, greedy and drawn: point masses give plain decoding's own text."""
    said = []
    for drafter, measures in (("none", False), ("prompt-lookup", False), ("prompt-lookup", True)):
        with Runtime(target, f"{drafter}", **F32, measure=measures) as runtime:
            said.append(
                [
                    runtime.generate(
                        PROMPT, SamplingParams(temperature=t, seed=5), max_tokens=30
                    ).token_ids
                    for t in (0.0, 1.0)
                ]
            )
    assert said[0] == said[1] == said[2]


def test_a_stored_curve_of_earlier_versions_is_read(target: Path) -> None:
    context = ContextOptions(**F32)
    path = save_curve(CostCurve.flat([0.5, 0.6]), target, context, 0)
    path.write_text(path.read_text().replace(',\n      "is_first": false', ""))
    assert "is_first" not in path.read_text()
    found = load_curve(target, context, 0)
    assert found is not None
    assert dataclasses.astuple(found) == dataclasses.astuple(CostCurve.flat([0.5, 0.6]))
