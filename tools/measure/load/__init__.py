"""`measure load`: throughput by the number of conversations, and waiting behind a prompt."""
