"""`specrun tune`: measures a pair of models and plans the drafts."""
