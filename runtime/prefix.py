"""The longest common prefix of two token lists."""

from __future__ import annotations

from collections.abc import Sequence


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many leading tokens `a` and `b` share."""
    limit = min(len(a), len(b))
    if list(a[:limit]) == list(b[:limit]):  # the usual case, at the speed of C
        return limit
    return next(i for i in range(limit) if a[i] != b[i])
