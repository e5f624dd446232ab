"""Consistency training (Kou et al. 2024): a target that converges sooner under Jacobi decoding."""

from specrun.train.consistency.training import ConsistencyRecipe, ConsistencyReport
