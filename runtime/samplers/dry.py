"""DRY: tokens that would go on with a repetition are penalised, exponentially in its length.

A repetition is a suffix of the last tokens that stands further up among them, too; sequence
breakers end it. After p-e-w's proposal for text-generation-webui, as llama.cpp has it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

from specrun.bindings.models.vocabulary import Vocabulary

Breakers = Mapping[int, Sequence[tuple[int, ...]]]
"""Sequences that break a repetition: those that begin with a token, by it, without it."""

_LONGEST_TEXT = 40
_LONGEST_TAIL = 20
_LARGEST_FLOAT, _LOG_LARGEST_FLOAT = 3.4e38, 88.7228391


def repetition_penalties(
    tokens: Sequence[int], breakers: Breakers, *, multiplier: float, base: float, allowed: int
) -> dict[int, float]:
    """Return what each token's logit loses after these: multiplier * base^(length - allowed).

    The length is that of the longest suffix of `tokens` which that token followed before; shorter
    ones than `allowed` cost nothing. Breakers of one token are never penalised.
    """
    if len(tokens) <= allowed:
        return {}
    limit = _since_breaker(tokens, breakers)
    if limit < allowed:
        return {}
    most = int(_LOG_LARGEST_FLOAT / math.log(base)) if base > 1.000001 else 0
    penalties = {}
    for token, length in _longest_repeats(tokens, limit, allowed).items():
        if () not in breakers.get(token, ()):
            excess = length - allowed
            amount = multiplier * base ** (min(excess, most) if most else excess)
            penalties[token] = max(-_LARGEST_FLOAT, min(amount, _LARGEST_FLOAT))
    return penalties


def _since_breaker(tokens: Sequence[int], breakers: Breakers) -> int:
    """Return how many tokens there are after the last breaker; all, if there is none."""
    n = len(tokens)
    for back in range(n):
        tails = breakers.get(tokens[n - 1 - back])
        if tails is None:
            continue
        after = tokens[n - back :]
        fits = [len(tail) for tail in tails if tuple(after[: len(tail)]) == tail]
        if fits:
            return back - max(fits)
    return n


def _longest_repeats(tokens: Sequence[int], limit: int, allowed: int) -> dict[int, int]:
    """Return, for each token that followed one, the longest suffix (up to `limit`) it followed."""
    longest: dict[int, int] = {}
    newest_first = tokens[::-1]
    for place, length in enumerate(_common_beginnings(newest_first)):
        length = min(length, limit)
        if place and length >= allowed:
            following = newest_first[place - 1]
            longest[following] = max(length, longest.get(following, 0))
    return longest


def _common_beginnings(text: Sequence[int]) -> list[int]:
    """Return how much of its beginning the text has at each place: the Z-algorithm, linear time."""
    n = len(text)
    lengths = [n] + [0] * (n - 1)
    left = right = 0  # the match that reaches furthest is text[left:right]
    for place in range(1, n):
        length = min(lengths[place - left], right - place) if place < right else 0
        while place + length < n and text[length] == text[place + length]:
            length += 1
        lengths[place] = length
        if place + length > right:
            left, right = place, place + length
    return lengths


@functools.lru_cache(maxsize=8)
def sequence_breakers(vocabulary: Vocabulary, texts: tuple[str, ...]) -> Breakers:
    """Return the token sequences in which one of the texts is spelled.

    A token that has a whole text in it breaks alone; one that ends with a beginning of it does so
    before the tokens of the rest. All of a vocabulary is looked at: a fraction of a second.
    """
    breakers: dict[int, list[tuple[int, ...]]] = {}
    wanted = [text.encode()[:_LONGEST_TEXT] for text in texts]
    for token in range(vocabulary.size):
        spelled = vocabulary.spelled(token)
        for text in wanted:
            for tail in _tails(spelled, text, vocabulary):
                known = breakers.setdefault(token, [])
                if tail not in known:
                    known.append(tail)
    return breakers


def _tails(spelled: bytes, text: bytes, vocabulary: Vocabulary) -> list[tuple[int, ...]]:
    """Return what may follow a token so that the text stands in both together."""
    if text in spelled:
        return [()]
    begun = [n for n in range(len(text) - 1, 0, -1) if spelled.endswith(text[:n])]
    rests = (vocabulary.tokenize(text[n:], add_special=False) for n in begun)
    return [tuple(rest[:_LONGEST_TAIL]) for rest in rests]
