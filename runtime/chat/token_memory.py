"""The tokens of the last texts: a conversation that grew is tokenized from its first change on.

Agents send the whole conversation with every request. llama.cpp reads the texts between control
tokens one by one, so tokens up to a control token do not depend on the text behind it.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from dataclasses import dataclass

from specrun.bindings.models import Vocabulary

_SHORT = 2_000  # characters that are not worth remembering: they take less than a millisecond
_MOST_TEXTS = 16
_MOST_CHARACTERS = 4 << 20


@dataclass(frozen=True, slots=True)
class _Tokenized:
    """A text with its tokens; behind token `counts[k]` - 1, a control token, `ends[k]` begins."""

    text: str
    tokens: list[int]
    ends: list[int]
    counts: list[int]


class TokenMemory:
    """Tokenizes texts that often begin as earlier ones; for several threads at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[_Tokenized] = []  # the latest last

    def tokenize(self, text: str, vocabulary: Vocabulary) -> list[int]:
        """Return the tokens of a text, names of control tokens read as such; nothing is added."""
        if len(text) < _SHORT or vocabulary.strips:
            return vocabulary.tokenize(text, add_special=False, parse_special=True)
        with self._lock:
            kept = [*self._kept]
        margin = max(map(len, vocabulary.special_texts), default=0)
        best, n_ends = None, 0
        for each in reversed(kept):
            # A name may reach over the end of the common part.
            shared = _n_shared(each.text, text) - margin
            count = bisect_right(each.ends, shared)
            if count and (best is None or each.ends[count - 1] > best.ends[n_ends - 1]):
                best, n_ends = each, count
        made = _continued(text, best, n_ends, vocabulary)
        with self._lock:
            if best is not None and text.startswith(best.text):  # the conversation went on
                self._kept = [each for each in self._kept if each is not best]
            self._kept = _newest([*self._kept, made])
        return [*made.tokens]


def _continued(
    text: str, known: _Tokenized | None, n_ends: int, vocabulary: Vocabulary
) -> _Tokenized:
    """Tokenize a text from the end number `n_ends` of a known one on; None: from its start."""
    tokens: list[int] = []
    ends: list[int] = []
    counts: list[int] = []
    if known is not None:
        ends, counts = known.ends[:n_ends], known.counts[:n_ends]
        tokens = known.tokens[: counts[-1]]
    place, done = (ends[-1], counts[-1]) if ends else (0, 0)
    tokens += vocabulary.tokenize(text[place:], add_special=False, parse_special=True)
    names = vocabulary.special_tokens
    for count, token in enumerate(tokens[done:], start=done + 1):
        name = names.get(token)
        if name is None:
            continue
        found = text.find(name, place)
        if found < 0:  # it is spelled in another way: nothing behind it is certain
            break
        place = found + len(name)
        ends.append(place)
        counts.append(count)
    return _Tokenized(text, tokens, ends, counts)


def _n_shared(first: str, second: str) -> int:
    """Return how many characters two texts begin with in common."""
    most = min(len(first), len(second))
    return bisect_left(range(most), True, key=lambda n: first[: n + 1] != second[: n + 1])


def _newest(kept: list[_Tokenized]) -> list[_Tokenized]:
    """Return the latest texts, as many as there is room for."""
    kept, size = kept[-_MOST_TEXTS:], 0
    for place, each in reversed([*enumerate(kept)]):
        size += len(each.text)
        if size > _MOST_CHARACTERS:
            return kept[place + 1 :]
    return kept
