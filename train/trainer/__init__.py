"""The trainer: steps, optimizers, checkpoints, exact resumption, memory and precision."""

from specrun.train.trainer.learner import Curves, TrainingStatus
from specrun.train.trainer.run import Recipe, TrainingReport, TrainingRun, train
from specrun.train.trainer.settings import MatrixOptimizer, usable_device, usable_precision
