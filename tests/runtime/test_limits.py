"""Round limits: an answer never outgrows its length or the context."""

from __future__ import annotations

import dataclasses

import pytest

from specrun.bindings.errors import OptionError
from specrun.bindings.gguf import read_header
from specrun.bindings.machine.devices import Device, offload_devices
from specrun.runtime.memory import parse_layer_count, resolve_gpu_layers
from specrun.runtime.round.loop import RoundLimits
from specrun.runtime.trees import ROOT, DraftTree, TreeBuilder


def limits(n_ctx=100, max_nodes=16, max_tokens=None) -> RoundLimits:
    return RoundLimits(n_ctx=n_ctx, max_nodes=max_nodes, max_tokens=max_tokens)


@pytest.mark.parametrize(
    ("committed", "allowed"),
    [
        (1, (16, 16)),
        (84, (16, 16)),
        (90, (10, 10)),
        (99, (1, 1)),
        (100, (0, 0)),  # the last position is the pending token's
    ],
)
def test_the_tree_shrinks_before_the_context_overflows(committed, allowed):
    limit = limits()
    assert limit.next_round(committed)
    assert (limit.max_depth, limit.max_nodes) == allowed


def test_a_full_context_has_no_further_round_and_an_answer_of_no_tokens_none():
    assert not limits().next_round(101)
    assert not limits(max_tokens=0).next_round(10)


@pytest.mark.parametrize(("left", "depth"), [(1, 0), (2, 1), (6, 5)])
def test_a_round_never_produces_more_than_is_left(left, depth):
    limit = limits(max_tokens=left)
    assert limit.next_round(10)
    assert limit.max_depth == depth


def test_the_length_counts_from_the_first_round_on():
    limit = limits(max_tokens=5)
    assert limit.next_round(10)
    assert limit.next_round(13)
    assert limit.max_depth == 1
    assert not limit.next_round(15)


def test_limits_of_rounds_one_after_the_other_are_those_of_a_round_alone():
    for n_ctx, max_nodes, max_tokens in [(60, 7, None), (60, 7, 30), (60, 90, 30), (20, 0, 9)]:
        in_turn = limits(n_ctx, max_nodes, max_tokens)
        for committed in range(4, 70):
            left = None if max_tokens is None else max(0, max_tokens - committed + 4)
            alone = limits(n_ctx, max_nodes, left)
            goes_on = in_turn.next_round(committed)
            assert goes_on == alone.next_round(committed)
            if goes_on:
                assert (in_turn.max_depth, in_turn.max_nodes) == (alone.max_depth, alone.max_nodes)


def test_without_a_length_only_the_context_ends_the_answer():
    limit = limits(n_ctx=10**7)
    assert limit.next_round(10)
    assert limit.next_round(10**6)


def tree(*depths_of_leaves: int) -> DraftTree:
    builder = TreeBuilder()
    for leaf, depth in enumerate(depths_of_leaves):
        node = ROOT
        for step in range(depth):
            node = builder.add(node, 100 * leaf + step)
    return builder.build()


@pytest.mark.parametrize(
    ("proposed", "fits"),
    [
        (tree(), True),
        (tree(3), True),
        (tree(2, 2), True),
        (tree(4), False),
        (tree(3, 2), False),
        (tree(1), True),
    ],
    ids=["empty", "chain", "two-chains", "too-deep", "too-large", "one"],
)
def test_a_drafter_that_proposes_more_than_allowed_is_named(proposed, fits):
    limit = limits(n_ctx=10, max_nodes=4, max_tokens=4)
    assert limit.next_round(1)  # trees of depth 3
    if fits:
        limit.check(proposed, "greedy drafter")
    else:
        with pytest.raises(OptionError, match="greedy drafter proposed"):
            limit.check(proposed, "greedy drafter")


@pytest.mark.parametrize(
    ("text", "expected"), [("auto", "auto"), ("all", "all"), ("0", 0), ("33", 33), ("-1", -1)]
)
def test_layer_counts(text, expected):
    assert parse_layer_count(text) == expected


@pytest.mark.parametrize("text", ["", "many", "1.5", "0x1"])
def test_a_layer_count_that_is_none(text):
    with pytest.raises(OptionError, match="number, auto or all"):
        parse_layer_count(text)


def test_layers_are_resolved(tiny_model, monkeypatch):
    with pytest.raises(OptionError, match="-2"):
        resolve_gpu_layers(-2, tiny_model)
    for found, counts in (([CPU], (0, 0, 0, 0)), ([CUDA, CPU], (-1, 5, 0, -1))):
        known = found
        found_here = "specrun.bindings.machine.placement.devices"
        monkeypatch.setattr(found_here, lambda _workers, k=known: k)
        assert tuple(resolve_gpu_layers(n, tiny_model) for n in ("all", 5, 0, "auto")) == counts


GB = 10**9
CUDA = Device("CUDA0", "", "gpu", 8 * GB, 8 * GB, "CUDA", "0000:01:00.0")
SECOND = Device("CUDA1", "", "gpu", 4 * GB, 8 * GB, "CUDA", "0000:02:00.0")
TWIN = Device("Vulkan0", "", "gpu", 8 * GB, 8 * GB, "Vulkan", "0000:01:00.0")
NAMELESS = Device("SYCL0", "", "gpu", 2 * GB, 2 * GB, "SYCL")
INTEGRATED = Device("Vulkan1", "", "igpu", 64 * GB, 64 * GB, "Vulkan", "0000:00:02.0")
OF_ANOTHER = Device("SYCL1", "", "igpu", 64 * GB, 64 * GB, "SYCL", "0000:00:02.0")
SERVER = Device("RPC0", "", "gpu", 16 * GB, 16 * GB, "RPC")
CPU = Device("CPU", "", "cpu", 64 * GB, 64 * GB, "CPU")
BLAS = Device("BLAS", "", "accel", 0, 0, "BLAS")


@pytest.mark.parametrize(
    ("found", "used"),
    [
        ([CPU, BLAS], []),
        ([CUDA, SECOND, CPU], [CUDA, SECOND]),
        ([CUDA, INTEGRATED, CPU], [CUDA]),
        ([CUDA, TWIN, INTEGRATED, CPU], [CUDA]),
        ([CUDA, NAMELESS, NAMELESS], [CUDA, NAMELESS, NAMELESS]),
        ([INTEGRATED, CPU], [INTEGRATED]),
        ([INTEGRATED, OF_ANOTHER, CPU], [INTEGRATED]),
        ([INTEGRATED, SERVER, CPU], [SERVER, INTEGRATED]),
        ([CUDA, INTEGRATED, SERVER], [SERVER, CUDA]),
    ],
)
def test_layers_go_to_the_devices_that_llama_would_use(found, used):
    """llama_prepare_model_devices, read in src/llama.cpp: the default without --device."""
    assert offload_devices(found) == used


@pytest.mark.parametrize(("share", "expected"), [(10.0, -1), (1.0, 1), (0.0, 0)])
def test_auto_takes_what_fits_into_free_memory(tiny_model, monkeypatch, share, expected):
    weights = sum(tensor.n_bytes for tensor in read_header(tiny_model).tensors)
    gpu = dataclasses.replace(CUDA, memory_free=int(weights * share))
    # The machine's own memory, offered by its integrated GPU, holds everything: nobody asks it.
    found = [gpu, INTEGRATED, CPU]
    monkeypatch.setattr("specrun.bindings.machine.placement.devices", lambda _workers: found)
    assert resolve_gpu_layers("auto", tiny_model) == expected
