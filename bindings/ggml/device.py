"""ggml backends for small graphs: a device with the CPU behind it, or the CPU alone."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from specrun.bindings.errors import ClosedError, SpecrunError
from specrun.bindings.functions import call
from specrun.bindings.library import NativeHandle
from specrun.bindings.machine.workers import freed_while_there, worker_of
from specrun.bindings.threads import FORK, available_cores

_CPU = 0  # enum ggml_backend_dev_type


class ComputeDevice:
    """Owns ggml backends. Graphs and weights on it keep them until they are closed themselves.

    `device`, a native handle, computes all that it can and the CPU the rest, as in llama.cpp; 0 is
    the CPU alone. Raises SpecrunError if a device cannot be started.
    """

    def __init__(self, device: int = 0, *, n_threads: int = 0) -> None:
        FORK.check()
        self.native_seconds = 0.0
        """The time that its graphs have taken so far."""
        self._backends: list[NativeHandle] = []
        cpu_device: int = call("ggml_backend_dev_by_type")(_CPU)
        self.devices = (device, cpu_device) if device else (cpu_device,)
        """The native handles of the devices, the preferred one first."""
        if device:
            self._backends.append(_started(device))
        try:
            cpu = _started(cpu_device)
        except BaseException:
            self.close()
            raise
        self.n_threads = n_threads or available_cores()
        call("ggml_backend_cpu_set_n_threads")(cpu, self.n_threads)
        # Last: ggml's scheduler falls back to the last backend, and aborts if that is no CPU.
        self._backends.append(cpu)

    @property
    def backends(self) -> list[NativeHandle]:
        """The native handles, the preferred one first and the CPU last."""
        backends = self._backends
        if not backends:
            raise ClosedError("the compute device is closed")
        return backends

    @property
    def buffer_type(self) -> int:
        """The native handle of the memory that weights go into."""
        handle: int = call("ggml_backend_get_default_buffer_type")(self.backends[0])
        return handle

    def new_scheduler(self, graph_size: int, context: NativeHandle) -> NativeHandle:
        """Return a native scheduler for a graph of up to so many nodes, tensors of `context`."""
        backends = self.backends
        handles = (ctypes.c_void_p * len(backends))(*backends)
        make = call("ggml_backend_sched_new")
        # None: every backend's default buffers. Then: no pipeline, which would copy inputs, and no
        # offload of operations whose weights lie in the CPU's memory.
        scheduler: int | None = make(handles, None, len(handles), graph_size, False, False)
        if not scheduler:
            raise SpecrunError("ggml cannot make a scheduler for a graph")
        # Freed before the context, to whose tensors it refers.
        free = self.freeing("ggml_backend_sched_free")
        return NativeHandle(scheduler, free, context, *backends)

    def freeing(self, name: str) -> Callable[[int], None]:
        """Return a function of ggml that frees memory of this device, while it is reachable."""
        worker = worker_of(self.devices[0])
        return freed_while_there(call(name), () if worker is None else (worker,))

    def supports(self, operation: int, *, writes_weights: bool = False) -> bool:
        """Return whether a backend can compute a node (a native handle) with its sources in place.

        A node that `writes_weights` writes into memory of `buffer_type`, and only the first backend
        reaches that.
        """
        backends = self.backends[:1] if writes_weights else self.backends
        return any(call("ggml_backend_supports_op")(backend, operation) for backend in backends)

    def close(self) -> None:
        """Free the backends, once nothing on them is left; calling it again does nothing."""
        self._backends = []


def _started(device: int | None) -> NativeHandle:
    backend: int | None = call("ggml_backend_dev_init")(device, None) if device else None
    if not backend:
        name = (
            call("ggml_backend_dev_name")(device).decode("utf-8", "replace") if device else "a CPU"
        )
        raise SpecrunError(f"ggml cannot start its backend for {name}")
    return NativeHandle(backend, call("ggml_backend_free"))
