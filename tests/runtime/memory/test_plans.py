"""Plans: their sums against llama.cpp's, layers and context that are chosen, and ways out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from specrun.bindings.contexts import Context, ContextOptions
from specrun.bindings.machine import Placement, placing
from specrun.bindings.machine.devices import devices
from specrun.bindings.memory_breakdown import HOST as HOST_NAME
from specrun.bindings.memory_breakdown import memory_breakdown
from specrun.bindings.models import Model
from specrun.runtime.memory import (
    MemoryCounts,
    MemoryDevice,
    MemoryPlan,
    PlanRequest,
    PlanSettings,
    Wish,
    card,
    choose_plan,
    count_plan,
    parts_of,
    ways_out,
)
from specrun.runtime.memory.count import HeadPart, ModelPart
from specrun.runtime.memory.shape import HOST, memory_device

MIB = 1 << 20


def request_for(
    target: Path, drafter: str = "none", *devices: MemoryDevice, **context: object
) -> PlanRequest:
    parts = parts_of(target, drafter, ContextOptions(**context))  # type: ignore[arg-type]
    places = tuple(range(len(devices)))
    return PlanRequest(tuple(parts), devices, places, places)


# -- sums ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_gpu_layers", [-1, 6])
@pytest.mark.parametrize("name", ["large", "large tied"])
def test_a_plan_is_within_5_percent_of_what_is_allocated(
    models: dict[str, Path],
    workers: tuple[str, str],
    counts: MemoryCounts,
    name: str,
    n_gpu_layers: int,
) -> None:
    """100 million parameters on a worker: graphs were counted on the CPU, as for a card."""
    options = ContextOptions(n_ctx=4096, n_threads=1)
    with placing(Placement(rpc=workers[:1])):
        (there,) = (device for device in devices(workers[:1]) if device.worker)
        request = request_for(models[name], "none", memory_device(there))
        context = replace(request.target.context, n_ctx=4096, n_threads=1)
        with Model(models[name], n_gpu_layers=n_gpu_layers, use_mmap=False) as model:
            with Context(model, context) as real:
                found = memory_breakdown(real)
    plan = count_plan(request, PlanSettings(options.n_ctx, n_gpu_layers), counts)
    rows = [row for row in plan.rows if row.kind != "output rows"]
    for device, place in ((there.name, 0), (HOST_NAME, HOST)):
        wanted = found[device].weights + found[device].cells + found[device].compute
        planned = sum(row.by_place.get(place, 0) for row in rows)
        assert abs(planned - wanted) <= 0.05 * wanted, (device, planned, wanted)


def test_a_card_has_room_for_the_weights_that_it_takes_over(
    models: dict[str, Path], counts: MemoryCounts
) -> None:
    """As ggml's CUDA backend does for prompts, while some layers stay in this machine's memory."""
    request = request_for(models["large"], "none", card(8 << 30))

    def compute(layers: int) -> int:
        plan = count_plan(request, PlanSettings(4096, layers), counts)
        (row,) = (row for row in plan.rows if row.kind == "compute")
        return row.by_place[0]

    largest = max(
        tensor.n_bytes for tensor in request.target.model.tensors if "blk." in tensor.name
    )
    assert compute(6) - compute(-1) == largest
    assert compute(12) == compute(-1) + largest
    worker = replace(request, devices=(MemoryDevice("RPC0", 8 << 30),))
    rows = count_plan(worker, PlanSettings(4096, 6), counts).rows
    assert next(row for row in rows if row.kind == "compute").by_place[0] == compute(-1)


@pytest.mark.parametrize(
    ("types", "n_numbers"),
    [(("f16", "f16"), 0), (("q8_0", "f16"), 256), (("q8_0", "q8_0"), 512), (("f32", "f32"), 512)],
    ids=str,
)
def test_a_card_has_room_for_keys_and_values_in_f16(
    models: dict[str, Path], counts: MemoryCounts, types: tuple[str, str], n_numbers: int
) -> None:
    """As ggml's CUDA backend does for flash attention (fattn-common.cuh): one layer at a time."""
    keys, values = types
    request = request_for(
        models["large"], "none", card(8 << 30), cache_type_k=keys, cache_type_v=values
    )
    settings, sizes = PlanSettings(4096, -1), []
    for device in (request.devices[0], MemoryDevice("RPC0", 8 << 30)):
        plan = count_plan(replace(request, devices=(device,)), settings, counts)
        sizes.append(next(row for row in plan.rows if row.kind == "compute").by_place[0])
    assert sizes[0] - sizes[1] == 2 * n_numbers * 4096


