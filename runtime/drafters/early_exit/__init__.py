"""Early exit: the first layers of the target draft for all of it, by the target's own weights."""

from specrun.runtime.drafters.early_exit.drafter import EarlyExitDrafter
from specrun.runtime.drafters.early_exit.exit_layers import ExitCells, ExitLayers
