"""The trainer: steps, optimizers, checkpoints, exact resumption, memory and precision."""