def test_rows_of_two_vocabularies_are_this_machines(
    models: dict[str, Path], counts: MemoryCounts
) -> None:
    request = request_for(models["large"], f"draft('{models['llama']}')", card(8 << 30))
    plan = count_plan(request, PlanSettings(512, -1), counts)
    rows = {row.part: row.by_place for row in plan.rows if row.kind == "output rows"}
    assert rows == {"target": {HOST: 4 * 16_000 * 16}, "draft model": {HOST: 4 * 320}}


# -- choices ---------------------------------------------------------------------------------------


def chosen(
    request: PlanRequest,
    counts: MemoryCounts,
    n_ctx: int | None = None,
    layers: int | None = None,
    drafts: int | None = None,
) -> MemoryPlan:
    most = request.target.model.n_ctx_train
    return choose_plan(request, Wish(n_ctx, layers, drafts, most), counts)


def resized(request: PlanRequest, n_bytes: int) -> PlanRequest:
    return replace(request, devices=(replace(request.devices[0], free=n_bytes),))


@pytest.mark.parametrize("mebibytes", [64, 120, 180, 240, 300, 330, 400, 700])
def test_what_is_chosen_fits_and_one_step_more_would_not(
    models: dict[str, Path], counts: MemoryCounts, mebibytes: int
) -> None:
    drafter = f"draft('{models['odd']}')"
    request = request_for(models["large"], drafter, card(mebibytes * MIB))
    plan = chosen(request, counts)
    assert plan.fits
    settings, n_layers = plan.settings, plan.n_layers
    most, layers = request.target.model.n_ctx_train, plan.layers_on_devices
    if layers < n_layers:
        more = replace(settings, n_ctx=4096, n_gpu_layers=layers + 1)
        assert not count_plan(request, more, counts).fits
    if settings.n_ctx < most:
        longer = replace(settings, n_ctx=settings.n_ctx + 256)
        assert not count_plan(request, longer, counts).fits
    else:
        assert settings.n_ctx == most


def test_more_memory_never_gives_less(models: dict[str, Path], counts: MemoryCounts) -> None:
    request = request_for(models["large"], "none", card(MIB))
    plans = [chosen(resized(request, size * MIB), counts) for size in range(20, 500, 40)]
    found = [(plan.layers_on_devices, plan.settings.n_ctx) for plan in plans]
    layers = [count for count, _ in found]
    assert layers == sorted(layers)
    assert (layers[0], layers[-1]) == (0, 13)
    whole = [n_ctx for count, n_ctx in found if count == 13]
    assert whole == sorted(whole)
    assert whole[-1] == 8192


def test_what_was_asked_for_is_kept(models: dict[str, Path], counts: MemoryCounts) -> None:
    request = request_for(models["large"], "none", card(300 * MIB))
    assert chosen(request, counts, n_ctx=512, layers=7).settings == PlanSettings(512, 7)
    assert chosen(request, counts, layers=2).settings.n_gpu_layers == 2
    assert chosen(request, counts, n_ctx=1024).settings.n_ctx == 1024


def test_a_draft_model_gives_way_last(models: dict[str, Path], counts: MemoryCounts) -> None:
    drafter = f"draft('{models['large']}')"
    request = request_for(models["large"], drafter, card(400 * MIB))
    settings = chosen(request, counts, n_ctx=512).settings
    assert 0 < settings.n_gpu_layers < 13
    assert settings.n_gpu_layers_draft == -1
    settings = chosen(resized(request, 200 * MIB), counts, n_ctx=512).settings
    assert (settings.n_gpu_layers > 0, settings.n_gpu_layers_draft) == (True, 0)


def test_without_a_device_the_context_is_what_memory_holds(
    models: dict[str, Path], counts: MemoryCounts
) -> None:
    request = request_for(models["large"])
    for size, least, most in ((2000, 8192, 8192), (330, 4096, 8191), (100, 4096, 4096)):
        host = MemoryDevice("CPU", size * MIB)
        plan = chosen(replace(request, host=host), counts, layers=0)
        assert least <= plan.settings.n_ctx <= most
        assert plan.fits == (size > 100)


