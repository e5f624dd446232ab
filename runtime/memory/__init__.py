"""The memory plan: what models, caches and heads take of each device, and what fits.

`model_shape`, `tensor_places` and `cells` count from headers alone; `counts` asks llama.cpp for
compute buffers, without allocating; `parts` are a runtime's, `memory_plan` their sum by device;
`choice` looks for layers and context that fit, `fitted` does so for the devices that are here.
"""

from specrun.runtime.memory.choice import WayOut, Wish, choose_plan, ways_out
from specrun.runtime.memory.counts import AskedCounts, Counts
from specrun.runtime.memory.fitted import (
    Fitted,
    Loading,
    fit_here,
    layers_here,
    noting_plan,
    plan_in_use,
)
from specrun.runtime.memory.memory_device import MemoryDevice, card
from specrun.runtime.memory.memory_plan import (
    MemoryPlan,
    PlanRequest,
    PlanRow,
    PlanSettings,
    count_plan,
)
from specrun.runtime.memory.parts import parts_of
from specrun.runtime.memory.wording import refusal, size_text

__all__ = [
    "AskedCounts",
    "Counts",
    "Fitted",
    "Loading",
    "MemoryDevice",
    "MemoryPlan",
    "PlanRequest",
    "PlanRow",
    "PlanSettings",
    "WayOut",
    "Wish",
    "card",
    "choose_plan",
    "count_plan",
    "fit_here",
    "layers_here",
    "noting_plan",
    "parts_of",
    "plan_in_use",
    "refusal",
    "size_text",
    "ways_out",
]
