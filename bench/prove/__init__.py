"""`specrun prove`: checks that the text of this pair, on this machine, is the target's own."""
