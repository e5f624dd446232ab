"""Measurements of the server: its cost per round, and what it does under thousands of requests."""
