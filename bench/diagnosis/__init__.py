"""Why drafting pays or does not: measurements beside the expectations of the cost curve."""
