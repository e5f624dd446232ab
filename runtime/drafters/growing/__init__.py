"""One drafter grows the chains and trees of every method; a method is a `Source` of rows."""

from specrun.runtime.drafters.growing.drafter import GrowingDrafter, Plan, check_p_min
from specrun.runtime.drafters.growing.kept_rows import KeptRows, RowMemory
from specrun.runtime.drafters.growing.nodes import GrowingNodes, depth_shape
from specrun.runtime.drafters.growing.source import (
    Asked,
    Depth,
    HighestLogits,
    NodeRows,
    Source,
    whole_rows,
)
