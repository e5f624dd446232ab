"""Runtimes that choose layers and context by memory, and their refusals."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.every_drafter import named
from support.tiny_models import F32
from support.workers import running_worker

from specrun.bindings.contexts import ContextOptions
from specrun.bindings.errors import OutOfMemoryError
from specrun.bindings.machine import Placement, available_memory, placing
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.memory import MemoryDevice, fit
from specrun.runtime.memory.shape import HOST

MIB = 1 << 20
PROMPT = list(b"to be, or not to be")


@pytest.fixture(scope="module")
def files(files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    wide = tmp_path_factory.mktemp("fitted") / "wide.gguf"
    spec = RandomLlama(320, 256, 6, 4, 2, 1024, context=8192, file_type="F16")
    write_random_llama(wide, spec)
    return {**files, "wide": wide}


@pytest.fixture
def small_devices(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes devices report less free memory."""

    def set_free(n_bytes: int) -> None:
        real = fit.memory_device

        def smaller(device: Any) -> MemoryDevice:
            return replace(real(device), free=n_bytes)

        monkeypatch.setattr(fit, "memory_device", smaller)

    return set_free


def text(runtime: Runtime) -> list[int]:
    params = SamplingParams(temperature=0.0)
    return runtime.generate(PROMPT, params, max_tokens=12).token_ids


def test_without_devices_nothing_is_planned(files: dict[str, Path]) -> None:
    with Runtime(files["shallow"], "none", devices=["none"], n_ctx=512) as runtime:
        assert runtime.fitted is None
        assert runtime.memory_line == ""


def test_a_context_of_0_is_the_trained_one_where_it_fits(
    files: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level("INFO"),
        Runtime(files["wide"], "none", devices=["none"], n_ctx=0) as runtime,
    ):
        assert runtime.n_ctx == 8192
        assert "8,192 tokens of context, all it was trained for" in caplog.text
        assert runtime.memory_line == ""  # as expected
        assert runtime.fitted is not None
        assert runtime.fitted.plan.settings.n_gpu_layers == 0


