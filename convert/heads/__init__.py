"""Heads that read a target's hidden states, from the checkpoints that exist to GGUF: one file a
kind."""
