"""Overhead of Python in a round, part by part, beside the time in native evaluation."""
