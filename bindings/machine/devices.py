"""The devices ggml can compute on, with their memory."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from specrun.bindings.library import llama, native_function
from specrun.bindings.machine.workers import add_workers, worker_of

DeviceKind = Literal["cpu", "gpu", "igpu", "accel", "meta"]
_KINDS: tuple[DeviceKind, ...] = ("cpu", "gpu", "igpu", "accel", "meta")


@dataclass(frozen=True, slots=True)
class Device:
    """One ggml device; memory in bytes. `hardware` is its address on the bus, "" if unknown.

    `worker` is the HOST:PORT of a device elsewhere.
    """

    name: str
    description: str
    kind: DeviceKind
    memory_free: int
    memory_total: int
    backend: str = ""
    hardware: str = ""
    worker: str | None = None
    handle: int = field(default=0, repr=False, compare=False)
    """ggml's pointer: it says nothing outside of this process."""


class _Properties(ctypes.Structure):
    """ggml_backend_dev_props."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("description", ctypes.c_char_p),
        ("memory_free", ctypes.c_size_t),
        ("memory_total", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("device_id", ctypes.c_char_p),
        ("capabilities", ctypes.c_bool * 16),  # room: there are four or five of them
    )


def devices(workers: Sequence[str] = ()) -> list[Device]:
    """Return every device of this machine and of these workers, in ggml's order.

    Others that ggml knows are not asked for anything: one that is gone would end the process, one
    that serves somebody else would not answer. Raises as `add_workers`.
    """
    llama()
    asked = set(add_workers(workers))
    pointer = ctypes.c_void_p
    count = native_function("ggml_backend_dev_count", ctypes.c_size_t)()
    get = native_function("ggml_backend_dev_get", pointer, ctypes.c_size_t)
    handles = [get(number) for number in range(count)]
    return [_describe(item) for item in handles if item in asked or worker_of(item) is None]


def _describe(handle: int) -> Device:
    pointer = ctypes.c_void_p
    worker = worker_of(handle)
    values = _Properties()
    describe = native_function("ggml_backend_dev_get_props", None, pointer, pointer)
    describe(handle, ctypes.byref(values))
    backend = native_function("ggml_backend_dev_backend_reg", pointer, pointer)(handle)
    texts = (
        *(
            native_function(f"ggml_backend_dev_{what}", ctypes.c_char_p, pointer)(handle)
            for what in ("name", "description")
        ),
        native_function("ggml_backend_reg_name", ctypes.c_char_p, pointer)(backend),
        values.device_id,
    )
    name, description, backend_name, hardware = (
        (text or b"").decode("utf-8", "replace") for text in texts
    )
    number = native_function("ggml_backend_dev_type", ctypes.c_int, pointer)(handle)
    kind: DeviceKind = _KINDS[number] if 0 <= number < len(_KINDS) else "accel"
    memory = values.memory_free, values.memory_total
    return Device(
        name, description, kind, *memory, backend_name, hardware, worker=worker, handle=handle
    )


def offload_devices(found: Sequence[Device]) -> list[Device]:
    """Return those of `devices()` that llama.cpp puts layers on (llama_prepare_model_devices).

    Servers first, then every GPU once, though several backends may see it. Integrated GPUs share
    the machine's memory: they serve where there is no other GPU, and those of one backend only.
    """
    servers = [item for item in found if item.kind == "gpu" and item.backend == "RPC"]
    gpus: list[Device] = []
    for item in found:
        seen = {gpu.hardware for gpu in gpus if gpu.hardware}
        if item.kind == "gpu" and item.backend != "RPC" and item.hardware not in seen:
            gpus.append(item)
    integrated = [item for item in found if item.kind == "igpu"]
    shared = [item for item in integrated if item.backend == integrated[0].backend]
    return servers + (gpus or shared)


def device_alignment(device: Device) -> int:
    """Return what a device rounds the sizes of tensors up to, in bytes."""
    pointer = ctypes.c_void_p
    kind = native_function("ggml_backend_dev_buffer_type", pointer, pointer)(device.handle)
    size: int = native_function("ggml_backend_buft_get_alignment", ctypes.c_size_t, pointer)(kind)
    return size


def supports_gpu_offload() -> bool:
    """Return whether this machine has a device that layers can be offloaded to.

    llama.cpp's function of this name says so of every build with the RPC backend.
    """
    return bool(offload_devices(devices()))


def system_info() -> str:
    """Return llama.cpp's line of compiled-in instruction sets and options."""
    text: bytes = llama().llama_print_system_info()
    return text.decode()


def describe_machine() -> dict[str, object]:
    """Return what makes this machine's costs, and how its kernels round, its own."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count() or 1,
        "devices": [device.description for device in devices() if device.kind != "cpu"],
    }


def _cpu_name() -> str:
    """Return the processor's name as far as the system tells it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        for line in text.splitlines():
            if line.startswith(("model name", "Model")):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
