"""Placement: on which devices a model's layers, tensors and keys and values lie.

Devices have llama.cpp's names (CUDA0, RPC0, ...). Those of other machines get theirs in the order
in which their workers are named.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from specrun.bindings.errors import OptionError
from specrun.bindings.functions import call
from specrun.bindings.gguf import GGUFHeader
from specrun.bindings.library import llama
from specrun.bindings.machine.devices import Device, devices, offload_devices
from specrun.bindings.machine.workers import Endpoint

SplitMode = Literal["none", "layer", "row", "tensor"]
_SPLIT_MODES: tuple[SplitMode, ...] = get_args(SplitMode)
_NONE = "none"
_MAX_DEVICES = 14  # with the CPU and its accelerators: GGML_SCHED_MAX_BACKENDS, 16
_MAX_REGEX = 1000


@dataclass(frozen=True, slots=True)
class Placement:
    """The devices of models: llama.cpp's options of the same names.

    `rpc` are workers, HOST:PORT. `devices` None takes those of the workers and every GPU of this
    machine, ("none",) none at all; `devices_draft` are for draft models and heads, None for
    the target's. `split_mode` "none" puts all layers on device number `main_gpu`, "layer" spreads
    whole layers over all devices, in the proportions of `tensor_split`, by default of their free
    memory; "row" and "tensor" cut matrices, if devices can. `override_tensors` are pairs of a
    regular expression and a device: tensors whose names it is found in go there.
    """

    rpc: tuple[str, ...] = ()
    devices: tuple[str, ...] | None = None
    devices_draft: tuple[str, ...] | None = None
    split_mode: SplitMode = "layer"
    tensor_split: tuple[float, ...] = ()
    main_gpu: int = 0
    override_tensors: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for name in ("rpc", "devices", "devices_draft", "tensor_split", "override_tensors"):
            if isinstance(getattr(self, name), str):
                raise OptionError(f"{name} is {getattr(self, name)!r}: give a list")
            if getattr(self, name) is not None:
                object.__setattr__(self, name, tuple(getattr(self, name)))
        for worker in self.rpc:
            Endpoint.parse(worker)
        if self.split_mode not in _SPLIT_MODES:
            known = ", ".join(_SPLIT_MODES)
            raise OptionError(f"the split mode is {self.split_mode!r}: use one of {known}")
        if isinstance(self.main_gpu, bool) or not isinstance(self.main_gpu, int):
            raise OptionError(f"the main GPU is {self.main_gpu!r}: give its number, from 0")
        shares = self.tensor_split
        if not all(isinstance(share, (int, float)) for share in shares):
            raise OptionError(f"the tensor split is {shares}: give a number for every device")
        if shares and not (min(shares) >= 0.0 and 0.0 < sum(shares) < math.inf):
            text = ",".join(f"{share:g}" for share in shares)
            advice = "give shares such as 3,1, not negative and not all 0"
            raise OptionError(f"the tensor split {text} does not add up: {advice}")
        for pair in self.override_tensors:
            if len(pair) != 2 or isinstance(pair, str):
                raise OptionError(f"{pair!r} is not a pair of a pattern and a device")
            _compiled(pair[0])

    @property
    def for_drafts(self) -> Placement:
        """The placement of draft models and heads."""
        if self.devices_draft is None:
            return Placement(self.rpc, self.devices, None, self.split_mode, (), self.main_gpu)
        return Placement(self.rpc, self.devices_draft)


@dataclass(frozen=True, slots=True)
class Placed:
    """A placement on the devices of this machine: the parameters for llama.cpp.

    `offload` are the devices for layers; `buffers` are patterns with native handles of the kinds
    of memory that tensors go to.
    """

    offload: tuple[Device, ...]
    split_mode: SplitMode = "layer"
    tensor_split: tuple[float, ...] = ()
    buffers: tuple[tuple[str, int], ...] = ()
    kept: list[object] = field(default_factory=list, repr=False, compare=False)

    @property
    def memory_free(self) -> int:
        """The free memory of all devices that layers go to, in bytes."""
        return sum(device.memory_free for device in self.offload)

    def layers_offloaded(self, n_gpu_layers: int) -> int:
        """Return how many layers (-1: all) of the given number go to devices.

        llama.cpp ignores the number if there is no device; so do others.
        """
        return n_gpu_layers if n_gpu_layers != 0 and self.offload else 0

    def without_layers(self) -> Placed:
        """Return the parameters of a model without layers on devices: it connects to no worker.

        A GPU of this machine still computes with long prompts.
        """
        if self.buffers:
            return self
        return Placed(tuple(device for device in self.offload if device.worker is None))

    @property
    def workers(self) -> tuple[str, ...]:
        """The workers that layers may lie on."""
        return tuple(dict.fromkeys(item.worker for item in self.offload if item.worker))

    def check_patterns(self, header: GGUFHeader) -> None:
        """Raise OptionError for a pattern that no tensor's name matches."""
        for pattern, _ in self.buffers:
            found = _compiled(pattern)
            if not any(found.search(tensor.name) for tensor in header.tensors):
                example = header.tensors[-1].name if header.tensors else "none"
                problem = f"no tensor's name matches {pattern!r}"
                raise OptionError(f"{problem}: names are such as {example}")

    def apply(self, params: Any) -> None:  # noqa: ANN401 - a ctypes structure
        """Put it into llama_model_params, which must not outlive this object."""
        handles = [device.handle for device in self.offload]
        array = (ctypes.c_void_p * (len(handles) + 1))(*handles, None)
        params.devices = ctypes.cast(array, ctypes.c_void_p)
        params.split_mode = _SPLIT_MODES.index(self.split_mode)
        params.main_gpu = 0  # with "none" the others are left out already
        self.kept.append(array)
        if self.tensor_split:
            room = max(int(llama().llama_max_devices()), len(self.tensor_split))
            shares = (ctypes.c_float * room)(*self.tensor_split)
            params.tensor_split = shares
            self.kept.append(shares)
        if self.buffers:
            overrides = (_Override * (len(self.buffers) + 1))()
            for place, (pattern, buffer_type) in enumerate(self.buffers):
                overrides[place] = _Override(pattern.encode(), buffer_type)
            params.tensor_buft_overrides = ctypes.cast(overrides, ctypes.c_void_p)
            self.kept.append(overrides)


