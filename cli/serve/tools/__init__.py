"""Tools and reasoning in requests: what models may call, and replies taken apart."""
