"""Online speculative decoding (Liu et al. 2023): a drafter learns from its rejected drafts."""
