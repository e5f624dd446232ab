"""The index of n-grams: against a search through the whole text, after any number of extensions."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrun.runtime.drafters.retrieval import NgramIndex, Realignment, ngram_index

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


@settings(max_examples=150, deadline=None, derandomize=True)
@given(PIECES, st.integers(1, 3), st.integers(0, 5), st.integers(1, 5), st.integers(1, 6))
def test_finds_what_a_full_search_finds(pieces, min_ngram, more, count, visited):
    index = NgramIndex(min_ngram, min_ngram + more)
    tokens: list[int] = []
    for piece in pieces:
        tokens += piece
        index.extend(piece)
        assert index.tokens == tokens
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ngram_index, "_VISITED", visited)
            assert index.matches(count) == reference(tokens, index.sizes, count, visited)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(PIECES, st.integers(1, 3))
def test_the_longest_match_comes_first_where_all_places_are_visited(pieces, min_ngram):
    tokens = [token for piece in pieces for token in piece]
    index = NgramIndex(min_ngram, 8)
    index.extend(tokens)
    longest = max((matched(tokens, place, 16) for place in range(1, len(tokens))), default=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngram_index, "_VISITED", len(tokens) + 1)
        found = index.matches(1)
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
    assert index.matches(4) == [(3, 2)]


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


# -- where a copied text goes on behind an edit, and what of a match is evidence -------------------

SOURCE = list(range(100, 120))


def resumed(written: list[int]) -> tuple[int, int] | None:
    """Copy the source up to its twelfth token, then write something else, and ask where it goes
    on."""
    index, source = NgramIndex(2, 16), Realignment()
    index.extend([*SOURCE, 1, *SOURCE[:12]])
    place, match = index.matches(1)[0]
    source.follow(place, match, len(index.tokens))
    index.extend(written)
    found = source.resume(index)
    return None if found is None else (index.tokens[found[0]], found[1])


def test_one_token_replaced_by_one() -> None:
    assert resumed([5]) == (113, 0)
    assert resumed([5, 113]) == (114, 1)
    assert resumed([5, 113, 114]) == (115, 2)


def test_tokens_left_out_and_put_in() -> None:
    assert resumed([115]) == (116, 1)
    assert resumed([5, 6, 7, 112]) == (113, 1)
    assert resumed([5, 6]) is None  # two new tokens in a row: nobody knows where this goes


def test_a_source_is_given_up() -> None:
    assert resumed([5] * 20 + [113]) is None
    index = NgramIndex(2, 16)
    index.extend([*SOURCE, *SOURCE[:3], 5])
    source = Realignment()
    source.follow(3, 3, 23)  # three tokens are no copy
    assert source.resume(index) is None
    source.follow(3, 10, 23)
    assert source.resume(index) is not None
    assert Realignment().resume(index) is None


def test_the_nearest_of_the_longest_matches_wins() -> None:
    index, source = NgramIndex(2, 16), Realignment()
    index.extend([*range(50, 60), 7, 8, 9, 7, 3, 8, 9, 4, 1, *range(50, 60), 2, 8, 9])
    source.follow(10, 10, 29)
    assert source.resume(index) == (
        13,
        2,
    )  # both "8 9" match twice; this one is where the copy would be


def test_since_fork_agrees_with_its_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram_index, "_FORKS_VISITED", 1000)
    rng = random.Random(3)
    for _ in range(40):
        tokens = [rng.randrange(3) for _ in range(60)]
        index = NgramIndex(2, 8)
        index.extend(tokens)
        for match in (2, 3, 5, 9):
            assert index.since_fork(match) == since_fork(tokens, match)


def since_fork(tokens: list[int], match: int) -> int:
    for back in range(1, min(match, 5)):
        sizes = [size for size in (2, 4, 8) if size <= match - back]
        if not sizes:
            break
        end = len(tokens) - back
        gram = tokens[end - sizes[-1] : end]
        followed = {
            tokens[at] for at in range(sizes[-1], end) if tokens[at - sizes[-1] : at] == gram
        }
        if followed - {tokens[end]}:
            return back
    return match


def test_a_formula_is_no_evidence_but_what_came_after_it_is() -> None:
    formula = [90, 91, 92, 93]
    index = NgramIndex(2, 16)
    for answer in ([1, 2], [3, 4], [5, 6]):
        index.extend([*formula, *answer])
    index.extend([*formula, 3])
    assert index.matches(1)[0][1] == 5
    assert index.since_fork(5) == 1
