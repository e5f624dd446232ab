"""Devices with their memory, and the versions of the native libraries."""

from __future__ import annotations

from specrun.bindings.library import engine_versions
from specrun.bindings.machine import supports_gpu_offload, system_info
from specrun.bindings.machine.devices import devices


def test_there_is_a_cpu_with_memory():
    found = devices()
    assert [item for item in found if item.kind == "cpu"]
    for device in found:
        assert device.name
        assert device.description
        assert 0 <= device.memory_free <= device.memory_total
    assert max(item.memory_total for item in found) > 0


def test_layers_are_offloaded_where_there_is_a_device_to_offload_to():
    assert supports_gpu_offload() == any(device.kind in ("gpu", "igpu") for device in devices())


def test_versions_name_the_engine():
    versions = engine_versions()
    assert versions["llama-cpp-python"].count(".") >= 2
    assert versions["llama.cpp"]
    assert system_info()
