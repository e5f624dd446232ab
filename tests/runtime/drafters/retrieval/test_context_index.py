"""Positions ordered by context, and lookups among them: against sorting and searching
everything."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrun.runtime.drafters.retrieval import DEPTH, ContextIndex, key_width, order_by_context
from specrun.runtime.drafters.retrieval import datastore as context_order

VOCAB_SIZE = 3
TEXTS = st.lists(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=30), min_size=1, max_size=4)


def framed(texts: list[list[int]], vocab_size: int = VOCAB_SIZE) -> np.ndarray:
    tokens = [vocab_size] * DEPTH
    for text in texts:
        tokens += [*text, vocab_size]
    return np.array(tokens, np.int32)


def context(tokens: np.ndarray, position: int) -> list[int]:
    return tokens[position - DEPTH : position][::-1].tolist()


def ordered(tokens: np.ndarray, vocab_size: int = VOCAB_SIZE) -> list[int]:
    inside = [
        p
        for p in range(DEPTH, len(tokens))
        if tokens[p] != vocab_size and tokens[p - 1] != vocab_size
    ]
    return sorted(inside, key=lambda p: (context(tokens, p), p))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(TEXTS, st.sampled_from([1, 3, 7, 1000]), st.sampled_from([1, 5, 1000]))
def test_positions_are_ordered_by_what_stands_before_them(texts, bucket, chunk):
    tokens = framed(texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context_order, "_BUCKET", bucket)
        patch.setattr(context_order, "_CHUNK", chunk)
        done: list[int] = []
        parts = list(order_by_context(tokens, VOCAB_SIZE, done.append))
    assert [position for part in parts for position in part.tolist()] == ordered(tokens)
    assert done == sorted(done)


@pytest.mark.parametrize("vocab_size", [2, 4096, 32_000, 65_535, 65_536, 128_256, 262_144, 2**20])
def test_keys_hold_their_tokens_for_every_vocabulary(vocab_size):
    rng = np.random.default_rng(vocab_size)
    texts = [rng.choice([0, 1, vocab_size - 1], 40).tolist() for _ in range(3)]
    tokens = framed(texts, vocab_size)
    bits, per_key = key_width(vocab_size)
    assert 2**bits > vocab_size
    assert bits * per_key <= 63
    found = np.concatenate(list(order_by_context(tokens, vocab_size))).tolist()
    assert found == ordered(tokens, vocab_size)


def test_a_text_of_one_token_does_not_outgrow_its_bucket(monkeypatch):
    monkeypatch.setattr(context_order, "_BUCKET", 10)
    monkeypatch.setattr(context_order, "_LARGEST_BUCKET", 40)
    parts = list(order_by_context(framed([[1] * 500]), VOCAB_SIZE))
    assert max(map(len, parts)) <= 40
    assert parts


def matched(text: list[int], place: int, query: list[int]) -> int:
    length = 0
    while length < min(place, len(query), DEPTH) and text[place - 1 - length] == query[-1 - length]:
        length += 1
    return length


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=2, max_size=200),
    st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=24),
    st.integers(1, 6),
    st.integers(1, 4),
)
def test_the_places_with_the_longest_suffix_are_found(text, query, count, min_match):
    index = ContextIndex.of_text(text, VOCAB_SIZE)
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
    """Texts much longer than the distance between sampled keys, with contexts that many places
    share."""
    rng = np.random.default_rng(seed)
    text = rng.choice(4, 3000, p=[0.7, 0.1, 0.1, 0.1]).tolist()
    index = ContextIndex.of_text(text, 4)
    for _ in range(5):
        query = rng.choice(4, 20, p=[0.7, 0.1, 0.1, 0.1]).tolist()
        best = max(matched(text, place, query) for place in range(1, len(text)))
        assert index.nearest(query, 1, 3, 1)[0][0] == best


def test_what_follows_ends_with_its_text():
    index = ContextIndex.of_text([1, 2, 0], VOCAB_SIZE)
    assert index.nearest([1], 4, 9, 1) == [(1, [2, 0])]
    assert index.nearest([9, 1, 2], 4, 9, 1) == [(2, [0])]
    assert index.nearest([], 4, 9, 1) == []
    assert index.nearest([0], 4, 9, 1) == []


def test_damaged_arrays_yield_no_unknown_tokens():
    """A file that was changed behind its header must neither crash nor feed the target tokens it
    lacks."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(-(2**31), 2**31, 500).astype(np.int32)
    order = rng.integers(0, 2**32, 400, dtype=np.uint64).astype(np.uint32)
    samples = rng.integers(0, 2**62, 7)
    index = ContextIndex(tokens, order, samples, VOCAB_SIZE)
    for token in range(VOCAB_SIZE):
        for _, following in index.nearest([token], 50, 5, 0):
            assert all(0 <= token < VOCAB_SIZE for token in following)


def test_an_empty_index_finds_nothing():
    assert len(ContextIndex.of_text([1], VOCAB_SIZE)) == 0
    assert ContextIndex.of_text([1], VOCAB_SIZE).nearest([1], 3, 3, 1) == []
