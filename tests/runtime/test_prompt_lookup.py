"""Prompt lookup: against a search through all tokens, and what happens at the edges."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import PLAIN

from specrun.bindings.errors import OptionError
from specrun.runtime.drafters.drafter import DraftRequest
from specrun.runtime.drafters.prompt_lookup import PromptLookupDrafter
from specrun.runtime.noise import SeededNoise


def propose(drafter: PromptLookupDrafter, tokens: list[int], depth: int = 100, nodes: int = 100) -> tuple[int, ...]:
    return drafter.propose(DraftRequest(tokens, PLAIN, SeededNoise(0), depth, nodes)).tokens


def reference(tokens: list[int], n: int, max_ngram: int, min_ngram: int) -> tuple[int, ...]:
    """The latest earlier place where the longest suffix stood, by looking everywhere."""
    for size in range(min(max_ngram, len(tokens) - 1), min_ngram - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                return tuple(tokens[end : end + n])
    return ()


@settings(max_examples=500, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=30),
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=4),
    st.integers(1, 6),
    st.tuples(st.integers(1, 3), st.integers(0, 3)),
)
def test_drafts_what_a_full_search_finds(prompt, rounds, n, sizes):
    min_ngram, more = sizes
    drafter = PromptLookupDrafter(num_draft_tokens=n, max_ngram=min_ngram + more, min_ngram=min_ngram)
    tokens = list(prompt)
    drafter.begin(tokens)
    assert propose(drafter, tokens) == reference(tokens, n, min_ngram + more, min_ngram)
    for new in rounds:
        tokens += new
        assert propose(drafter, tokens) == reference(tokens, n, min_ngram + more, min_ngram)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=15), min_size=2, max_size=4))
def test_what_an_earlier_prompt_held_does_not_matter(prompts):
    drafter = PromptLookupDrafter(num_draft_tokens=4, min_ngram=1)
    for prompt in prompts:
        drafter.begin(prompt)
        assert propose(drafter, prompt) == reference(prompt, 4, 4, 1)


def test_drafts_are_point_masses_in_a_chain():
    drafter = PromptLookupDrafter(num_draft_tokens=3, min_ngram=1)
    drafter.begin([1, 2, 3, 4, 1])
    tree = drafter.propose(DraftRequest([1, 2, 3, 4, 1], PLAIN, SeededNoise(0), 9, 9))
    assert (tree.tokens, tree.parents) == ((2, 3, 4), (-1, 0, 1))
    assert all(draw.law is None for draws in tree.draws.values() for draw in draws)


@pytest.mark.parametrize(("depth", "nodes", "expected"), [(2, 9, 2), (9, 1, 1), (0, 9, 0), (9, 0, 0), (9, 9, 3)])
def test_never_more_than_allowed(depth, nodes, expected):
    drafter = PromptLookupDrafter(num_draft_tokens=3, min_ngram=1)
    drafter.begin([1, 2, 3, 4, 1])
    assert len(propose(drafter, [1, 2, 3, 4, 1], depth, nodes)) == expected


@pytest.mark.parametrize("tokens", [[1], [1, 2], [1, 2, 3]])
def test_nothing_to_repeat_is_nothing_to_draft(tokens):
    drafter = PromptLookupDrafter(min_ngram=1)
    drafter.begin(tokens)
    assert propose(drafter, tokens) == ()


@pytest.mark.parametrize(
    "options",
    [{"num_draft_tokens": 0}, {"num_draft_tokens": -1}, {"min_ngram": 0}, {"min_ngram": 5}, {"max_ngram": 1}],
    ids=str,
)
def test_sizes_that_make_no_sense_are_refused(options):
    with pytest.raises(OptionError):
        PromptLookupDrafter(**options)
