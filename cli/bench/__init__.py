"""`specrun bench` and its measurements."""
