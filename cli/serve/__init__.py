"""`specrun serve`: an engine behind HTTP, for the clients that people already have."""
