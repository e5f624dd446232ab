"""Planned weights and cells are those that llama.cpp allocates: cells to the byte, by device.

"Allocates" is read from the buffers of real models and contexts (`memory_breakdown`), on the CPU
and on workers, whose memory is no host's.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.sparse_models import FAMILIES, Size, write_sparse

from specrun.bindings.contexts import Context, ContextOptions, MtpContext
from specrun.bindings.machine import Placement, placing
from specrun.bindings.machine.devices import devices
from specrun.bindings.memory_breakdown import HOST as HOST_NAME
from specrun.bindings.memory_breakdown import Breakdown, CountedModel, memory_breakdown
from specrun.bindings.models import Model
from specrun.runtime.memory import (
    MemoryCounts,
    MemoryDevice,
    PlanRequest,
    PlanSettings,
    count_plan,
)
from specrun.runtime.memory.choice import can_quantize
from specrun.runtime.memory.count import TARGET, ModelPart
from specrun.runtime.memory.shape import HOST, ModelShape, layer_places, memory_device

Counted = dict[int, tuple[int, int]]  # by place: bytes of weights, of cells


def counted(
    counts: MemoryCounts,
    path: Path,
    options: ContextOptions,
    n_gpu_layers: int = 0,
    devices: tuple[MemoryDevice, ...] = (),
    shares: tuple[float, ...] = (),
    overrides: tuple[tuple[str, int], ...] = (),
    n_rollback: int = 0,
) -> Counted:
    """The plan's answer."""
    # Not more than the trained length is planned; these contexts are longer.
    shape = replace(ModelShape.read(path), n_ctx_train=options.n_ctx)
    part = ModelPart(TARGET, shape, options, n_rollback)
    places = tuple(range(len(devices)))
    request = PlanRequest((part,), devices, places, places, shares, overrides)
    rows = count_plan(request, PlanSettings(options.n_ctx, n_gpu_layers), counts).rows
    weights, cells = (row.by_place for row in rows if row.kind in ("weights", "keys and values"))
    found = {place: (weights.get(place, 0), cells.get(place, 0)) for place in {*weights, *cells}}
    return {place: sizes for place, sizes in found.items() if any(sizes)}


def allocated(
    path: Path,
    options: ContextOptions,
    n_gpu_layers: int = 0,
    kind: type[Model] = Model,
    *,
    nextn: bool = False,
) -> dict[str, Breakdown]:
    """llama.cpp's answer, by names of devices."""
    more: dict[str, Any] = {} if kind is CountedModel else {"use_mmap": False}
    with kind(path, n_gpu_layers=n_gpu_layers, load_nextn=nextn, **more) as model:
        with (MtpContext if nextn else Context)(model, options) as context:
            return memory_breakdown(context)


_OTHERS = "glm4moe", "qwen35", "mamba", "tied", "q8_0", "odd"
NAMES = [*FAMILIES, *_OTHERS]


@pytest.mark.parametrize("name", [*NAMES, "tied gemma4", "large tied"])
def test_weights_and_cells_on_the_cpu(
    models: dict[str, Path], counts: MemoryCounts, name: str
) -> None:
    options = ContextOptions(n_ctx=700, n_threads=1)
    real = allocated(models[name], options)[HOST_NAME]
    assert counted(counts, models[name], options) == {HOST: (real.weights, real.cells)}
    # Without allocating llama.cpp counts the same, compute buffers too.
    assert allocated(models[name], options, kind=CountedModel) == {HOST_NAME: real}


@pytest.mark.parametrize(
    "changes",
    [
        {"cache_type_k": "q8_0", "cache_type_v": "q8_0", "flash_attention": "on"},
        {"cache_type_k": "f32", "cache_type_v": "f32"},
        {"flash_attention": "off"},
        {"n_ctx": 8192},
        {"n_sequences": 8, "n_outputs": 64, "hidden_states": True},
    ],
    ids=lambda changes: "-".join(changes),
)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma4"])
def test_types_and_sizes_of_cells(
    models: dict[str, Path], counts: MemoryCounts, name: str, changes: dict[str, Any]
) -> None:
    options = ContextOptions(**{"n_ctx": 700, "n_threads": 1, **changes})
    real = allocated(models[name], options)[HOST_NAME]
    assert counted(counts, models[name], options) == {HOST: (real.weights, real.cells)}


@pytest.mark.parametrize("types", [("q8_0", "q4_0"), ("f32", "bf16")], ids=str)
def test_keys_of_another_type_than_values(
    models: dict[str, Path], counts: MemoryCounts, types: tuple[str, str]
) -> None:
    keys, values = types
    options = ContextOptions(n_ctx=700, cache_type_k=keys, cache_type_v=values, n_threads=1)
    real = allocated(models["llama"], options)[HOST_NAME]
    assert counted(counts, models["llama"], options) == {HOST: (real.weights, real.cells)}


