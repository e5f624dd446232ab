"""Training of drafters, heads and the embedded demo family; importing the package imports no
torch."""
