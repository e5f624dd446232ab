"""`specrun chat`: a conversation in the terminal."""
