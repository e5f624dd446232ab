"""Helpers of the tests: tiny models and checkpoints, references, laws by enumeration."""
