"""Contexts of a model: batches, rows of results, keys and values, what is read beside."""