def test_a_context_of_0_is_what_fits(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = MemoryDevice("CPU", 42 * MIB)
    monkeypatch.setattr(fit, "this_machine", lambda: host)
    with Runtime(files["wide"], "none", devices=["none"], n_ctx=0, n_threads=1) as runtime:
        assert 4096 <= runtime.n_ctx < 8192
        assert f"{runtime.n_ctx:,} tokens of context, what fits" in runtime.memory_line
        assert runtime.fitted is not None
        assert runtime.fitted.plan.total(HOST) <= host.budget


def test_layers_are_as_many_as_fit_and_the_text_is_the_same(
    files: dict[str, Path], workers: tuple[str, str], small_devices: Any
) -> None:
    with Runtime(files["wide"], "none", devices=["none"], **F32) as runtime:
        wanted = text(runtime)
    found = []
    for mebibytes in (8, 12, 15, 60):
        small_devices(mebibytes * MIB)
        with Runtime(files["wide"], "none", rpc=workers[:1], **F32) as runtime:
            plan = runtime.fitted.plan if runtime.fitted else None
            assert plan is not None
            assert plan.fits
            layers = runtime.model.n_gpu_layers
            found.append(7 if layers == -1 else layers)
            assert plan.layers_on_devices == found[-1]
            shown = "all 7 layers" if layers == -1 else f"{layers} of 7 layers, as many as fit"
            assert shown in runtime.memory_line
            assert f"of {mebibytes} MiB free on RPC" in runtime.memory_line
            assert text(runtime) == wanted
    assert found == sorted(found)
    assert 0 < found[1] < found[2] < found[3] == 7


def test_heads_and_draft_models_have_their_room(
    files: dict[str, Path], workers: tuple[str, str], small_devices: Any
) -> None:
    """The same memory holds fewer layers if a drafter is on the target's device."""
    small_devices(26 * MIB)
    layers = {}
    for drafter in ("none", "draft(FILE:wide, n=2)"):
        with Runtime(files["wide"], named(drafter, files), rpc=workers[:1], **F32) as runtime:
            assert runtime.fitted is not None
            layers[drafter] = runtime.fitted.plan.layers_on_devices
    assert layers["draft(FILE:wide, n=2)"] < layers["none"]


def test_the_plan_of_a_device_is_what_llama_cpp_counts_there(
    files: dict[str, Path], workers: tuple[str, str]
) -> None:
    from specrun.bindings.memory_breakdown import memory_breakdown

    with Runtime(
        files["wide"], "none", rpc=workers[:1], use_mmap=False, n_ctx=0, n_threads=1
    ) as runtime:
        found = memory_breakdown(runtime.session.target.context)
        assert runtime.fitted is not None
        plan = runtime.fitted.plan
        (name,) = (name for name in found if name != "CPU")
        rows = {row.kind: row.by_place[0] for row in plan.rows if row.kind != "output rows"}
        assert rows["weights"] == found[name].weights
        assert rows["keys and values"] == found[name].cells
        # Plain decoding needs fewer rows than a plan leaves room for.
        assert found[name].compute <= rows["compute"] <= 1.05 * found[name].compute


def test_layers_that_do_not_fit_are_refused_with_what_would(
    files: dict[str, Path], workers: tuple[str, str], small_devices: Any
) -> None:
    small_devices(12 * MIB)
    with pytest.raises(OutOfMemoryError) as raised:
        Runtime(files["wide"], "none", rpc=workers[:1], n_gpu_layers="all", n_ctx=8192)
    message = str(raised.value)
    assert "7 of 7 layers with 8,192 tokens of context need" in message
    assert "and 12 MiB are there" in message
    assert message.count("(") == 3  # three ways out
    assert "-ngl " in message


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux bounds a process's memory so")
def test_out_of_memory_comes_with_the_plan(models: dict[str, Path]) -> None:
    """A worker that reports all of the machine's memory, and gives less than the weights."""
    with running_worker(memory=MIB) as (worker, _), pytest.raises(OutOfMemoryError) as raised:
        Runtime(models["large"], "none", rpc=[worker], n_gpu_layers="all", n_ctx=8192)
    (note,) = raised.value.__notes__
    assert note.startswith("the plan, with 8,192 tokens of context:")
    assert "target weights 168 MiB" in note
    assert "target keys and values 96 MiB" in note
    for option in ("-c 4096 takes", "-ctk q8_0 -ctv q8_0 takes", "-ngl 6 takes"):
        assert option in note


# -- room beside other runtimes --------------------------------------------------------------------


def loading_of(path: Path, n_ctx: int = 8192, **options: Any) -> fit.Loading:
    context = ContextOptions(n_ctx=n_ctx)
    return fit.Loading(path, "none", fit.LoadOptions(context, **options))


def test_a_runtime_fits_beside_others_or_instead_of_them(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others' weights are mapped files, which this machine reports as free memory."""
    monkeypatch.setattr(fit, "this_machine", lambda: MemoryDevice("CPU", 100 * MIB))
    with placing(Placement(devices=("none",))):
        own = fit.room_here(loading_of(files["wide"]), {}, 100 * MIB)
        assert own is not None
        assert (own.fits, own.refusal) == (True, "")
        assert 20 * MIB < own.held["CPU"] < 60 * MIB
        beside = fit.room_here(loading_of(files["wide"]), {"CPU": 50 * MIB}, 100 * MIB)
        assert beside == fit.Room(own.held, fits=own.held["CPU"] <= 50 * MIB * 7 // 8)
        full = fit.room_here(loading_of(files["wide"]), {"CPU": 80 * MIB}, 100 * MIB)
        assert full == fit.Room(own.held, fits=False)
        never = fit.room_here(loading_of(files["wide"]), {"CPU": 4 * MIB}, 24 * MIB)
        assert never is not None
        assert "8,192 tokens of context and the weights need" in never.refusal
        assert "of this machine's memory, and 24 MiB are free" in never.refusal
        assert "What fits: -c " in never.refusal


def test_layers_have_the_device_that_others_would_leave(
    files: dict[str, Path], workers: tuple[str, str], small_devices: Any
) -> None:
    small_devices(15 * MIB)
    with placing(Placement(rpc=workers[:1])):
        alone = fit.room_here(loading_of(files["wide"], 512), {}, available_memory())
        assert alone is not None
        (name,) = set(alone.held) - {"CPU"}
        assert 0 < alone.held[name] <= 15 * MIB
        assert alone.fits
        # With 45 MiB more all layers would be there, so they are what it needs.
        others = {name: 45 * MIB}
        whole = fit.room_here(loading_of(files["wide"], 512), others, available_memory())
        assert whole is not None
        assert whole.held[name] > 15 * MIB
        assert (whole.fits, whole.refusal) == (False, "")
        all_layers = loading_of(files["wide"], n_gpu_layers="all")
        refused = fit.room_here(all_layers, {}, available_memory())
        assert refused is not None
        assert "7 of 7 layers with 8,192 tokens of context need" in refused.refusal


def test_files_that_cannot_be_read_are_left_to_who_opens_them(tmp_path: Path) -> None:
    path = tmp_path / "no.gguf"
    path.write_bytes(b"GGUF, or so it says")
    loading = fit.Loading(path, "none", fit.LoadOptions())
    assert fit.fit_here(loading) is None
    assert fit.room_here(loading, {}, MIB) is None


# -- this machine's memory -------------------------------------------------------------------------


def test_available_memory_is_what_the_control_groups_leave(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 100 kB\nMemAvailable:   64000 kB\n")
    assert available_memory(tmp_path) == 64_000 << 10
    (tmp_path / "proc/self/cgroup").write_text("0::/user/app\n")
    group = tmp_path / "sys/fs/cgroup/user/app"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("1000\n")
    assert available_memory(tmp_path) == 64_000 << 10
    (group.parent / "memory.max").write_text("50000000\n")
    (group.parent / "memory.current").write_text("30000000\n")
    (group.parent / "memory.stat").write_text("anon 9\ninactive_file 4000000\nactive_file 6000000")
    assert available_memory(tmp_path) == 30_000_000
    (group.parent / "memory.current").write_text("90000000\n")
    assert available_memory(tmp_path) == 0


def test_a_machine_that_says_nothing_has_what_it_has(tmp_path: Path) -> None:
    assert available_memory(tmp_path) > 1 << 28
