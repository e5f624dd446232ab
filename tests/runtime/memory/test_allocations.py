"""What is counted from headers is what llama.cpp allocates: weights and cells to the byte.

"Allocates" is read from the buffers of real models and contexts (`memory_breakdown`), on the CPU
and on workers, whose memory is no host's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.sparse_models import FAMILIES

from specrun.bindings.contexts.context import Context, MtpContext
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.machine.devices import devices
from specrun.bindings.machine.placement import Placement, placing
from specrun.bindings.memory_breakdown import HOST as HOST_NAME
from specrun.bindings.memory_breakdown import Breakdown, CountedModel, memory_breakdown
from specrun.bindings.models.model import Model
from specrun.runtime.memory.count import cells_by_place, count_cells
from specrun.runtime.memory.shape import (
    HOST,
    UNCOUNTED,
    MemoryRules,
    ModelShape,
    layer_places,
    memory_device,
    place_tensors,
)

Counted = dict[int, tuple[int, int]]  # by place: bytes of weights, of cells


def counted(
    path: Path,
    options: ContextOptions,
    n_gpu_layers: int = 0,
    shares: tuple[float, ...] = (),
    rules: tuple[MemoryRules, ...] = (),
    overrides: tuple[tuple[str, int], ...] = (),
    *,
    nextn: bool = False,
    n_rollback: int = 0,
) -> Counted:
    """The pure functions' answer."""
    model = ModelShape.read(path)
    assert model.counted
    places = layer_places(model.n_layers, n_gpu_layers, shares)
    found: Counted = {}
    for tensor in place_tensors(model, places, rules, overrides, load_nextn=nextn):
        weights, cells = found.get(tensor.place, (0, 0))
        found[tensor.place] = weights + tensor.n_bytes, cells
    flash = options.flash_attention != "off"
    layers = count_cells(model, options, n_rollback=n_rollback, nextn=nextn, flash=flash)
    of_layers = layers.of_layers(options.n_ctx)
    for place, n_bytes in cells_by_place(of_layers, places, offload=options.offload_kv).items():
        weights, cells = found.get(place, (0, 0))
        found[place] = weights, cells + n_bytes
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
def test_weights_and_cells_on_the_cpu(models: dict[str, Path], name: str) -> None:
    options = ContextOptions(n_ctx=700, n_threads=1)
    real = allocated(models[name], options)[HOST_NAME]
    assert counted(models[name], options) == {HOST: (real.weights, real.cells)}
    # Without allocating llama.cpp says the same, compute buffers too.
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
@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma4", "deepseek2"])
def test_types_and_sizes_of_cells(
    models: dict[str, Path], name: str, changes: dict[str, Any]
) -> None:
    options = ContextOptions(**{"n_ctx": 700, "n_threads": 1, **changes})
    real = allocated(models[name], options)[HOST_NAME]
    assert counted(models[name], options) == {HOST: (real.weights, real.cells)}


@pytest.mark.parametrize("types", [("q8_0", "q4_0"), ("f32", "bf16")], ids=str)
def test_keys_of_another_type_than_values(models: dict[str, Path], types: tuple[str, str]) -> None:
    keys, values = types
    options = ContextOptions(n_ctx=700, cache_type_k=keys, cache_type_v=values, n_threads=1)
    real = allocated(models["llama"], options)[HOST_NAME]
    assert counted(models["llama"], options) == {HOST: (real.weights, real.cells)}


@pytest.mark.parametrize("n_rollback", [0, 3])
def test_recurrent_states_that_can_be_taken_back(models: dict[str, Path], n_rollback: int) -> None:
    options = ContextOptions(n_ctx=256, n_threads=1, n_rollback=n_rollback)
    real = allocated(models["qwen35"], options)[HOST_NAME]
    found = counted(models["qwen35"], options, n_rollback=n_rollback)
    assert found == {HOST: (real.weights, real.cells)}


@pytest.mark.parametrize("name", ["glm4moe", "qwen35"])
def test_nextn_blocks(models: dict[str, Path], name: str) -> None:
    options = ContextOptions(n_ctx=512, n_threads=1)
    real = allocated(models[name], options, nextn=True)[HOST_NAME]
    assert counted(models[name], options, nextn=True) == {HOST: (real.weights, real.cells)}


def test_one_layer_more_would_be_seen(models: dict[str, Path]) -> None:
    """Negative control: the counts are of this model and this context and no other."""
    options = ContextOptions(n_ctx=512, n_threads=1)
    first = counted(models["llama"], options)
    assert counted(models["odd"], options) != first
    assert counted(models["llama"], ContextOptions(n_ctx=513)) != first


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
@pytest.mark.parametrize("name", ["llama", "tied", "odd", "qwen3moe", "glm4moe", "lfm2"])
def test_weights_and_cells_on_devices(
    models: dict[str, Path],
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
        models[name],
        options,
        n_gpu_layers,
        chosen.get("tensor_split", (1.0,)),
        tuple(memory_device(here[worker]).rules for worker in used),
        tuple((pattern, places[where]) for pattern, where in pairs),
    )
    sizes = {places[device]: (sums.weights, sums.cells) for device, sums in real.items()}
    assert found == {place: size for place, size in sizes.items() if any(size)}
    for device, breakdown in real.items():
        assert (asked[device].weights, asked[device].cells) == (breakdown.weights, breakdown.cells)
        # Where a layer is cut in parts, llama.cpp counts some more than it then allocates.
        assert asked[device].compute >= breakdown.compute
        assert pairs or asked[device].compute == breakdown.compute


def test_layers_are_split_as_llama_cpp_does() -> None:
    assert layer_places(4, 0, (1.0,)) == (HOST,) * 5
    assert layer_places(4, 2, (1.0,)) == (HOST, HOST, HOST, 0, 0)
    assert layer_places(4, -1, (1.0, 1.0)) == (0, 0, 0, 1, 1)
    assert layer_places(4, 99, (3.0, 1.0)) == (0, 0, 0, 0, 1)
    assert layer_places(4, -1, ()) == (HOST,) * 5


def test_what_no_header_tells_is_not_counted() -> None:
    assert {"deepseek32", "minimax-m3", "rwkv7"} <= UNCOUNTED
    assert not {"llama", "qwen3", "gemma4", "deepseek2", "qwen35"} & UNCOUNTED
