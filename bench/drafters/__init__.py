"""Drafters against plain decoding: same target, same prompts, same process."""
