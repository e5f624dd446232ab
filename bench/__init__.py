"""Measuring: what drafting gains, and what it costs in Python. Returns data; only the command line
prints."""
