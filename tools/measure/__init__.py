"""Measurements of specrun itself: evidence for its developers, run from a checkout."""
