"""Filling in the middle, for editors: /infill, and the `suffix` of completions."""
