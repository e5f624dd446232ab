"""`specrun inspect`: what a GGUF file holds, and how two models differ."""
