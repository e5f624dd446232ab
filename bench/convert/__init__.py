"""What `specrun bench convert` measures: one file for each thing, listed in `measurements`."""
