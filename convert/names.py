"""Names of options: the nearest known one to what was typed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(typed: str, known: Iterable[str]) -> str:
    """Return " (did you mean X?)" for the nearest `known` name, "" where none is near."""
    found = difflib.get_close_matches(typed, list(known), n=1, cutoff=0.5)
    return f" (did you mean {found[0]}?)" if found else ""
