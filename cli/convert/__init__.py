"""`specrun convert`: checkpoints to GGUF."""
