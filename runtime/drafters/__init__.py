"""Drafters: each proposes a tree of tokens that the target then verifies."""
