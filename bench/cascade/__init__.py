"""Cascades of two models: quality against latency, rule by rule."""
