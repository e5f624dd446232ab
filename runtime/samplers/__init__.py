"""llama.cpp's samplers over plain arrays: what `transform` chains to make a law of logits."""
