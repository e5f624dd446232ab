"""The memory plan: bytes of models, caches and heads on each device, and the most that fits.

`shape` sums weights by layer from headers, `count` gets cells and compute buffers from llama.cpp,
which counts them without allocating them, `plan` adds up the parts of a runtime by device, and
`choice` chooses the layers and the context that fit; `fit` does so on this machine.
"""

from typing import TYPE_CHECKING

from specrun.bindings.faces import lazy_face

if TYPE_CHECKING:
    from specrun.runtime.memory.choice import (
        WayOut,
        Wish,
        choose_plan,
        refusal,
        size_text,
        ways_out,
    )
    from specrun.runtime.memory.count import MemoryCounts, parts_of
    from specrun.runtime.memory.fit import (
        Fitted,
        LayerCount,
        Loading,
        LoadOptions,
        Room,
        fit_here,
        fitted_here,
        layer_number,
        layers_here,
        layers_of,
        noting_plan,
        parse_layer_count,
        plan_in_use,
        resolve_gpu_layers,
        room_here,
    )
    from specrun.runtime.memory.plan import MemoryPlan, PlanRequest, PlanSettings, count_plan
    from specrun.runtime.memory.shape import MemoryDevice, card

__getattr__, __dir__ = lazy_face(__name__)
