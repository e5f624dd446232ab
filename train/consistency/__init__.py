"""Consistency training (Kou et al. 2024): a target that converges sooner under Jacobi decoding."""

from specrun.train.consistency.learner import ConsistencyRecipe
from specrun.train.consistency.training import ConsistencyRun, train_consistency
