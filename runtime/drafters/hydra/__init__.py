"""Hydra and Hydra++ (Ankner et al. 2024): heads that read the tokens drafted before their own."""

from specrun.runtime.drafters.hydra.drafter import HydraSource, HydraState, build_hydra
from specrun.runtime.drafters.hydra.head import HydraCells, HydraHead, PrefixCells, PrefixLayer