@pytest.mark.parametrize("n_rollback", [0, 3])
def test_recurrent_states_that_can_be_taken_back(
    models: dict[str, Path], counts: MemoryCounts, n_rollback: int
) -> None:
    options = ContextOptions(n_ctx=256, n_threads=1, n_rollback=n_rollback)
    real = allocated(models["qwen35"], options)[HOST_NAME]
    found = counted(counts, models["qwen35"], options, n_rollback=n_rollback)
    assert found == {HOST: (real.weights, real.cells)}


@pytest.mark.parametrize("name", ["glm4moe", "qwen35"])
def test_nextn_blocks(models: dict[str, Path], counts: MemoryCounts, name: str) -> None:
    options = ContextOptions(n_ctx=512, n_threads=1)
    part = ModelPart(TARGET, ModelShape.read(models[name]), options, nextn=True)
    real = allocated(models[name], options, nextn=True)[HOST_NAME]
    assert counts.weights(part) == real.weights
    cells = counts.cells(part, 512, nextn=True)
    assert (sum(cells), cells[:-1]) == (real.cells, [0] * (len(cells) - 1))


def test_one_layer_more_would_be_seen(models: dict[str, Path], counts: MemoryCounts) -> None:
    """Negative control: the counts are of this model and this context and no other."""
    options = ContextOptions(n_ctx=512, n_threads=1)
    first = counted(counts, models["llama"], options)
    assert counted(counts, models["odd"], options) != first
    assert counted(counts, models["llama"], ContextOptions(n_ctx=513)) != first


@pytest.mark.parametrize(
    ("n_gpu_layers", "placing_options"),
    [
        (-1, {}),
        (1, {}),
        (3, {"offload_kv": False}),
        (3, {"override_tensors": [("ffn_(up|down)", "CPU")]}),
        (-1, {"override_tensors": [("attn_", "CPU"), ("ffn_gate", "RPC")]}),
        (-1, {"tensor_split": (3.0, 1.0)}),
        (4, {"tensor_split": (1.0, 2.0)}),
        (-1, {"tensor_split": (0.0, 1.0)}),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "name", ["llama", "tied", "odd", "qwen3moe", "glm4moe", "lfm2", "qwen35", "gemma4"]
)
def test_weights_and_cells_on_devices(
    models: dict[str, Path],
    counts: MemoryCounts,
    workers: tuple[str, str],
    name: str,
    n_gpu_layers: int,
    placing_options: dict[str, Any],
) -> None:
    chosen = dict(placing_options)
    kept = {"offload_kv": chosen.pop("offload_kv", True)}
    options = ContextOptions(n_ctx=700, n_threads=1, **kept)
    used = workers if "tensor_split" in chosen else workers[:1]
    here = {device.worker: device for device in devices(workers)}
    names = [here[worker].name for worker in used]
    pairs = [
        (pattern, where.replace("RPC", names[0]))
        for pattern, where in chosen.pop("override_tensors", ())
    ]
    with placing(Placement(rpc=used, override_tensors=tuple(pairs), **chosen)):
        real = allocated(models[name], options, n_gpu_layers)
        asked = allocated(models[name], options, n_gpu_layers, CountedModel)
    places = {HOST_NAME: HOST, **{device: place for place, device in enumerate(names)}}
    found = counted(
        counts,
        models[name],
        options,
        n_gpu_layers,
        tuple(memory_device(here[worker]) for worker in used),
        chosen.get("tensor_split", (1.0,)),
        tuple((pattern, places[where]) for pattern, where in pairs),
    )
    for device, breakdown in real.items():
        weights, cells = found.pop(places[device], (0, 0))
        # Small tensors are rounded up, or there twice: the factors of rotary positions.
        assert abs(weights - breakdown.weights) <= 0.002 * breakdown.weights
        assert cells == breakdown.cells
        assert (asked[device].weights, asked[device].cells) == (breakdown.weights, breakdown.cells)
        # If a layer is cut in parts, llama.cpp counts some more than it then allocates.
        assert asked[device].compute >= breakdown.compute
        assert pairs or asked[device].compute == breakdown.compute
    assert found == {}


def test_layers_are_split_as_llama_cpp_does() -> None:
    assert layer_places(4, 0, (1.0,)) == (HOST,) * 5
    assert layer_places(4, 2, (1.0,)) == (HOST, HOST, HOST, 0, 0)
    assert layer_places(4, -1, (1.0, 1.0)) == (0, 0, 0, 1, 1)
    assert layer_places(4, 99, (3.0, 1.0)) == (0, 0, 0, 0, 1)
    assert layer_places(4, -1, ()) == (HOST,) * 5


def test_a_quantized_cache_that_llama_cpp_refuses_is_no_way_out(
    models: dict[str, Path], counts: MemoryCounts, tmp_path: Path
) -> None:
    """Heads of 48 numbers, which no block of 32 divides."""
    path = write_sparse(tmp_path / "48.gguf", "llama", Size(heads=4, head=48))
    for model, answer in ((models["llama"], True), (path, False)):
        part = ModelPart(TARGET, ModelShape.read(model), ContextOptions())
        assert can_quantize(PlanRequest((part,), (), (), ()), counts) == answer