# -- ways out --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mebibytes", [60, 150, 260, 300])
def test_every_way_out_fits(models: dict[str, Path], counts: MemoryCounts, mebibytes: int) -> None:
    request = request_for(models["large"], "none", card(mebibytes * MIB))
    plan = count_plan(request, PlanSettings(8192, -1), counts)
    assert not plan.fits
    ways = ways_out(plan, counts)
    assert len(ways) == 3
    assert len({way.options for way in ways}) == 3
    for way in ways:
        assert way.plan.fits
        again = count_plan(way.plan.request, way.plan.settings, counts)
        assert again.total(0) <= request.devices[0].budget
        types = way.plan.request.target.context.cache_type_k
        assert (types == "q8_0") == ("-ctk q8_0" in way.options)
    shorter = [way for way in ways if way.options.startswith("-c ") and "-ngl" not in way.options]
    for way in shorter:
        longer = replace(way.plan.settings, n_ctx=way.plan.settings.n_ctx + 256)
        assert not count_plan(way.plan.request, longer, counts).fits


def test_there_is_no_way_out_of_a_card_that_is_far_too_small(
    models: dict[str, Path], counts: MemoryCounts
) -> None:
    request = request_for(models["large"], "none", card(MIB))
    assert ways_out(count_plan(request, PlanSettings(512, -1), counts), counts) == []


# -- parts -----------------------------------------------------------------------------------------


def test_parts_are_found_below_combinators(models: dict[str, Path], files: dict[str, Path]) -> None:
    drafter = (
        f"ensemble(cascade(draft('{files['small']}'), prompt-lookup), "
        f"eagle('{files['eagle']}'), medusa('{files['medusa']}'))"
    )
    parts = parts_of(files["shallow"], drafter, ContextOptions())
    assert [part.title for part in parts] == ["target", "draft model", "heads", "heads"]
    target, _, eagle, medusa = parts
    assert isinstance(target, ModelPart)
    assert target.context.hidden_states
    assert isinstance(eagle, HeadPart)
    assert isinstance(medusa, HeadPart)
    assert eagle.cells(1000) > eagle.cells(100) > 0 == medusa.cells(100)
    plain, *rest = parts_of(files["shallow"], "auto(prompt-lookup, none)", ContextOptions())
    assert rest == []
    assert isinstance(plain, ModelPart)
    assert not plain.context.hidden_states


def test_own_blocks_are_counted_with_the_target(
    models: dict[str, Path], counts: MemoryCounts
) -> None:
    sizes = []
    for drafter in ("none", "mtp"):
        request = request_for(models["glm4moe"], drafter, card(1 << 30))
        plan = count_plan(request, PlanSettings(512, -1), counts)
        assert [row.part for row in plan.rows] == ["target"] * 4
        sizes.append({row.kind: row.by_place[0] for row in plan.rows[:3]})
    assert all(sizes[1][kind] > sizes[0][kind] for kind in sizes[0])
    # One more layer of cells than three.
    assert 3 * sizes[1]["keys and values"] == 4 * sizes[0]["keys and values"]


def test_blocks_of_a_file_of_their_own(files: dict[str, Path], counts: MemoryCounts) -> None:
    request = request_for(files["nextn"], f"mtp('{files['blocks']}')", card(1 << 30))
    plan = count_plan(request, PlanSettings(256, -1), counts)
    sizes = {(row.part, row.kind): row.by_place.get(0, 0) for row in plan.rows}
    target, blocks = (sizes[part, "keys and values"] for part in ("target", "NextN blocks"))
    assert 0 < blocks < target
    assert 0 < sizes["NextN blocks", "weights"] < sizes["target", "weights"]


def test_cells_lie_in_the_layers_that_keep_them(
    models: dict[str, Path], counts: MemoryCounts
) -> None:
    """Three of a hybrid's four layers keep a state, which does not grow; one keeps keys."""
    (part,) = parts_of(models["qwen35"], "none", ContextOptions())
    assert isinstance(part, ModelPart)
    short, long = (counts.cells(part, n_ctx) for n_ctx in (256, 4096))
    n = len(part.model.trunk)
    attends = [more > less for less, more in zip(short, long, strict=True)]
    assert attends == [width > 0 for width in part.model.keys[:n]] + [False] * (len(short) - n)
    assert any(attends)
    assert all(short[:n])
    # A header whose names are unknown: the sum stays, and is shared out evenly.
    none = (0,) * part.model.n_layers
    unknown = replace(part.model, keys=none, states=none)
    even = counts.cells(replace(part, model=unknown), 4096)
    assert sum(even) == sum(long)
    assert max(even[:n]) - min(even[:n]) <= 2
