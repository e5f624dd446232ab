"""`specrun inspect`: the content of a GGUF file, and comparisons of two."""