class _Override(ctypes.Structure):
    """llama_model_tensor_buft_override; an empty one ends a list."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p))


_EVERYWHERE = Placement()
_current: ContextVar[Placement] = ContextVar("placement", default=_EVERYWHERE)


@contextmanager
def placing(placement: Placement) -> Iterator[None]:
    """Open models with this placement, until the end and in this thread."""
    before = _current.set(placement)
    try:
        yield
    finally:
        _current.reset(before)


def current_placement(*, drafts: bool = False) -> Placement:
    """Return the placement of `placing`, for a model or for drafts."""
    return _current.get().for_drafts if drafts else _current.get()


def resolve_placement(placement: Placement) -> Placed:
    """Find the devices that a placement names; connects to workers that are new.

    Raises OptionError for names that no device has, with the nearest and the list.
    """
    known = devices(placement.rpc)
    if placement.devices is None:
        chosen = offload_devices(known)
    elif placement.devices == (_NONE,):
        chosen = []
    else:
        chosen = [_find_gpu(name, known) for name in placement.devices]
        if len({device.handle for device in chosen}) < len(chosen):
            raise OptionError(f"a device is named twice in {','.join(placement.devices)}")
    _check_split(placement, chosen)
    if placement.split_mode == _NONE:
        chosen = chosen[placement.main_gpu :][:1]
    buffers = tuple(
        (pattern, _buffer_type(_find_memory(name, chosen, known)))
        for pattern, name in placement.override_tensors
    )
    return Placed(tuple(chosen), placement.split_mode, placement.tensor_split, buffers)


def find_device(name: str, known: Sequence[Device]) -> Device:
    """Return the device of a name, in whatever case; raises OptionError with those there are."""
    for device in known:
        if device.name.lower() == name.strip().lower():
            return device
    from difflib import get_close_matches

    names = [device.name for device in known]
    near = get_close_matches(name.upper(), names, n=1, cutoff=0.6)
    hint = f", did you mean {near[0]}?" if near else ":"
    raise OptionError(f"there is no device {name!r}{hint} the devices are {', '.join(names)}")


def _check_split(placement: Placement, chosen: Sequence[Device]) -> None:
    mode, n_devices = placement.split_mode, len(chosen)
    if n_devices > _MAX_DEVICES:
        problem = f"{n_devices} devices are too many: llama.cpp computes with {_MAX_DEVICES}"
        raise OptionError(f"{problem} at once, so name those to use")
    if placement.tensor_split and len(placement.tensor_split) != n_devices:
        given = ",".join(f"{share:g}" for share in placement.tensor_split)
        names = ", ".join(device.name for device in chosen) or "none"
        problem = f"the tensor split {given} does not add up with {n_devices} devices ({names})"
        raise OptionError(f"{problem}: give one share for each")
    if mode == "none" and n_devices and not 0 <= placement.main_gpu < n_devices:
        names = ", ".join(f"{number} {device.name}" for number, device in enumerate(chosen))
        raise OptionError(f"the main GPU is {placement.main_gpu}: the devices are {names}")
    if mode in ("row", "tensor"):
        unable = [device.name for device in chosen if not _has_split_buffers(device)]
        if unable or not chosen:
            subject = f"{', '.join(unable)} cannot" if unable else "there is no GPU that can"
            advice = "use layer, which puts whole layers on devices"
            raise OptionError(f"split mode {mode} cuts matrices, and {subject}: {advice}")


def _has_split_buffers(device: Device) -> bool:
    registry = call("ggml_backend_dev_backend_reg")(device.handle)
    find = call("ggml_backend_reg_get_proc_address")
    return bool(find(registry, b"ggml_backend_split_buffer_type"))


def _find_gpu(name: str, known: Sequence[Device]) -> Device:
    device = find_device(name, known)
    if device.kind not in ("gpu", "igpu"):
        problem = f"layers are not offloaded to {device.name} ({device.kind})"
        raise OptionError(f"{problem}: name GPUs and workers' devices, or none")
    return device


def _find_memory(name: str, chosen: Sequence[Device], known: Sequence[Device]) -> Device:
    """Return a device for single tensors: one that layers go to, or the CPU."""
    device = find_device(name, known)
    if device.kind != "cpu" and device not in chosen:
        names = ", ".join(["CPU", *(item.name for item in chosen)])
        raise OptionError(f"tensors cannot go to {device.name}, which is not in use: {names}")
    return device


def _buffer_type(device: Device) -> int:
    """Return the native handle of a device's memory; the CPU's is plain, without repacking."""
    handle: int = call("ggml_backend_dev_buffer_type")(device.handle)
    return handle


def _compiled(pattern: str) -> re.Pattern[str]:
    if not pattern or len(pattern) > _MAX_REGEX:
        raise OptionError(
            f"the pattern {pattern[:40]!r} has {len(pattern)} characters, not 1 to {_MAX_REGEX}"
        )
    try:
        return re.compile(pattern)
    except re.error as error:
        problem = f"the pattern {pattern!r} is no regular expression ({error})"
        raise OptionError(f"{problem}: write such as 'ffn_.*_exps'") from None
