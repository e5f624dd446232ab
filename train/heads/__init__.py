"""Heads that read the target's states: Medusa, Hydra, EAGLE, EAGLE-3, and block drafters."""

from specrun.train.heads.dflash import DFlashRecipe
from specrun.train.heads.eagle import EagleRecipe, EagleStart
from specrun.train.heads.eagle3 import Eagle3Recipe
from specrun.train.heads.earlier_head import read_earlier_head
from specrun.train.heads.hydra import HydraRecipe
from specrun.train.heads.medusa import Medusa2Recipe, MedusaRecipe
from specrun.train.heads.run import HeadRecipe, HeadRun, ModelRecipe, TargetRecipe
