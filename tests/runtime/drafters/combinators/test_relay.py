"""Drafters one after the other: exact for any members, who are told the truth about guesses that
were not theirs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest
from support.enumeration import (
    TOLERANCE,
    chain,
    drafter_bias,
    mixed_tree,
    top_k_points,
    wandering_chain,
)
from support.scripted import PLAIN, LawTable, ScriptedDrafter, TableRows
from support.tree_laws import fixed

from specrun.bindings.errors import OptionError
from specrun.runtime.acceptance import ExactRule
from specrun.runtime.drafters.combinators import RelayDrafter, first_path, graft
from specrun.runtime.drafters.retrieval import PromptLookupDrafter
from specrun.runtime.laws import SeededNoise
from specrun.runtime.round import Drafter, DraftRequest, NoDrafter
from specrun.runtime.round.drafter import RoundOutcome
from specrun.runtime.trees import ROOT, DraftTree, TreeBuilder, parse_topology

Make = Callable[[], Drafter]


scripted = partial(ScriptedDrafter, max_nodes=8)


def members(seed: int) -> dict[str, Make]:
    a, b = LawTable(3, seed + 100), LawTable(3, seed + 200)
    return {
        "none": NoDrafter,
        "chain": lambda: scripted(chain(a, 1)),
        "other chain": lambda: scripted(chain(b, 1)),
        "siblings": lambda: scripted(fixed(a, parse_topology("2"), "without")),
        "i.i.d.": lambda: scripted(fixed(b, parse_topology("2"), "with")),
        "points": lambda: scripted(top_k_points(b, 2, 1)),
        "mixed": lambda: scripted(mixed_tree(b, seed)),
        "wandering": lambda: scripted(wandering_chain(a, seed, 2)),
        "lookup": lambda: PromptLookupDrafter(min_ngram=1),
        "relay": lambda: RelayDrafter(
            [scripted(chain(b, 1)), scripted(top_k_points(a, 1, 1))], [None, None]
        ),
    }


@pytest.mark.parametrize(
    "names",
    [
        ("chain", "other chain"),
        ("chain", "chain"),
        ("chain", "lookup"),
        ("lookup", "chain"),
        ("none", "chain"),
        ("siblings", "chain"),
        ("chain", "i.i.d."),
        ("points", "siblings"),
        ("wandering", "points"),
        ("mixed", "chain"),
        ("relay", "chain"),
        ("chain", "lookup", "other chain"),
    ],
    ids=" then ".join,
)
@pytest.mark.parametrize("seed", range(2))
def test_relays_give_the_targets_law(names: tuple[str, ...], seed: int) -> None:
    def make() -> Drafter:
        return RelayDrafter([members(seed)[name]() for name in names], [None] * len(names))

    length = 3 if "chain" in names[0] or "lookup" in names else 2
    assert drafter_bias(ExactRule(), make, LawTable(3, seed), length) < TOLERANCE


class _GoesOnFromTheCommittedText(RelayDrafter):
    """Wrong: the second part drafts from the committed text, but its tokens are put below the first
    part's."""

    def propose(self, request: DraftRequest) -> DraftTree:
        shallow = DraftRequest(
            request.tokens, request.params, request.noise, min(1, request.max_depth), 8
        )
        first, second = (member.propose(shallow) for member in self._members)
        if not len(first) or request.max_depth < 2:
            return first
        law = second.draws[ROOT][0].law
        assert law is not None
        below = LawTable(3, 200, 0.0)(
            [*request.tokens, first.tokens[0]]
        )  # what it claims to have drawn from
        tree, _ = graft(first, 0, DraftTree.chain([second.tokens[0]], [type(law)(below)]))
        return tree


def test_a_part_that_does_not_see_the_guesses_before_it_is_caught() -> None:
    def make() -> Drafter:
        parts = [
            scripted(chain(LawTable(3, 100, 0.0), 1)),
            scripted(chain(LawTable(3, 200, 0.0), 1)),
        ]
        return _GoesOnFromTheCommittedText(parts, [None, None])

    assert (
        max(drafter_bias(ExactRule(), make, LawTable(3, seed, 0.0), 3) for seed in range(4)) > 1e-2
    )


# -- who is told what ------------------------------------------------------------------------------


class Witness(Drafter):
    """Proposes a chain of fixed tokens and writes down what it is asked and told."""

    name = "witness"

    def __init__(self, *tokens: int) -> None:
        self.chain = list(tokens)
        self.max_nodes = len(tokens)
        self.asked: list[list[int]] = []
        self.rewound: list[int] = []
        self.outcome: RoundOutcome | None = None

    def begin(self, tokens: Sequence[int]) -> None:
        self.asked.clear()

    def propose(self, request: DraftRequest) -> DraftTree:
        self.asked.append(list(request.tokens))
        return DraftTree.chain(self.chain[: min(request.max_depth, request.max_nodes)])

    def rewind(self, length: int) -> None:
        self.rewound.append(length)

    def observe(self, outcome: RoundOutcome) -> None:
        self.outcome = outcome


