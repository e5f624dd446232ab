"""Devices of this machine and their memory, and the backends of ggml that reach them."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from specrun.bindings.functions import call
from specrun.bindings.installation import build_command, source_folder
from specrun.bindings.library import llama
from specrun.bindings.machine.workers import add_workers, worker_of
from specrun.bindings.threads import control_groups, read_text

# == Devices that ggml can compute on, with their memory ===========================================


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
    """ggml's pointer: it has no meaning outside of this process."""


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

    No function is called of other workers in ggml's list: one that is gone would end the process,
    one that serves another client would not answer. Raises as `add_workers`.
    """
    llama()
    asked = set(add_workers(workers))
    handles = map(call("ggml_backend_dev_get"), range(call("ggml_backend_dev_count")()))
    return [_describe(item) for item in handles if item in asked or worker_of(item) is None]


def _describe(handle: int) -> Device:
    values = _Properties()
    call("ggml_backend_dev_get_props")(handle, ctypes.byref(values))
    number = call("ggml_backend_dev_type")(handle)
    return Device(
        name=_text(call("ggml_backend_dev_name")(handle)),
        description=_text(call("ggml_backend_dev_description")(handle)),
        kind=_KINDS[number] if 0 <= number < len(_KINDS) else "accel",
        memory_free=values.memory_free,
        memory_total=values.memory_total,
        backend=_text(call("ggml_backend_reg_name")(call("ggml_backend_dev_backend_reg")(handle))),
        hardware=_text(values.device_id),
        worker=worker_of(handle),
        handle=handle,
    )


def _text(text: bytes | None) -> str:
    return (text or b"").decode("utf-8", "replace")


def offload_devices(found: Sequence[Device]) -> list[Device]:
    """Return those of `devices()` that llama.cpp puts layers on (llama_prepare_model_devices).

    Servers first, then every GPU once, though several backends may see it. Integrated GPUs share
    the machine's memory: they serve if there is no other GPU, and those of one backend only.
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


def supports_gpu_offload() -> bool:
    """Return whether this machine has a device that layers can be offloaded to.

    llama.cpp's function of this name is true for every build with the RPC backend.
    """
    return bool(offload_devices(devices()))


def system_info() -> str:
    """Return llama.cpp's line of compiled-in instruction sets and options."""
    text: bytes = llama().llama_print_system_info()
    return text.decode()


def describe_machine() -> dict[str, object]:
    """Return the facts that this machine's costs and the rounding of its kernels depend on."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count() or 1,
        "devices": [device.description for device in devices() if device.kind != "cpu"],
    }


def _cpu_name() -> str:
    """Return the processor's name as far as the system has it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        for line in text.splitlines():
            if line.startswith(("model name", "Model")):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


# == Backends of ggml in this llama.cpp, and the builds that have others ===========================


_NVIDIA_DRIVER = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"))
_RENDERERS = Path("/dev/dri")
# The setting of `make` that builds a backend, by its name in ggml.
_BUILDS = {"CUDA": " CUDA=1", "Vulkan": " VULKAN=1", "Metal": "", "RPC": ""}
_ALIASES = {"MTL": "Metal"}


def built_backends() -> list[str]:
    """Return the names of the backends that were built, such as CPU, CUDA, Metal, RPC, Vulkan."""
    llama()
    found = map(call("ggml_backend_reg_get"), range(call("ggml_backend_reg_count")()))
    names = [_text(call("ggml_backend_reg_name")(registry)) for registry in found]
    return [_ALIASES.get(name, name) for name in names]


def describe_backends(built: Sequence[str], found: Sequence[Device]) -> dict[str, str]:
    """Return a sentence for each backend: its devices, the reason for none, or its requirements."""
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
    """Return the reason to build a missing backend."""
    if name == "CUDA" and _has_nvidia_driver():
        return ", and an NVIDIA driver is here"
    if name == "Vulkan" and _RENDERERS.is_dir():
        return f", and a GPU is here ({_RENDERERS})"
    return ""


def _has_nvidia_driver() -> bool:
    return any(path.exists() for path in _NVIDIA_DRIVER)


# == Host memory: bytes that programs may still take, within the limits of control groups ==========


_UNKNOWN = 1 << 62


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes that can be had without swapping; `root` is the folder of /proc and /sys.

    Linux's MemAvailable, or the rest of the control groups' limits if that is less: cached files
    can be dropped. Elsewhere the physical memory; if nothing is known, more than any machine
    has.
    """
    found = [_meminfo(root) or _physical()]
    for controllers, groups in control_groups("memory", root):
        for group in groups:
            folder = root / "sys/fs/cgroup" / ("memory" if controllers else "") / group
            found.append(_left(folder, version=1 if controllers else 2))
    return max(0, min(found))


def _left(folder: Path, version: int) -> int:
    """Return the rest of a group's limit, `_UNKNOWN` without one."""
    names = ("memory.max", "memory.current") if version == 2 else _FIRST_NAMES
    limit, used = (read_text(folder / name) for name in names)
    if not limit.isdigit() or not used.isdigit():
        return _UNKNOWN
    kinds = ("inactive_file", "active_file", "total_inactive_file", "total_active_file")
    counts = dict(line.split() for line in read_text(folder / "memory.stat").splitlines() if line)
    of_files = sum(int(counts.get(kind, 0)) for kind in kinds[2 if version == 1 else 0 :][:2])
    return int(limit) - max(0, int(used) - of_files)


_FIRST_NAMES = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def _meminfo(root: Path) -> int:
    for line in read_text(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) << 10
    return 0


def _physical() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # Windows
        return _UNKNOWN
