"""`specrun train` and its trainers."""
