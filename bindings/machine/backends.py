"""The backends of ggml that this llama.cpp was built with, and what others would need."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Sequence
from pathlib import Path

from specrun.bindings.installation import build_command, source_folder
from specrun.bindings.library import llama, native_function
from specrun.bindings.machine.devices import Device

_NVIDIA_DRIVER = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"))
_RENDERERS = Path("/dev/dri")
# What builds a backend, by its name in ggml: the setting of `make`.
_BUILDS = {"CUDA": " CUDA=1", "Vulkan": " VULKAN=1", "Metal": "", "RPC": ""}
_ALIASES = {"MTL": "Metal"}


def built_backends() -> list[str]:
    """Return the names of the backends that were built, such as CPU, CUDA, Metal, RPC, Vulkan."""
    llama()
    pointer = ctypes.c_void_p
    get = native_function("ggml_backend_reg_get", pointer, ctypes.c_size_t)
    name_of = native_function("ggml_backend_reg_name", ctypes.c_char_p, pointer)
    count = native_function("ggml_backend_reg_count", ctypes.c_size_t)()
    names = [(name_of(get(number)) or b"").decode() for number in range(count)]
    return [_ALIASES.get(name, name) for name in names]


def describe_backends(built: Sequence[str], found: Sequence[Device]) -> dict[str, str]:
    """Return a sentence for each backend: its devices, why it has none, or what it needs."""
    sentences = {}
    for name in dict.fromkeys([*built, *_BUILDS]):
        if name == "Metal" and name not in built and platform.system() != "Darwin":
            continue
        own = [device for device in found if _ALIASES.get(device.backend, device.backend) == name]
        if own:
            listed = ", ".join(device.name for device in own)
            sentences[name] = f"built, devices {listed}"
        elif name in built:
            sentences[name] = f"built, no device: {_without_device(name)}"
        else:
            sentences[name] = f"not built{_seen(name)}: {_how_to_build(name)}"
    return sentences


def _how_to_build(name: str) -> str:
    from_sources = source_folder() is not None
    toolkit = ", without a CUDA toolkit, too" if from_sources else ", with the CUDA toolkit"
    remark = {"CUDA": toolkit, "Metal": " on Apple silicon"}.get(name, "")
    command = build_command(f"make chat{_BUILDS[name]}", f"GGML_{name.upper()}=ON")
    return f"{command} builds it{remark}"


def _without_device(name: str) -> str:
    if name == "RPC":
        return "name workers (--rpc HOST:PORT; `specrun worker` starts one)"
    if name == "CUDA":
        if not _has_nvidia_driver():
            return "no NVIDIA driver is loaded here"
        return "the NVIDIA driver is here and shows no GPU that this build can use"
    if name == "Vulkan":
        return "no driver offers a GPU to Vulkan's loader"
    return "none was found"


def _seen(name: str) -> str:
    """Return what speaks for building a backend that is missing."""
    if name == "CUDA" and _has_nvidia_driver():
        return ", and an NVIDIA driver is here"
    if name == "Vulkan" and _RENDERERS.is_dir():
        return f", and a GPU is here ({_RENDERERS})"
    return ""


def _has_nvidia_driver() -> bool:
    return any(path.exists() for path in _NVIDIA_DRIVER)
