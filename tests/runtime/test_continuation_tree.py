"""Trees of retrieved continuations: against all prefixes with their probabilities, and what trust learns."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrun.runtime.drafters.continuation_tree import Continuation, TreeLimits, continuation_tree, teach
from specrun.runtime.drafters.match_trust import LONGEST_MATCH, MatchTrust
from specrun.runtime.planning.cost_curves import CostCurve
from specrun.runtime.planning.stored_curves import TYPICAL_CPU

FREE = CostCurve.flat([1.0] + [0.01] * 64)  # any draft pays, and more are no dearer
WIDE = TreeLimits(64, 64, 64)
CONTINUATIONS = st.lists(
    st.builds(
        Continuation,
        st.lists(st.integers(0, 2), max_size=5),
        st.integers(1, 20),
        st.sampled_from([1.0, 0.5, 3.0]),
    ),
    min_size=1,
    max_size=6,
)


def trie(continuations: list[Continuation], trust: MatchTrust) -> dict[tuple[int, ...], float]:
    """Every prefix with its estimated probability, from the definition."""
    prefixes = {tuple(one.tokens[:depth]) for one in continuations for depth in range(1, len(one.tokens) + 1)}
    known = {(): 1.0}
    for prefix in sorted(prefixes, key=len):
        above = prefix[:-1]
        alive = [one for one in continuations if tuple(one.tokens[: len(above)]) == above]
        alive = [one for one in alive if len(one.tokens) > len(above)]
        longest = max(one.match for one in alive)
        votes = [one.weight * 2.0 ** min(one.match, LONGEST_MATCH) for one in alive]
        own = sum(v for v, one in zip(votes, alive, strict=True) if one.tokens[len(above)] == prefix[-1])
        known[prefix] = known[above] * trust.expected(longest + len(above)) * own / sum(votes)
    del known[()]
    return known


def prefixes_of(tree) -> list[tuple[int, ...]]:
    return [tuple(tree.tokens[one] for one in tree.path_to(node)) for node in range(len(tree))]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(CONTINUATIONS, st.integers(0, 12), st.integers(0, 6))
def test_the_best_nodes_of_the_trie_are_drafted(continuations, nodes, depth):
    trust = MatchTrust()
    known = {prefix: prob for prefix, prob in trie(continuations, trust).items() if len(prefix) <= depth}
    tree = continuation_tree(continuations, trust, TreeLimits(nodes, depth, 64), FREE)
    drafted = prefixes_of(tree)
    assert len(set(drafted)) == len(drafted) <= nodes
    wanted = sorted((prob for prob in known.values() if prob >= 0.05), reverse=True)[:nodes]
    assert [known[one] for one in drafted] == pytest.approx(wanted)
    assert all(draw.law is None for draws in tree.draws.values() for draw in draws)
    assert sorted(draw.node for draws in tree.draws.values() for draw in draws) == list(range(len(tree)))
    assert list(tree.depths) == [len(one) for one in drafted]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(CONTINUATIONS, st.lists(st.floats(0.01, 2.0), min_size=16, max_size=16))
def test_as_many_nodes_as_pay(continuations, steps):
    trust, limits = MatchTrust(), TreeLimits(12, 5, 64)
    costs = CostCurve.flat([1.0 + sum(steps[:n]) for n in range(16)])
    tree = continuation_tree(continuations, trust, limits, costs)
    known = trie(continuations, trust)
    probabilities = [known[one] for one in prefixes_of(continuation_tree(continuations, trust, limits, FREE))]
    rates = [(1.0 + sum(probabilities[:n])) / costs.seconds(n + 1) for n in range(len(probabilities) + 1)]
    best = max(rates[1:], default=0.0)
    # Plain decoding unless a draft is expected to gain a tenth.
    assert len(tree) == 0 if best <= 1.1 - 1e-9 else rates[len(tree)] == pytest.approx(best) or best <= 1.1 + 1e-9


@settings(max_examples=100, deadline=None, derandomize=True)
@given(CONTINUATIONS, st.integers(1, 4))
def test_never_more_leaves_than_allowed(continuations, leaves):
    tree = continuation_tree(continuations, MatchTrust(), TreeLimits(20, 5, leaves), FREE)
    assert len(set(range(len(tree))) - set(tree.parents)) <= leaves
    # A chain fits whatever the number of leaves.
    assert bool(tree) == any(one.tokens for one in continuations) or tree.tokens == ()


def test_an_uncertain_match_is_not_drafted_and_a_long_one_far():
    def drafted(match: int) -> int:
        return len(continuation_tree([Continuation([5] * 15, match)], MatchTrust(), TreeLimits(15, 15, 4), TYPICAL_CPU))

    sizes = [drafted(match) for match in (0, 1, 2, 4, 8, 16)]
    assert sizes[0] == 0
    assert sizes == sorted(sizes)
    assert sizes[-1] == 15
    assert 0 < sizes[2] < 15


def test_failures_silence_a_drafter_and_unseen_successes_wake_it():
    trust, found = MatchTrust(), [Continuation([1, 2, 3], 2)]
    assert len(continuation_tree(found, trust, WIDE, TYPICAL_CPU)) > 0
    for _ in range(6):
        teach(trust, found, [9])
    assert len(continuation_tree(found, trust, WIDE, TYPICAL_CPU)) == 0
    for _ in range(30):  # nothing was drafted, but what was retrieved proved right
        teach(trust, found, [1])
    assert len(continuation_tree(found, trust, WIDE, TYPICAL_CPU)) > 0
    trust.forget()
    assert trust.expected(2) == MatchTrust().expected(2)


def test_trust_learns_along_the_path_that_was_taken():
    trust, before = MatchTrust(), MatchTrust()
    teach(trust, [Continuation([1, 2, 3], 3), Continuation([1, 4], 2)], [1, 4, 5])
    assert trust.expected(3) > before.expected(3)  # 1 was known to follow a match of 3
    assert trust.expected(4) > before.expected(4)  # 4 too, by the shorter of them
    assert trust.expected(5) == before.expected(5)  # nothing was known behind it
    teach(trust, [Continuation([1, 2], 6)], [1, 9])
    assert trust.expected(6) > before.expected(6)
    assert trust.expected(7) < before.expected(7)


def test_trust_is_a_probability_that_follows_what_it_sees():
    trust = MatchTrust()
    for right, bound in ((True, 0.9), (False, 0.2)):
        for _ in range(100):
            trust.learn(40, right)
            assert 0.0 <= trust.expected(40) <= 1.0
        assert (trust.expected(LONGEST_MATCH) > bound) is right
    assert MatchTrust().expected(1) < MatchTrust().expected(5) < MatchTrust().expected(16)
