"""Trees of retrieved continuations: against all prefixes with their probabilities, and what trust
learns."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrun.runtime.drafters.retrieval import (
    LONGEST_MATCH,
    MATCH_PRIORS,
    Continuation,
    Evidence,
    TreeLimits,
    continuation_tree,
    teach,
)
from specrun.runtime.planning import TYPICAL_CPU, CostCurve, MatchAcceptance

FREE = CostCurve.flat([1.0] + [0.01] * 64)  # any draft pays, and more are no dearer
WIDE = TreeLimits(64, 64, 64)
CONTINUATIONS = st.lists(
    st.builds(
        Continuation,
        st.lists(st.integers(0, 2), max_size=5),
        st.integers(1, 20),
        st.sampled_from([1.0, 0.5, 3.0]),
        st.booleans(),
    ),
    min_size=1,
    max_size=6,
)


def one_place(length: int) -> int:
    return Evidence.ONE_PLACE.kind(length)


def trie(continuations: list[Continuation], trust: MatchAcceptance) -> dict[tuple[int, ...], float]:
    """Every prefix with its estimated probability, from the definition."""
    prefixes = {
        tuple(candidate.tokens[:depth])
        for candidate in continuations
        for depth in range(1, len(candidate.tokens) + 1)
    }
    known = {(): 1.0}
    for prefix in sorted(prefixes, key=len):
        above = prefix[:-1]
        alive = [
            candidate
            for candidate in continuations
            if tuple(candidate.tokens[: len(above)]) == above
        ]
        alive = [candidate for candidate in alive if len(candidate.tokens) > len(above)]
        votes: dict[int, float] = {}
        for candidate in alive:
            token = candidate.tokens[len(above)]
            reach = candidate.match + 2 * candidate.realigned
            votes[token] = votes.get(token, 0.0) + candidate.weight * 2.0 ** min(
                reach, LONGEST_MATCH
            )
        rank = sorted(votes, key=lambda token: -votes[token]).index(prefix[-1])
        known[prefix] = known[above] * trust.chance(kind_of(alive, len(above)), rank)
    del known[()]
    return known


def kind_of(alive: list[Continuation], depth: int) -> int:
    longest = max(continuation.match + 2 * continuation.realigned for continuation in alive)
    best = [
        continuation
        for continuation in alive
        if continuation.match + 2 * continuation.realigned == longest
    ]
    length = best[0].match + depth
    if best[0].realigned and length < 3:
        return Evidence.REALIGNED.kind(length)
    if len({continuation.tokens[depth] for continuation in best}) > 1:
        tokens = {continuation.tokens[depth] for continuation in best}
        most = max(
            sum(continuation.weight for continuation in best if continuation.tokens[depth] == token)
            for token in tokens
        )
        clear = most >= 0.6 * sum(continuation.weight for continuation in best)
        return (Evidence.MOST_PLACES if clear else Evidence.DISAGREEING).kind(length)
    several = len(best) > 1 or best[0].weight > 1
    return (Evidence.SEVERAL_PLACES if several else Evidence.ONE_PLACE).kind(length)


def prefixes_of(tree) -> list[tuple[int, ...]]:
    return [
        tuple(tree.tokens[ancestor] for ancestor in tree.path_to(node)) for node in range(len(tree))
    ]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(CONTINUATIONS, st.integers(0, 12), st.integers(0, 6))
def test_the_best_nodes_of_the_trie_are_drafted(continuations, nodes, depth):
    trust = MatchAcceptance(MATCH_PRIORS)
    known = {
        prefix: prob for prefix, prob in trie(continuations, trust).items() if len(prefix) <= depth
    }
    tree = continuation_tree(continuations, trust, TreeLimits(nodes, depth, 64), FREE)
    drafted = prefixes_of(tree)
    assert len(set(drafted)) == len(drafted) <= nodes
    wanted = sorted((prob for prob in known.values() if prob >= 0.05), reverse=True)[:nodes]
    assert [known[path] for path in drafted] == pytest.approx(wanted)
    assert all(draw.law is None for draws in tree.draws.values() for draw in draws)
    assert sorted(draw.node for draws in tree.draws.values() for draw in draws) == list(
        range(len(tree))
    )
    assert list(tree.depths) == [len(path) for path in drafted]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(CONTINUATIONS, st.lists(st.floats(0.01, 2.0), min_size=16, max_size=16))
def test_as_many_nodes_as_pay(continuations, steps):
    trust, limits = MatchAcceptance(MATCH_PRIORS), TreeLimits(12, 5, 64)
    costs = CostCurve.flat([1.0 + sum(steps[:n]) for n in range(16)])
    tree = continuation_tree(continuations, trust, limits, costs)
    known = trie(continuations, trust)
    probabilities = [
        known[prefix]
        for prefix in prefixes_of(continuation_tree(continuations, trust, limits, FREE))
    ]
    rates = [
        (1.0 + sum(probabilities[:n])) / costs.seconds(n + 1) for n in range(len(probabilities) + 1)
    ]
    best = max(rates[1:], default=0.0)
    # Plain decoding unless a draft is expected to gain a tenth.
    assert (
        len(tree) == 0
        if best <= 1.1 - 1e-9
        else rates[len(tree)] == pytest.approx(best) or best <= 1.1 + 1e-9
    )


@settings(max_examples=100, deadline=None, derandomize=True)
@given(CONTINUATIONS, st.integers(1, 4))
def test_never_more_leaves_than_allowed(continuations, leaves):
    tree = continuation_tree(
        continuations, MatchAcceptance(MATCH_PRIORS), TreeLimits(20, 5, leaves), FREE
    )
    assert len(set(range(len(tree))) - set(tree.parents)) <= leaves
    # A chain fits whatever the number of leaves.
    assert (
        bool(tree) == any(continuation.tokens for continuation in continuations)
        or tree.tokens == ()
    )


def test_an_uncertain_match_is_not_drafted_and_a_long_one_far():
    def drafted(match: int, trust: MatchAcceptance) -> int:
        return len(
            continuation_tree(
                [Continuation([5] * 15, match)], trust, TreeLimits(15, 15, 4), TYPICAL_CPU
            )
        )

    sizes = [drafted(match, MatchAcceptance(MATCH_PRIORS)) for match in (0, 1, 2, 4, 8, 16)]
    assert sizes[0] == 0
    assert sizes == sorted(sizes)
    assert 0 < sizes[-1] < 15
    # A copy that was right for some tokens is drafted as far as allowed.
    trust = MatchAcceptance(MATCH_PRIORS)
    teach(trust, [Continuation([5] * 12, 16)], [5] * 12)
    assert drafted(16, trust) == 15


def test_nothing_is_drafted_behind_the_end_of_an_answer():
    found = [Continuation([5, 7, 0, 8, 9], 16), Continuation([5, 6, 6, 6, 6], 16)]
    tree = continuation_tree(
        found, MatchAcceptance(MATCH_PRIORS), TreeLimits(20, 20, 4, frozenset({0})), FREE
    )
    assert sorted(prefixes_of(tree)) == [
        (5,),
        (5, 6),
        (5, 6, 6),
        (5, 6, 6, 6),
        (5, 6, 6, 6, 6),
        (5, 7),
        (5, 7, 0),
    ]


def test_failures_silence_a_drafter_and_unseen_successes_wake_it():
    trust, found = MatchAcceptance(MATCH_PRIORS), [Continuation([1, 2, 3], 6)]
    assert len(continuation_tree(found, trust, WIDE, TYPICAL_CPU)) > 0
    for _ in range(6):
        teach(trust, found, [9])
    assert len(continuation_tree(found, trust, WIDE, TYPICAL_CPU)) == 0
    for _ in range(30):  # nothing was drafted, but what was retrieved proved right
        teach(trust, found, [1])
    assert len(continuation_tree(found, trust, WIDE, TYPICAL_CPU)) > 0
    trust.forget()
    assert trust.chance(one_place(2)) == MatchAcceptance(MATCH_PRIORS).chance(one_place(2))


def test_failures_of_one_length_are_a_warning_for_others():
    trust, before = MatchAcceptance(MATCH_PRIORS), MatchAcceptance(MATCH_PRIORS)
    for _ in range(4):
        trust.learn([one_place(8)], None)
    assert trust.chance(one_place(4)) < before.chance(one_place(4))
    assert trust.chance(Evidence.SEVERAL_PLACES.kind(8)) < before.chance(
        Evidence.SEVERAL_PLACES.kind(8)
    )


def test_trust_learns_along_the_path_that_was_taken():
    trust = MatchAcceptance(MATCH_PRIORS)
    seen: list[tuple[list[int], int | None]] = []
    trust.learn = lambda kinds, rank: seen.append(([*kinds], rank))  # type: ignore[method-assign]
    teach(trust, [Continuation([1, 2, 3], 3), Continuation([1, 4], 2)], [1, 4, 5])
    # 1 follows a match of 3, 4 is second behind it; what came after that was not known.
    assert seen == [([one_place(3)], 0), ([one_place(4)] * 2, 1)]
    seen.clear()
    teach(trust, [Continuation([1, 2], 6), Continuation([1, 3], 6)], [1, 9])
    assert seen == [
        ([Evidence.SEVERAL_PLACES.kind(6)], 0),
        ([Evidence.DISAGREEING.kind(7)] * 2, None),
    ]
    seen.clear()
    teach(trust, [Continuation([1, 2, 3, 4], 1, realigned=True)], [1, 2, 3])
    assert [kinds for kinds, _ in seen] == [
        [Evidence.REALIGNED.kind(1)],
        [Evidence.REALIGNED.kind(2)],
        [one_place(3)],
    ]


def test_trust_is_a_probability_that_follows_what_it_sees():
    for evidence in Evidence:
        trust, kind = MatchAcceptance(MATCH_PRIORS), evidence.kind(40)
        for rank, bound in ((0, 0.9), (None, 0.2)):
            for _ in range(100):
                trust.learn([kind] * 2, rank)
                assert all(0.0 <= trust.chance(kind, number) <= 1.0 for number in range(5))
            assert (trust.chance(kind) > bound) is (rank == 0)
    fresh = MatchAcceptance(MATCH_PRIORS)
    expected = [fresh.chance(one_place(length)) for length in (1, 2, 5, 16)]
    assert expected == sorted(expected)
    assert expected[-1] > 0.85


def test_of_what_disagrees_each_rank_is_learnt_for_itself():
    trust, split = MatchAcceptance(MATCH_PRIORS), Evidence.DISAGREEING.kind(4)
    for number in range(60):
        trust.learn([split] * 3, (0, 1, None)[number % 3])
    assert trust.chance(split, 0) == pytest.approx(1 / 3, abs=0.15)
    assert trust.chance(split, 1) == pytest.approx(1 / 3, abs=0.15)
    assert trust.chance(split, 2) < 0.1
    assert sum(trust.chance(split, rank) for rank in range(3)) <= 1.0
