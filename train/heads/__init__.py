"""Heads that read the target's hidden states: Medusa, Hydra, EAGLE and EAGLE-3."""

from specrun.train.heads.eagle import EagleInputs, EagleRecipe, EagleStart
from specrun.train.heads.eagle3 import Eagle3Recipe
from specrun.train.heads.earlier_head import read_earlier_head
from specrun.train.heads.hydra import HydraRecipe
from specrun.train.heads.learner import HeadRecipe
from specrun.train.heads.medusa import MedusaRecipe
from specrun.train.heads.medusa2 import Medusa2Recipe, train_medusa2
from specrun.train.heads.run import HeadRun, train_head
