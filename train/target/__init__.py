"""The frozen target that heads are trained on: Hugging Face or GGUF, and its hidden states."""
