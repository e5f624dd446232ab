"""Heads in torch, named and laid out as the upstream projects' checkpoints."""
