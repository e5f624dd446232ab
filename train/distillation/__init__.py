"""Drafters distilled from their target (DistillSpec), also for what others miss (SpecInfer)."""
