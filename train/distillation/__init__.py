"""Drafters distilled from their target (DistillSpec), also for what others miss (SpecInfer)."""

from specrun.train.distillation.acceptance import MeasuredAcceptance
from specrun.train.distillation.drafter import DrafterReport, DrafterRun, train_drafter
from specrun.train.distillation.learner import DistillationLoss
