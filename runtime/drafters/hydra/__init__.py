"""Hydra and Hydra++ (Ankner et al. 2024): heads that read the tokens drafted before their own."""

from specrun.runtime.drafters.hydra.build import build_hydra
from specrun.runtime.drafters.hydra.drafter import HydraDrafter, HydraState
from specrun.runtime.drafters.hydra.hydra_head import HydraCells, HydraHead
from specrun.runtime.drafters.hydra.prefix_layer import PrefixCells, PrefixLayer
