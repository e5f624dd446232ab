"""Prompts of a search: those that drafters are fitted to, and held-out ones to compare them on.

Built-in prompts are of two kinds: questions, and texts to edit, whose answers repeat much of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from specrun.bench.drafters.prompts import GENERAL_PROMPTS, read_prompts, spread
from specrun.runtime.planning import EDITED, QUESTIONS

PROMPTS = "your prompts"
"""The workload of prompts that a user gave."""

_MOST = 6  # held-out prompts of a file, spread over it: more would only take longer
_FEWEST = 4  # of a file, from which some are held out

_QUESTIONS = (
    "Why is the sky blue during the day and red in the evening?",
    "Write a short letter that asks a landlord to repair the heating.",
    "Write a Python function that returns the n-th Fibonacci number, and explain it.",
    "What should a beginner know before running a first half marathon?",
)

_NOTICE = (
    "The libary will be closed on monday the 4th of March, because the heating of the reading "
    "room are being replaced. Books that where due on that day can be returned on tuesday without "
    "a fee. The childrens corner stays open from ten to four, and the stairs to the cellar must "
    "not be used while the workers is there. If you has any questions, please call the desk "
    "between nine and noon, or write to us; we apologise and thank you for you're patience."
)
_CODE = """\
def total(orders, rate):
    result = 0
    for o in orders:
        if o.cancelled:
            continue
        amount = o.price * o.count
        if o.customer.is_member:
            amount = amount * 0.9
        result = result + amount
    result = result + result * rate
    return round(result, 2)
"""
_EDITED = (
    f"Correct the mistakes in this notice and repeat it, changing nothing else:\n\n{_NOTICE}",
    "Repeat this function with the variable `o` renamed to `order`, and change nothing else:\n\n"
    f"```python\n{_CODE}```",
)


@dataclass(frozen=True, slots=True)
class SearchPrompts:
    """Prompts to fit to, and the `held_out` ones of each workload."""

    fitting: tuple[str, ...]
    held_out: Mapping[str, tuple[str, ...]]

    @property
    def digest(self) -> str:
        """The identity of these prompts."""
        text = json.dumps([self.fitting, dict(self.held_out)])
        return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]


def search_prompts(path: Path | None) -> SearchPrompts:
    """Return the prompts of a file, every other one held out, or the built-in ones.

    A file of fewer than four prompts is fitted to and compared on as it is. Raises as
    `read_prompts` does.
    """
    if path is None:
        return SearchPrompts(GENERAL_PROMPTS, {QUESTIONS: _QUESTIONS, EDITED: _EDITED})
    given = read_prompts(path)
    if len(given) < _FEWEST:
        return SearchPrompts(given, {PROMPTS: given})
    fitting, held_out = (tuple(spread(given[start::2], _MOST)) for start in (0, 1))
    return SearchPrompts(fitting, {PROMPTS: held_out})
