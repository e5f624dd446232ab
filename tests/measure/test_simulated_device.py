"""The simulated device, on a scripted clock: what it hides and counts; a device that evaluates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
from support.workers import running_worker

from measure.overhead import device as module
from measure.overhead import overhead
from measure.overhead.device import SimulatedDevice, simulated_device, spin_until
from measure.overhead.overhead import SETTINGS, OverheadOptions, measure_overhead
from specrun.bindings.errors import OptionError
from specrun.bindings.ggml import F32, ComputeDevice, GraphBuilder
from specrun.bindings.library import llama
from specrun.bindings.machine.devices import supports_gpu_offload
from specrun.bindings.machine.placement import Placement, placing
from specrun.bindings.models.model import Model

TARGET, OTHER = 1, 2
N_VOCAB, TRUE_SECONDS = 1000, 7.0


class Script:
    """llama.cpp with a clock: an evaluation takes seven seconds, every other graph is reused."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.n_decoded, self.kept = 0.0, 0, N_VOCAB
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(module, "spin_until", self.wait_until)
        self.device = SimulatedDevice(self)
        options = SimpleNamespace(hidden_states=False, layer_inputs=(2, 5), nextn_states=False)
        model = SimpleNamespace(n_embd=8, n_embd_out=8)
        context: Any = SimpleNamespace(handle=TARGET, options=options, model=model)
        self.device.watch(context)

    def work(self, seconds: float) -> None:
        self.now += seconds

    def wait_until(self, due: float) -> None:
        self.now = due

    def llama_decode(self, handle: int, batch: Any) -> int:
        self.now += TRUE_SECONDS
        self.n_decoded += 1
        return 0

    def llama_synchronize(self, handle: int) -> None:
        pass

    def llama_perf_context(self, handle: int) -> Any:
        return SimpleNamespace(n_reused=self.n_decoded // 2)

    def llama_get_sampled_logits_count_ith(self, handle: int, row: int) -> int:
        return self.kept

    def llama_get_sampled_candidates_count_ith(self, handle: int, row: int) -> int:
        return 0 if self.kept == N_VOCAB else self.kept


BATCH = SimpleNamespace(n_tokens=3, logits=[0, 1, 1])


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    return Script(monkeypatch)


def test_work_before_the_device_is_done_is_hidden_behind_it(script: Script) -> None:
    device = script.device
    device.wait_s = 3.0
    for worked, wall in ((0.0, 10.0), (2.0, 10.0), (4.0, 11.0)):
        started, busy = script.now, device.counts.busy_s
        device.decode(TARGET, BATCH)
        script.work(worked)
        device.synchronize(TARGET)
        assert script.now - started == wall
        assert device.counts.busy_s - busy == 3.0
    assert device.counts.hidden_s == 3 * TRUE_SECONDS
    assert (device.counts.n_evaluations, device.counts.n_reused) == (3, 1)
    assert device.n_unwaited == 0


def test_a_wait_ends_when_it_is_due_and_looks_at_the_clock_more_often_towards_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here a second is a thousand hashes, of which the clock says that they took a tenth more."""
    now, hashes = [0.0], []

    def hashed(iterations: int) -> None:
        hashes.append(iterations)
        now[0] += 1.1e-3 * iterations

    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(module, "_hash", hashed)
    monkeypatch.setattr(module, "_hashes_per_second", lambda: 1000.0)
    spin_until(3.0)
    assert 3.0 <= now[0] <= 3.0 + 1.1e-3
    assert hashes[0] == 2700
    assert hashes == sorted(hashes, reverse=True)
    spin_until(2.0)
    assert now[0] <= 3.0 + 1.1e-3


def test_bytes_are_those_that_reach_the_host(script: Script) -> None:
    device = script.device
    device.wait_s = 3.0
    device.decode(TARGET, BATCH)
    states = 2 * 3 * 8  # two layers, three tokens
    assert device.counts.target_bytes == 4 * (2 * N_VOCAB + states)
    script.kept = 41
    before = device.counts.copy()
    device.decode(TARGET, BATCH)
    assert device.counts.since(before).target_bytes == 4 * (2 * 2 * 41 + states)
    assert device.n_unwaited == 1
    device.decode(OTHER, BATCH)
    assert device.counts.drafter_bytes == 4 * 2 * 2 * 41


def test_other_contexts_and_a_device_that_is_off_are_as_they_were(script: Script) -> None:
    device = script.device
    for wait, handle in ((None, TARGET), (3.0, OTHER)):
        device.wait_s, started = wait, script.now
        device.decode(handle, BATCH)
        device.synchronize(handle)
        assert script.now - started == TRUE_SECONDS
        assert device.counts.n_evaluations == device.counts.busy_s == 0


def test_the_library_is_as_it_was_afterwards() -> None:
    native = llama()

    def places() -> list[object]:
        reads = [getattr(module.Graph, name) for name in ("peek", "floats", "numbers")]
        return [native.llama_decode, native.llama_synchronize, module.Context.stepper, *reads]

    before = places()
    with pytest.raises(KeyboardInterrupt), simulated_device() as device:
        assert native.llama_decode == device.decode
        assert not any(place is other for place, other in zip(places(), before, strict=True))
        raise KeyboardInterrupt
    assert places() == before


def test_what_is_read_of_heads_is_counted_whichever_way_it_is_read() -> None:
    with simulated_device() as device, closing(ComputeDevice(n_threads=1)) as processor:
        builder = GraphBuilder(processor)
        builder.output("best", builder.argmax(builder.input("x", F32, 4, 3)))
        builder.output("twice", builder.add(builder.input("y", F32, 5), builder.input("z", F32, 5)))
        with closing(builder.build()) as graph:
            for array in graph.inputs.values():
                array[...] = range(array.shape[-1])
            graph.compute()
            assert graph.numbers("best") == [[3, 3, 3]]
            assert graph.floats("twice").tolist() == [[0.0, 2.0, 4.0, 6.0, 8.0]]
            assert device.counts.drafter_bytes == 0  # while it is off
            device.wait_s = 3.0
            reads = [(read, "best", 12) for read in ("numbers", "peek", "read")]
            for read, name, n_bytes in (*reads, ("floats", "twice", 20)):
                before = device.counts.copy()
                getattr(graph, read)(name)
                assert device.counts.since(before).drafter_bytes == n_bytes


# -- a device that evaluates: a worker on the loopback ---------------------------------------------

ON_DEVICE = OverheadOptions((300,), n_ctx=256, rounds=4, n_threads=1, on_gpu=True)
SOME = [setting for setting in SETTINGS if setting.drafter in ("none", "eagle(EAGLE, n=5)")]


@pytest.fixture(scope="module")
def worker() -> Iterator[str]:
    with running_worker() as (address, _):
        yield address


def test_everything_lies_on_the_device_and_none_is_simulated(
    worker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []

    class Noted(Model):
        def __init__(self, path: str, **options: int) -> None:
            super().__init__(path, **options)  # type: ignore[arg-type]
            opened.append(self.n_gpu_layers)

    monkeypatch.setattr(overhead, "Model", Noted)
    with placing(Placement(rpc=(worker,))):
        results = list(measure_overhead(ON_DEVICE, settings=SOME))
    assert [result.setting for result in results] == [setting.name for setting in SOME]
    assert opened == [-1] * len(SOME)
    for result in results:
        assert result.devices == {}
        assert result.overhead_us.median > 0.0
        assert result.target_native_us.median > 0.0


@pytest.mark.skipif(supports_gpu_offload(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused() -> None:
    with pytest.raises(OptionError, match=r"no GPU that could evaluate.*--gpu"):
        next(measure_overhead(ON_DEVICE, settings=SOME))
