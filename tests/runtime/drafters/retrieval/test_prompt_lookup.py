"""Prompt lookup: what it drafts from prompt, history and reference, and what happens at the
edges."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.enumeration import TOLERANCE, drafter_bias, noted
from support.scripted import PLAIN, LawTable

from specrun.bindings.errors import OptionError
from specrun.runtime.acceptance import ExactRule
from specrun.runtime.drafters.retrieval import ContextIndex, PromptLookupDrafter
from specrun.runtime.laws import SeededNoise
from specrun.runtime.planning import CostCurve
from specrun.runtime.round import Drafter, DraftRequest
from specrun.runtime.round.drafter import RoundOutcome
from specrun.runtime.trees import DraftTree

LONG = [*range(20, 40)]
FREE = CostCurve.flat([1.0] + [1.001] * 32)


def propose(
    drafter: PromptLookupDrafter, tokens: list[int], depth: int = 100, nodes: int = 100
) -> DraftTree:
    return drafter.propose(DraftRequest(tokens, PLAIN, SeededNoise(0), depth, nodes))


def test_a_long_match_is_continued_far():
    drafter = PromptLookupDrafter(costs=FREE)
    tokens = [*LONG, *range(50, 70), *LONG]
    drafter.begin(tokens)
    tree = propose(drafter, tokens)
    assert tree.tokens == tuple(range(50, 65))
    assert tree.parents == tuple(range(-1, 14))
    assert all(draw.law is None for draws in tree.draws.values() for draw in draws)


def test_different_continuations_become_branches():
    drafter = PromptLookupDrafter(nodes=24, branches=3, costs=FREE)
    tokens = [*LONG, 1, 2, *LONG, 3, 4, *LONG]
    drafter.begin(tokens)
    tree = propose(drafter, tokens)
    assert {tree.tokens[draw.node] for draw in tree.draws[-1]} == {1, 3}
    assert tree.tokens[0] == 3  # the later one is likelier


def test_what_follows_the_longer_match_is_likelier_than_what_is_more_frequent():
    drafter = PromptLookupDrafter(min_ngram=1)
    tokens = [7, 8, 9, 1, 9, 2, 9, 2, 7, 8, 9]
    drafter.begin(tokens)
    assert propose(drafter, tokens).tokens[0] == 1


def test_the_reference_is_read_too():
    reference = ContextIndex.of_text([*LONG, 91, 92, 93, 94], 100)
    drafter = PromptLookupDrafter(reference=reference, costs=FREE)
    prompt = [1, 2, *LONG]
    drafter.begin(prompt)
    assert propose(drafter, prompt).tokens == (91, 92, 93, 94)
    assert len(propose(PromptLookupDrafter(), prompt)) == 0


@pytest.mark.parametrize(
    ("depth", "nodes", "expected"), [(2, 9, 2), (9, 1, 1), (0, 9, 0), (9, 0, 0), (9, 9, 3)]
)
def test_never_more_than_allowed(depth, nodes, expected):
    drafter = PromptLookupDrafter(num_draft_tokens=3)
    tokens = LONG + LONG
    drafter.begin(tokens)
    assert len(propose(drafter, tokens, depth, nodes)) == expected


@pytest.mark.parametrize("tokens", [[1], [1, 2], [1, 2, 3]])
def test_nothing_to_repeat_is_nothing_to_draft(tokens):
    drafter = PromptLookupDrafter(min_ngram=1)
    drafter.begin(tokens)
    assert len(propose(drafter, tokens)) == 0


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=15), min_size=2, max_size=4))
def test_what_an_earlier_prompt_held_does_not_matter(prompts):
    """A prompt that contradicts the last one is drafted for as by a new drafter."""
    drafter = PromptLookupDrafter(min_ngram=1)
    last: list[int] = []
    for prompt in prompts:
        drafter.begin(prompt)
        if prompt[: len(last)] != last:
            fresh = PromptLookupDrafter(min_ngram=1)
            fresh.begin(prompt)
            assert propose(drafter, prompt).tokens == propose(fresh, prompt).tokens
        last = prompt


def test_tokens_are_found_as_soon_as_they_are_committed():
    drafter = PromptLookupDrafter()
    tokens = list(LONG)
    drafter.begin(tokens)
    assert len(propose(drafter, tokens)) == 0
    tokens += LONG[:8]
    assert propose(drafter, tokens).tokens[:3] == (28, 29, 30)


def test_it_learns_that_matches_do_not_hold_here():
    drafter = PromptLookupDrafter()
    tokens = [*LONG, 3]
    drafter.begin(tokens)
    drafted = []
    for new in range(10, 40):
        tokens += LONG
        tree = propose(drafter, tokens)
        drafted.append(len(tree))
        tokens += [new]  # what follows is never what followed before
        drafter.observe(RoundOutcome(tokens, tree, (), new, None))
    assert drafted[0] > 0
    assert drafted[-1] == 0


REPEATING = (0, 1, 2, 0, 1, 2, 0, 1, 1, 0, 2, 0, 1, 2, 0)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("options", "width"),
    [({"min_ngram": 1}, 1), ({"min_ngram": 1, "branches": 3, "nodes": 4}, 2)],
    ids=str,
)
def test_the_law_of_the_text_is_the_targets(seed, options, width):
    """The shipped loop under every outcome, learning included: repeated tokens leave the law as it
    is, to 1e-12."""

    trees: list[DraftTree] = []

    def make() -> Drafter:  # drafting is free: every retrieved token is drafted
        free = CostCurve.flat([1.0] + [0.01] * 40)
        return noted(PromptLookupDrafter(**options, costs=free), trees)

    assert drafter_bias(ExactRule(), make, LawTable(3, seed), 4, REPEATING) < TOLERANCE
    assert sum(map(len, trees)) > 100
    assert max(len(below) for tree in trees for below in (tree.draws or {}).values()) >= width


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"num_draft_tokens": 0}, "n is 0"),
        ({"num_draft_tokens": -1}, "n is -1"),
        ({"min_ngram": 0}, "n-gram sizes from 0 to 16"),
        ({"min_ngram": 17}, "n-gram sizes from 17 to 16"),
        ({"max_ngram": 1}, "n-gram sizes from 2 to 1:"),
        ({"nodes": 0}, "a tree of 0 nodes"),
        ({"branches": 0}, "branches is 0"),
        ({"branches": 1000}, "branches is 1000"),
        ({"nodes": 10**9}, "a tree of 1000000000 nodes"),
    ],
    ids=str,
)
def test_sizes_that_make_no_sense_are_refused(options, problem):
    with pytest.raises(OptionError, match=problem):
        PromptLookupDrafter(**options)
