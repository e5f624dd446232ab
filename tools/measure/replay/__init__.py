"""Drafters along known texts by a cost curve: the same figures on any machine."""
