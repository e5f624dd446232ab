"""`specrun tune`: measures a pair of models and plans what to draft."""
