"""Cost of evaluating heads, beside the bytes that an evaluation has to read."""
