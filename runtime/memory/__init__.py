"""The memory plan: what models, caches and heads take of each device, and what fits."""
