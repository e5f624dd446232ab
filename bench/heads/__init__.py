"""What one evaluation of a head costs, beside the bytes that it has to read."""
