"""`specrun accelerate`, and how a diagnosis of drafting is shown."""
