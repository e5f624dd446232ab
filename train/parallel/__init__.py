"""Training of what drafts in parallel, at look-ahead positions: PaSS and SPACE."""
