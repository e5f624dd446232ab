"""Drafters distilled from their target (DistillSpec), also beside others (SpecInfer)."""

from specrun.train.distillation.acceptance import MeasuredAcceptance
from specrun.train.distillation.drafter import DrafterRecipe, DrafterReport
from specrun.train.distillation.learner import DistillationLoss
