"""Measurements of drafting: its gain, and its cost in Python. Returns data; only the command line
prints."""
