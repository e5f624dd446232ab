"""Placements: refusals before llama.cpp is called, and the choice of devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specrun.bindings.errors import OptionError
from specrun.bindings.gguf import read_header
from specrun.bindings.machine import (
    Device,
    Placement,
    current_placement,
    find_device,
    placing,
    resolve_placement,
)
from specrun.bindings.machine import placement as module
from specrun.bindings.models import Model

GIB = 1 << 30


def device(name: str, kind: Any = "gpu", free: int = GIB, worker: str | None = None) -> Device:
    backend = "RPC" if worker else name.rstrip("0123456789")
    handle = sum(map(ord, name))
    return Device(name, name, kind, free, 2 * free, backend, name, worker, handle)


CPU, FIRST, SECOND = device("CPU", "cpu"), device("CUDA0"), device("CUDA1", free=3 * GIB)
OURS, THEIRS = device("RPC0", worker="a:1"), device("RPC1", worker="b:1")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two GPUs, and two workers of which one is chosen."""
    theirs = {"a:1": OURS, "b:1": THEIRS}
    monkeypatch.setattr(
        module, "devices", lambda asked: [CPU, FIRST, SECOND, *(theirs[text] for text in asked)]
    )
    monkeypatch.setattr(module, "_has_split_buffers", lambda item: item.backend == "CUDA")
    monkeypatch.setattr(module, "_buffer_type", lambda item: item.handle)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, "CUDA0 CUDA1"),
        ({"rpc": ["a:1"]}, "RPC0 CUDA0 CUDA1"),
        ({"rpc": ["a:1", "b:1"]}, "RPC0 RPC1 CUDA0 CUDA1"),
        ({"devices": ["none"]}, ""),
        ({"devices": ["cuda1", "RPC0"], "rpc": ["a:1"]}, "CUDA1 RPC0"),
        ({"split_mode": "none", "main_gpu": 1}, "CUDA1"),
        ({"split_mode": "row"}, "CUDA0 CUDA1"),
    ],
)
@pytest.mark.usefixtures("machine")
def test_which_devices_are_used(options: dict[str, Any], names: str) -> None:
    placed = resolve_placement(Placement(**options))
    assert " ".join(item.name for item in placed.offload) == names
    assert placed.memory_free == sum(item.memory_free for item in placed.offload)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"devices": ["CUDA7"]}, r"no device 'CUDA7', did you mean CUDA[01]\? .*CPU, CUDA0, CUDA1"),
        ({"devices": ["none", "x"]}, "no device 'none': the devices are CPU, CUDA0"),
        ({"devices": ["CPU"]}, "not offloaded to CPU"),
        ({"devices": ["CUDA0", "cuda0"]}, "named twice"),
        ({"tensor_split": [1, 2, 3]}, r"split 1,2,3 does not add up with 2 devices \(CUDA0, CUDA1"),
        ({"tensor_split": [1]}, "one share for each"),
        ({"split_mode": "none", "main_gpu": 2}, "main GPU is 2: the devices are 0 CUDA0, 1 CUDA1"),
        ({"split_mode": "row", "rpc": ["a:1"]}, "cuts matrices, and RPC0 cannot: use layer"),
        ({"split_mode": "tensor", "devices": ["none"]}, "there is no GPU that can"),
        ({"override_tensors": [("f", "CUDA1")], "devices": ["CUDA0"]}, "not in use: CPU, CUDA0"),
        ({"override_tensors": [("f", "RPC0")]}, "there is no device 'RPC0'"),
        ({"devices": ["RPC0"]}, "there is no device 'RPC0'"),
        ({"override_tensors": [("ffn", "CUDA9")]}, "did you mean CUDA"),
    ],
)
@pytest.mark.usefixtures("machine")
def test_what_these_devices_cannot_do(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        resolve_placement(Placement(**options))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rpc": "127.0.0.1:1"}, "give a list"),
        ({"rpc": ["127.0.0.1"]}, "HOST:PORT"),
        ({"split_mode": "rows"}, "use one of none, layer, row, tensor"),
        ({"main_gpu": "0"}, "give its number"),
        ({"tensor_split": [1, -1]}, "1,-1 does not add up"),
        ({"tensor_split": [0, 0]}, "not all 0"),
        ({"tensor_split": [float("nan"), 1]}, "does not add up"),
        ({"tensor_split": ["a"]}, "a number for every device"),
        ({"override_tensors": [("(", "CPU")]}, "no regular expression"),
        ({"override_tensors": [("", "CPU")]}, "0 characters"),
        ({"override_tensors": ["ffn=CPU"]}, "not a pair"),
    ],
)
def test_what_no_devices_could_do(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        Placement(**options)


@pytest.mark.usefixtures("machine")
def test_a_model_without_layers_on_devices_leaves_workers_alone() -> None:
    placed = resolve_placement(Placement(rpc=["a:1"], tensor_split=[1, 1, 1]))
    assert [item.name for item in placed.without_layers().offload] == ["CUDA0", "CUDA1"]
    assert placed.without_layers().tensor_split == ()
    assert (placed.layers_offloaded(-1), placed.layers_offloaded(0)) == (-1, 0)
    assert resolve_placement(Placement(devices=["none"])).layers_offloaded(5) == 0


def test_where_drafts_lie() -> None:
    placement = Placement(devices=["CUDA0"], devices_draft=["CUDA1"], tensor_split=[1])
    assert placement.for_drafts == Placement(devices=["CUDA1"])
    assert Placement(devices=["CUDA0"], tensor_split=[1]).for_drafts == Placement(devices=["CUDA0"])
    with placing(placement):
        assert current_placement() == placement
        assert current_placement(drafts=True).devices == ("CUDA1",)
    assert current_placement() == Placement()


def test_a_name_is_found_in_whatever_case() -> None:
    assert find_device(" cuda1", [CPU, FIRST, SECOND]) is SECOND


def test_a_pattern_that_matches_no_tensor(tiny_model: Path) -> None:
    with (
        placing(Placement(override_tensors=[("ffn_.*_exps", "CPU")])),
        pytest.raises(OptionError, match=r"no tensor's name matches 'ffn_\.\*_exps': .*such as"),
    ):
        Model(tiny_model)
    found = resolve_placement(Placement(override_tensors=[("ffn_.*", "CPU")]))
    found.check_patterns(read_header(tiny_model))
