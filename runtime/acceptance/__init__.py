"""Acceptance rules: which drafted tokens are kept, and which token follows them.

A rule is pure numpy and draws only through a noise source; it knows nothing of llama.cpp.
"""
