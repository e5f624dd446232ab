"""Online speculative decoding (Liu et al. 2024): a drafter learns from its rejected drafts."""
