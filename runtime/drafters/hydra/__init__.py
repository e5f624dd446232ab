"""Hydra and Hydra++ (Ankner et al. 2024): heads that read the tokens drafted before their own."""

from specrun.runtime.drafters.hydra.head import HydraCells, HydraHead, PrefixCells
from specrun.runtime.drafters.hydra.source import HydraSource, build_hydra
