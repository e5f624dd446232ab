"""Heads that read the target's hidden states: their files, and their graphs on ggml."""
