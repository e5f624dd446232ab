"""Contexts of a model: batches, rows of results, keys and values, embeddings as inputs."""
