"""`specrun prove`: whether the text of this pair, on this machine, is what it has to be."""
