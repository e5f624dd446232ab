"""Python's share of a round, part by part, beside the time in native evaluation."""
