"""The index of n-grams: against a search through the whole text, after any number of extensions."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrun.runtime.drafters.retrieval import NgramIndex, ngram_index

PIECES = st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=5)


def matched(tokens: list[int], place: int, most: int) -> int:
    length = 0
    while length < min(place, most) and tokens[place - 1 - length] == tokens[-1 - length]:
        length += 1
    return length


def reference(
    tokens: list[int], sizes: tuple[int, ...], count: int, visited: int
) -> list[tuple[int, int]]:
    """The latest places of the largest sizes, by looking everywhere."""
    lengths = {place: matched(tokens, place, 2 * sizes[-1]) for place in range(1, len(tokens))}
    found: dict[int, int] = {}
    for size in reversed(sizes):
        alike = [place for place in sorted(lengths, reverse=True) if lengths[place] >= size]
        found |= {place: lengths[place] for place in alike[:visited]}
        if len(found) >= count:
            break
    return sorted(found.items(), key=lambda pair: (-pair[1], -pair[0]))[:count]


@settings(max_examples=400, deadline=None, derandomize=True)
@given(PIECES, st.integers(1, 3), st.integers(0, 5), st.integers(1, 5), st.integers(1, 6))
def test_finds_what_a_full_search_finds(pieces, min_ngram, more, count, visited):
    index = NgramIndex(min_ngram, min_ngram + more)
    tokens: list[int] = []
    for piece in pieces:
        tokens += piece
        index.extend(piece)
        assert index.tokens == tokens
        assert index.matches(count, visited) == reference(tokens, index.sizes, count, visited)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(PIECES, st.integers(1, 3))
def test_the_longest_match_comes_first_where_all_places_are_visited(pieces, min_ngram):
    tokens = [token for piece in pieces for token in piece]
    index = NgramIndex(min_ngram, 8)
    index.extend(tokens)
    longest = max((matched(tokens, place, 16) for place in range(1, len(tokens))), default=0)
    found = index.matches(1, visited=len(tokens) + 1)
    assert [length for _, length in found] == ([longest] if longest >= min_ngram else [])


def test_sizes_double_up_to_the_largest():
    assert NgramIndex(2, 16).sizes == (2, 4, 8, 16)
    assert NgramIndex(1, 1).sizes == (1,)
    assert NgramIndex(3, 7).sizes == (3, 6, 7)


def test_a_text_that_repeats_itself_goes_on_repeating():
    index = NgramIndex(1, 4)
    index.extend([7, 8, 9, 7, 8, 9, 7])
    place, _ = index.matches(1)[0]
    assert index.continuation(place, 8) == [8, 9, 7, 8, 9, 7, 8, 9]
    assert index.continuation(1, 4) == [8, 9, 7, 8]


def test_equal_hashes_of_different_tokens_are_no_match(monkeypatch):
    monkeypatch.setattr(ngram_index, "hash", lambda _: 1, raising=False)
    index = NgramIndex(2, 4)
    index.extend([1, 2, 3, 4, 5, 6])
    assert index.matches(4) == []
    index.extend([2, 3])
    assert index.matches(4, visited=20) == [(3, 2)]


def test_an_interruption_forgets_everything_rather_than_half():
    class Interrupting(int):
        def __hash__(self) -> int:
            raise KeyboardInterrupt

    index = NgramIndex(2, 4)
    index.extend([1, 2, 3])
    with pytest.raises(KeyboardInterrupt):
        index.extend([1, 2, Interrupting(3)])
    assert index.tokens == []
    index.extend([1, 2, 3, 1, 2])
    assert index.matches(1) == [(2, 2)]


def test_a_lookup_visits_a_bounded_number_of_places():
    """The cost of a round must not grow with the text: count the tokens that are compared."""
    reads = 0

    class Counting(list):
        def __getitem__(self, key):
            nonlocal reads
            reads += 1
            return super().__getitem__(key)

    spent = []
    for length in (1_000, 20_000):
        index = NgramIndex(2, 16)
        index.extend([number % 7 for number in range(length)])
        index._indexed.tokens, reads = Counting(index.tokens), 0
        index.matches(4)
        spent.append(reads)
    assert spent[0] == spent[1] < 2_000
