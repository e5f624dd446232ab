"""Machines: backends, devices, the placement of layers, workers on other machines."""

from typing import TYPE_CHECKING

from specrun.bindings.faces import lazy_face

if TYPE_CHECKING:
    from specrun.bindings.machine.devices import (
        Device,
        available_memory,
        describe_backends,
        supports_gpu_offload,
        system_info,
    )
    from specrun.bindings.machine.placement import (
        Placement,
        current_placement,
        find_device,
        placing,
        resolve_placement,
    )
    from specrun.bindings.machine.workers import (
        PROTOCOL,
        Endpoint,
        add_workers,
        is_lost,
        is_reachable,
        require_workers,
    )

__getattr__, __dir__ = lazy_face(__name__)
