"""Corpora of tokens ordered by context: what REST retrieves from, and what prompt lookup reads as a reference."""