def ask(drafter: Drafter, tokens: list[int], max_depth: int = 9, max_nodes: int = 9) -> DraftTree:
    return drafter.propose(DraftRequest(tokens, PLAIN, SeededNoise(0), max_depth, max_nodes))


def rows_of(tree: DraftTree) -> TableRows:
    return TableRows(
        [np.full(2, 0.5), *(np.array([1.0, float(node)]) for node in range(len(tree)))]
    )


@pytest.mark.parametrize(
    ("accepted", "own_path", "rewound"),
    [(0, None, [2]), (1, None, [3]), (2, (), []), (3, (0,), []), (4, (0, 1), [])],
)
def test_each_part_sees_what_became_of_its_own_tree(
    accepted: int, own_path: tuple[int, ...] | None, rewound: list[int]
) -> None:
    first, second = Witness(5, 6), Witness(7, 8)
    relay = RelayDrafter([first, second], [None, None])
    tree = ask(relay, [1, 2])
    assert (tree.tokens, tree.parents, tree.depths) == ((5, 6, 7, 8), (-1, 0, 1, 2), (1, 2, 3, 4))
    assert (first.asked, second.asked) == ([[1, 2]], [[1, 2, 5, 6]])
    rows, tokens = rows_of(tree), [1, 2, *tree.tokens[:accepted], 9]
    relay.observe(RoundOutcome(tokens, tree, tuple(range(accepted)), 9, rows))  # type: ignore[arg-type]
    assert first.outcome is not None
    assert second.outcome is not None
    assert first.outcome.path[: min(2, accepted)] == tuple(range(min(2, accepted)))
    assert second.rewound == rewound
    if own_path is None:  # the accepted path is all there is for it
        assert [second.outcome.tree.tokens[node] for node in second.outcome.path] == tokens[2:-1]
    else:
        assert second.outcome.tree is not tree
        assert second.outcome.path == own_path
        np.testing.assert_array_equal(second.outcome.rows.logits(0), rows.logits(2))
        np.testing.assert_array_equal(second.outcome.rows.logits(1), rows.logits(3))


def test_counts_and_limits_cut_each_part() -> None:
    relay = RelayDrafter([Witness(1, 2, 3), Witness(4, 5, 6)], [2, 1])
    assert ask(relay, [0]).tokens == (1, 2, 4)
    assert ask(relay, [0], max_depth=2).tokens == (1, 2)
    assert ask(relay, [0], max_nodes=1).tokens == (1,)
    assert ask(relay, [0], max_depth=0).tokens == ()
    assert (relay.max_nodes, relay.max_leaves) == (3, 1)


def test_a_part_with_nothing_to_say_is_skipped() -> None:
    second = Witness(4, 5)
    relay = RelayDrafter([NoDrafter(), second], [None, None])
    tree = ask(relay, [0])
    assert tree.tokens == (4, 5)
    relay.observe(RoundOutcome([0, 4, 9], tree, (0,), 9, rows_of(tree)))  # type: ignore[arg-type]
    assert second.outcome is not None
    assert (second.outcome.path, second.rewound) == ((0,), [])


def test_below_a_tree_the_next_part_goes_on_from_the_path_of_first_draws() -> None:
    tree = TreeBuilder()
    a, b = tree.add(ROOT, 1), tree.add(ROOT, 2)
    tree.add(b, 3)
    c = tree.add(a, 4)
    tree.add_hidden(c, 9)
    built = tree.build()
    assert first_path(built) == (a, c)
    grafted, places = graft(built, c, DraftTree.chain([7, 8]))
    assert grafted.tokens == (1, 2, 3, 4, 9, 7, 8)
    assert places == {ROOT: c, 0: 5, 1: 6}
    assert grafted.depths[5:] == (3, 4)
    assert grafted.draws[c][0].node == 5
    with pytest.raises(OptionError, match="already has drafted children"):
        graft(built, a, DraftTree.chain([7]))
    second = Witness(7)
    relay = RelayDrafter([scripted(lambda _: built), second], [None, None])
    assert ask(relay, [0]).n_candidates == 5
    assert second.asked == [[0, 1, 4]]


def test_lookup_forgets_guesses_that_were_rejected() -> None:
    """Its index holds the text alone: n-grams of rejected guesses are gone, whatever they overwrote
    is back."""
    tokens = [1, 2, 3, 4, 1, 2, 5, 6]
    lookup, fresh = PromptLookupDrafter(min_ngram=1), PromptLookupDrafter(min_ngram=1)
    lookup.begin(tokens)
    ask(lookup, [*tokens, 1, 2, 7, 7, 2])
    lookup.rewind(len(tokens) + 1)
    for more in ([1, 2], [1, 2, 7], [1]):
        fresh.begin([*tokens, *more])
        assert ask(lookup, [*tokens, *more]) == ask(fresh, [*tokens, *more])
        lookup.rewind(len(tokens) + 1)
