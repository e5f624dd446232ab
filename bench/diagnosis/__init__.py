"""Why drafting pays or does not: what was measured beside what the cost curve lets expect."""
