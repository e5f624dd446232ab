"""Training of drafters, heads and the demo family; importing the package imports no torch."""
