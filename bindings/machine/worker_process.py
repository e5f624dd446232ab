"""The process that serves this machine's devices to others (ggml-rpc): started by `specrun worker`.

    python -m specrun.bindings.machine.worker_process '{"endpoint": "127.0.0.1:50052", ...}'

llama.cpp's server never returns, prints to stdout, and takes any amount of memory.
So it has a process of its own, whose stdout is stderr, which may be ended at any time, and whose
address space can be bounded: an allocation that fails is then answered as such. It ends with the
process that started it, whose end closes its stdin.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

from specrun.bindings.errors import OptionError, SpecrunError
from specrun.bindings.machine.devices import Device, devices, offload_devices
from specrun.bindings.machine.limits import limit_process
from specrun.bindings.machine.placement import find_device
from specrun.bindings.machine.workers import rpc_function
from specrun.bindings.threads import available_cores

# In addition to the clients' memory: a received tensor, and the stacks of threads.
_SPARE_BYTES = 192 << 20
_STATUS = Path("/proc/self/statm")


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """The devices of a worker, and its address. `memory` in bytes, 0: no limit; `cache` "": none.

    `devices` None are the GPUs of this machine, or its CPU if there is none.
    """

    endpoint: str
    memory: int = 0
    cache: str = ""
    n_threads: int = 0
    devices: tuple[str, ...] | None = None

    def command(self) -> list[str]:
        """Return the command that serves so, until it is ended."""
        module = "specrun.bindings.machine.worker_process"
        return [sys.executable, "-m", module, json.dumps(asdict(self))]


def served_devices(names: tuple[str, ...] | None) -> list[Device]:
    """Return the devices of these names, by default the GPUs, or the CPU if there is none."""
    known = devices()
    if names is None:
        return offload_devices(known) or [device for device in known if device.kind == "cpu"][:1]
    return [find_device(name, known) for name in names]


def can_limit_memory() -> bool:
    """Whether this system bounds a process's address space, and reports its size."""
    return _STATUS.is_file()


def _serve(options: WorkerOptions) -> None:
    """Serve for ever; returns only if the server cannot be started."""
    pointer = ctypes.c_void_p
    start = rpc_function(
        "ggml_backend_rpc_start_server",
        *(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, pointer),
    )
    served = served_devices(options.devices)
    handles = (ctypes.c_void_p * len(served))(*(device.handle for device in served))
    cache = os.fsencode(options.cache) if options.cache else None
    threads = options.n_threads or available_cores()
    if options.memory:
        # Threads' stacks are address space, too: those that compute are started here.
        in_use = int(_STATUS.read_text().split()[0]) * mmap.PAGESIZE
        limit_process({"RLIMIT_AS": in_use + options.memory + _SPARE_BYTES})
    start(options.endpoint.encode(), cache, threads, len(served), handles)


def _end_with_parent() -> None:
    """End this process when the one that started it is gone, however that happened."""
    while os.read(0, 1):  # not through sys.stdin, which is locked then
        pass
    os._exit(0)


def main() -> None:
    """Serve with the options of the one argument."""
    os.dup2(2, 1)
    # Ctrl-C reaches the whole group of processes: the parent of this one decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        _serve(WorkerOptions(**json.loads(sys.argv[1])))
    except SpecrunError as error:
        os.write(2, f"{error}\n".encode())
        sys.exit(error.exit_code)
    # The server has printed the reason.
    sys.exit(OptionError.exit_code)


if __name__ == "__main__":
    main()
