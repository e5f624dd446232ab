"""The devices ggml can compute on, with their memory."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import Literal

from specrun.bindings.library import llama, native_function

DeviceKind = Literal["cpu", "gpu", "igpu", "accel", "meta"]
_KINDS: tuple[DeviceKind, ...] = ("cpu", "gpu", "igpu", "accel", "meta")


@dataclass(frozen=True, slots=True)
class Device:
    """One ggml device; memory in bytes."""

    name: str
    description: str
    kind: DeviceKind
    memory_free: int
    memory_total: int


def _text(symbol: str, handle: int) -> str:
    text: bytes = native_function(symbol, ctypes.c_char_p, ctypes.c_void_p)(handle)
    return text.decode("utf-8", "replace")


def devices() -> list[Device]:
    """Return every device, in ggml's order."""
    pointer, sizes = ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t)
    count = native_function("ggml_backend_dev_count", ctypes.c_size_t)()
    get = native_function("ggml_backend_dev_get", pointer, ctypes.c_size_t)
    kind_of = native_function("ggml_backend_dev_type", ctypes.c_int, pointer)
    memory_of = native_function("ggml_backend_dev_memory", None, pointer, sizes, sizes)
    found = []
    for handle in map(get, range(count)):
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        memory_of(handle, ctypes.byref(free), ctypes.byref(total))
        name = _text("ggml_backend_dev_name", handle)
        description = _text("ggml_backend_dev_description", handle)
        number = kind_of(handle)
        kind: DeviceKind = _KINDS[number] if 0 <= number < len(_KINDS) else "accel"
        found.append(Device(name, description, kind, free.value, total.value))
    return found


def supports_gpu_offload() -> bool:
    """Return whether llama.cpp was built with a GPU backend that finds a device."""
    return bool(llama().llama_supports_gpu_offload())


def system_info() -> str:
    """Return llama.cpp's line of compiled-in instruction sets and options."""
    text: bytes = llama().llama_print_system_info()
    return text.decode()


def available_cores() -> int:
    """Return how many processors this process may use: llama.cpp spins, so more threads hurt."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
