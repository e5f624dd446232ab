"""Positions ordered by context, and lookups among them: against sorting and searching everything."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrun.runtime.drafters.retrieval.datastore import DEPTH, ContextIndex, key_width, order_by_context
from specrun.runtime.drafters.retrieval.datastore import context_index as context_order

N_WORDS = 3
TEXTS = st.lists(st.lists(st.integers(0, N_WORDS - 1), max_size=30), min_size=1, max_size=4)


def framed(texts: list[list[int]], n_words: int = N_WORDS) -> np.ndarray:
    tokens = [n_words] * DEPTH
    for text in texts:
        tokens += [*text, n_words]
    return np.array(tokens, np.int32)


def context(tokens: np.ndarray, position: int) -> list[int]:
    return tokens[position - DEPTH : position][::-1].tolist()


def ordered(tokens: np.ndarray, n_words: int = N_WORDS) -> list[int]:
    inside = [p for p in range(DEPTH, len(tokens)) if tokens[p] != n_words and tokens[p - 1] != n_words]
    return sorted(inside, key=lambda p: (context(tokens, p), p))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(TEXTS, st.sampled_from([1, 3, 7, 1000]), st.sampled_from([1, 5, 1000]))
def test_positions_are_ordered_by_what_stands_before_them(texts, bucket, chunk):
    tokens = framed(texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context_order, "_BUCKET", bucket)
        patch.setattr(context_order, "_CHUNK", chunk)
        done: list[int] = []
        parts = list(order_by_context(tokens, N_WORDS, done.append))
    assert [one for part in parts for one in part.tolist()] == ordered(tokens)
    assert done == sorted(done)


@pytest.mark.parametrize("n_words", [2, 4096, 32_000, 65_535, 65_536, 128_256, 262_144, 2**20])
def test_keys_hold_their_tokens_for_every_vocabulary(n_words):
    rng = np.random.default_rng(n_words)
    texts = [rng.choice([0, 1, n_words - 1], 40).tolist() for _ in range(3)]
    tokens = framed(texts, n_words)
    bits, per_key = key_width(n_words)
    assert 2**bits > n_words
    assert bits * per_key <= 63
    found = np.concatenate(list(order_by_context(tokens, n_words))).tolist()
    assert found == ordered(tokens, n_words)


def test_a_text_of_one_word_does_not_outgrow_its_bucket(monkeypatch):
    monkeypatch.setattr(context_order, "_BUCKET", 10)
    monkeypatch.setattr(context_order, "_LARGEST_BUCKET", 40)
    parts = list(order_by_context(framed([[1] * 500]), N_WORDS))
    assert max(map(len, parts)) <= 40
    assert parts


def matched(text: list[int], place: int, query: list[int]) -> int:
    length = 0
    while length < min(place, len(query), DEPTH) and text[place - 1 - length] == query[-1 - length]:
        length += 1
    return length


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, N_WORDS - 1), min_size=2, max_size=200),
    st.lists(st.integers(0, N_WORDS - 1), min_size=1, max_size=24),
    st.integers(1, 6),
    st.integers(1, 4),
)
def test_the_places_with_the_longest_suffix_are_found(text, query, count, min_match):
    index = ContextIndex.of_text(text, N_WORDS)
    lengths = sorted((matched(text, place, query) for place in range(1, len(text))), reverse=True)
    wanted = [length for length in lengths[:count] if length >= min_match]
    found = index.nearest(query, count, 5, min_match)
    assert [length for length, _ in found] == wanted
    for length, following in found:
        places = [p for p in range(1, len(text)) if matched(text, p, query) == length]
        assert following in [text[p : p + 5] for p in places]


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_sampled_keys_narrow_the_search_to_the_right_place(seed):
    """Texts much longer than the distance between sampled keys, with contexts that many places share."""
    rng = np.random.default_rng(seed)
    text = rng.choice(4, 3000, p=[0.7, 0.1, 0.1, 0.1]).tolist()
    index = ContextIndex.of_text(text, 4)
    for _ in range(5):
        query = rng.choice(4, 20, p=[0.7, 0.1, 0.1, 0.1]).tolist()
        best = max(matched(text, place, query) for place in range(1, len(text)))
        assert index.nearest(query, 1, 3, 1)[0][0] == best


def test_what_follows_ends_with_its_text():
    index = ContextIndex.of_text([1, 2, 0], N_WORDS)
    assert index.nearest([1], 4, 9, 1) == [(1, [2, 0])]
    assert index.nearest([9, 1, 2], 4, 9, 1) == [(2, [0])]
    assert index.nearest([], 4, 9, 1) == []
    assert index.nearest([0], 4, 9, 1) == []


def test_damaged_arrays_yield_no_unknown_words():
    """A file that was changed behind its header must neither crash nor feed the target words it lacks."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(-(2**31), 2**31, 500).astype(np.int32)
    order = rng.integers(0, 2**32, 400, dtype=np.uint64).astype(np.uint32)
    samples = rng.integers(0, 2**62, 7)
    index = ContextIndex(tokens, order, samples, N_WORDS)
    for token in range(N_WORDS):
        for _, following in index.nearest([token], 50, 5, 0):
            assert all(0 <= one < N_WORDS for one in following)


def test_an_empty_index_finds_nothing():
    assert len(ContextIndex.of_text([1], N_WORDS)) == 0
    assert ContextIndex.of_text([1], N_WORDS).nearest([1], 3, 3, 1) == []
