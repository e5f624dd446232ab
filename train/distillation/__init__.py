"""Drafters distilled from their target (DistillSpec, Zhou et al. 2023), also for what others miss
(SpecInfer)."""
