"""Growing trees from draft laws: exact for every scheme and shape, and what would bias the text is
caught.

No model here: laws come from tables, and every outcome is enumerated with its probability.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.enumeration import PROMPT, TOLERANCE, bias
from support.scripted import PLAIN, LawTable, law_of
from support.tree_laws import Grow, TableLaws, dynamic, fixed

from specrun.bindings.errors import OptionError
from specrun.runtime.acceptance import ExactRule
from specrun.runtime.laws import Law, NoiseSource, SeededNoise
from specrun.runtime.round import DraftRequest
from specrun.runtime.trees import (
    ROOT,
    Child,
    DraftTree,
    DynamicShape,
    Topology,
    TreeBuilder,
    TreeSampling,
    grow_by_path_probability,
    grow_tree,
    most_likely,
    parse_topology,
    proposal_scheme,
    propose_with_replacement,
    propose_without_replacement,
)

SCHEMES: tuple[TreeSampling, ...] = ("with", "without", "argmax")


def request_of(noise: NoiseSource, max_depth: int = 9, max_nodes: int = 99) -> DraftRequest:
    return DraftRequest(list(PROMPT), PLAIN, noise, max_depth, max_nodes)


# -- exactness -------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", SCHEMES)
@pytest.mark.parametrize("shape", ["1x1", "3", "2x1", "2x2", "0 1 00", "0 1 10", "0 1 00 01"])
@pytest.mark.parametrize("seed", range(2))
def test_fixed_shapes_give_the_targets_law(sampling: TreeSampling, shape: str, seed: int) -> None:
    propose = fixed(LawTable(3, seed + 100), parse_topology(shape), sampling)
    length = 2 if shape in ("2x2", "0 1 00 01") else 3
    assert bias(ExactRule(), propose, LawTable(3, seed), length) < TOLERANCE


@pytest.mark.parametrize(
    "shape", [DynamicShape(1, 2, 2), DynamicShape(2, 2, 3), DynamicShape(3, 2, 6)]
)
@pytest.mark.parametrize("seed", range(3))
def test_dynamic_shapes_give_the_targets_law(shape: DynamicShape, seed: int) -> None:
    assert (
        bias(ExactRule(), dynamic(LawTable(3, seed + 100), shape), LawTable(3, seed), 3) < TOLERANCE
    )


@pytest.mark.parametrize("sampling", SCHEMES)
def test_a_confidence_stop_gives_the_targets_law(sampling: TreeSampling) -> None:
    """It reads laws before draws; at .5 it stops some of the nodes of this table and not others."""
    for seed in range(3):
        propose = fixed(LawTable(3, seed + 100), parse_topology("2x1"), sampling, p_min=0.5)
        assert bias(ExactRule(), propose, LawTable(3, seed), 3) < TOLERANCE
    assert (
        bias(ExactRule(), dynamic(LawTable(3, 100), DynamicShape(3, 2, 6), 0.5), LawTable(3, 0), 3)
        < TOLERANCE
    )


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Trees of up to 4 nodes and 3 levels, every shape of them."""
    depths = [draw(st.integers(1, 3)) for _ in range(draw(st.integers(1, 4)))]
    parents: list[int] = []
    level: list[int] = [ROOT]
    for depth in (1, 2, 3):
        count = sum(level == depth for level in depths)
        if not count:
            break
        chosen = sorted(draw(st.sampled_from(level)) for _ in range(count))
        level = list(range(len(parents), len(parents) + count))
        parents += chosen
    return Topology(tuple(parents or [ROOT]))


@settings(max_examples=150, derandomize=True, deadline=None, database=None)
@given(
    topologies(),
    st.sampled_from(SCHEMES),
    st.integers(0, 10**6),
    st.floats(0, 0.9),
    st.sampled_from([0.0, 0.4]),
)
def test_any_shape_scheme_and_law_gives_the_targets_law(
    topology: Topology, sampling: TreeSampling, seed: int, zeros: float, p_min: float
) -> None:
    """Laws with up to nine tenths of their entries zero exhaust themselves before their siblings
    are drawn."""
    propose = fixed(LawTable(3, seed, zeros), topology, sampling, p_min)
    assert bias(ExactRule(), propose, LawTable(3, seed + 1, zeros), 2) < TOLERANCE


@settings(max_examples=80, derandomize=True, deadline=None, database=None)
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 5),
    st.integers(0, 10**6),
    st.floats(0, 0.9),
)
def test_any_dynamic_tree_gives_the_targets_law(
    depth: int, topk: int, extra: int, seed: int, zeros: float
) -> None:
    propose = dynamic(LawTable(3, seed, zeros), DynamicShape(depth, topk, depth + extra))
    assert bias(ExactRule(), propose, LawTable(3, seed + 1, zeros), 3) < TOLERANCE


# -- what must not pass ----------------------------------------------------------------------------


def keeps_the_likelier(
    builder: TreeBuilder, parent: int, law: Law, count: int, noise: NoiseSource
) -> list[Child]:
    """Prunes by value: EAGLE-2's rule, with drawn tokens."""
    tokens = [noise.choose(law) for _ in range(count + 1)]
    best = sorted(tokens, key=law.probability, reverse=True)[:count]
    return [(builder.add(parent, token, law), token) for token in best]


def sorts_its_siblings(
    builder: TreeBuilder, parent: int, law: Law, count: int, noise: NoiseSource
) -> list[Child]:
    """Draws without replacement, then tests the least likely first."""
    drawn: list[tuple[int, Law]] = []
    whole = law
    for _ in range(count):
        token = noise.choose(law)
        drawn.append((token, law))
        rest = law.without(token)
        if rest is law:
            break
        law = rest
    drawn.sort(key=lambda pair: whole.probability(pair[0]))
    return [(builder.add(parent, token, stored), token) for token, stored in drawn]


def forgets_the_removal(
    builder: TreeBuilder, parent: int, law: Law, count: int, noise: NoiseSource
) -> list[Child]:
    """Draws without replacement and stores the law with its earlier siblings still in it."""
    scratch = TreeBuilder()
    return [
        (builder.add(parent, token, law), token)
        for _, token in propose_without_replacement(scratch, ROOT, law, count, noise)
    ]


def drops_duplicates(
    builder: TreeBuilder, parent: int, law: Law, count: int, noise: NoiseSource
) -> list[Child]:
    """Draws with replacement and keeps one draw of each token."""
    scratch = TreeBuilder()
    return [
        (builder.add(parent, token, law), token)
        for _, token in propose_with_replacement(scratch, ROOT, law, count, noise)
    ]


@pytest.mark.parametrize(
    "wrong", [keeps_the_likelier, sorts_its_siblings, forgets_the_removal, drops_duplicates]
)
def test_wrong_proposals_are_caught(wrong: object) -> None:
    biases = [
        bias(
            ExactRule(),
            fixed(LawTable(3, seed + 9, 0.0), parse_topology("2"), wrong),
            LawTable(3, seed, 0.0),
            2,
        )  # type: ignore[arg-type]
        for seed in range(4)
    ]
    assert max(biases) > 1e-2


def test_a_confidence_stop_that_reads_the_drawn_token_is_caught() -> None:
    def propose(request: DraftRequest) -> DraftTree:
        tree, law = TreeBuilder(), law_of(LawTable(3, 9, 0.0)(request.tokens))
        token = request.noise.choose(law)
        if request.max_depth and law.probability(token) > 0.3:
            tree.add(ROOT, token, law)
        return tree.build()

    assert bias(ExactRule(), propose, LawTable(3, 0, 0.0), 2) > 1e-2


# -- how trees grow --------------------------------------------------------------------------------


def grown(
    sampling: TreeSampling, shape: str, seed: int = 0, size: int = 9
) -> tuple[DraftTree, TableLaws]:
    laws = TableLaws(LawTable(size, 7, 0.0), PROMPT)
    tree = grow_tree(
        parse_topology(shape), laws, proposal_scheme(sampling), SeededNoise(seed), len(PROMPT)
    )
    return tree, laws


def test_each_depth_is_one_evaluation_and_leaves_are_none() -> None:
    tree, laws = grown("without", "4x2x2")
    assert len(tree) == 28
    assert laws.batches == [4, 8]


def test_draws_without_replacement_differ_and_carry_the_law_without_their_elder_siblings() -> None:
    tree, _ = grown("without", "5")
    law = law_of(LawTable(9, 7, 0.0)(PROMPT))
    for draw in tree.draws[ROOT]:
        assert draw.law is not None
        assert np.allclose(draw.law.aligned_to(law), law.probs)
        law = law.without(tree.tokens[draw.node])
    assert len(set(tree.tokens)) == 5


def test_draws_with_replacement_share_nodes_and_keep_every_draw() -> None:
    trees = [grown("with", "6x1", seed, size=3)[0] for seed in range(20)]
    assert all(len(tree.draws[ROOT]) == 6 for tree in trees)
    assert all(tree.n_candidates <= 6 for tree in trees)
    # One child below each distinct one, the first subtrees going to the first of them.
    assert all(len(tree.draws) == 1 + sum(depth == 1 for depth in tree.depths) for tree in trees)


def test_an_exhausted_law_ends_its_siblings() -> None:
    law = Law(np.array([0.25, 0.0, 0.75]))
    for scheme in SCHEMES:
        builder = TreeBuilder()
        proposal_scheme(scheme)(builder, ROOT, law, 5, SeededNoise(1))
        assert len(builder) <= 2
        assert 1 not in builder.build().tokens


def test_draws_of_one_seed_do_not_depend_on_what_else_is_in_the_tree() -> None:
    """The first depth is keyed by its position alone, so that a longer tree begins as a shorter
    one."""
    assert grown("without", "3x2", 5)[0].tokens[:3] == grown("without", "3", 5)[0].tokens


@pytest.mark.parametrize("size", [5, 40, 3000])
@pytest.mark.parametrize("levels", [3, 10**6])
def test_the_most_likely_are_those_of_a_sort(size: int, levels: int) -> None:
    generator = np.random.default_rng(size)
    law = Law.normalised(generator.integers(0, levels, size).astype(float) + (np.arange(size) == 3))
    best = most_likely(law, 4)
    order = np.argsort(-law.probs, kind="stable")[:4]
    assert [token for token, _ in best] == [
        token for token in order.tolist() if law.probs[token] > 0
    ]
    assert [probability for _, probability in best] == law.probs[
        [token for token, _ in best]
    ].tolist()


# -- EAGLE-2 ---------------------------------------------------------------------------------------


def test_the_dynamic_tree_is_the_best_of_all_nodes_that_were_expanded() -> None:
    """Against the paper's two phases written out over whole paths."""
    depth, topk, nodes = 4, 3, 8
    table = LawTable(6, 3, 0.0, sharpness=2.0)
    beam: dict[tuple[int, ...], float] = {(): 1.0}
    made: dict[tuple[int, ...], float] = {}
    for _ in range(depth):
        children = {
            (*path, int(token)): value * float(table([*PROMPT, *path])[token])
            for path, value in beam.items()
            for token in np.argsort(-table([*PROMPT, *path]))[:topk]
        }
        made |= children
        beam = dict(sorted(children.items(), key=lambda pair: -pair[1])[:topk])
    wanted = {path for path, _ in sorted(made.items(), key=lambda pair: -pair[1])[:nodes]}
    laws = TableLaws(table, PROMPT)
    tree = grow_by_path_probability(DynamicShape(depth, topk, nodes), laws)
    assert {
        tuple(tree.tokens[ancestor] for ancestor in tree.path_to(node)) for node in range(len(tree))
    } == wanted
    assert laws.batches == [topk] * (depth - 1)


# -- limits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "propose",
    [
        *(fixed(LawTable(5, 1), parse_topology("3x2x2"), scheme) for scheme in SCHEMES),
        dynamic(LawTable(5, 1), DynamicShape(3, 3, 12)),
    ],
)
def test_a_rounds_limits_are_kept(propose: Grow) -> None:
    for max_depth in range(5):
        for max_nodes in range(14):
            tree = propose(request_of(SeededNoise(max_nodes), max_depth, max_nodes))
            assert len(tree) <= max_nodes
            assert tree.max_depth <= max_depth
            if max_depth and max_nodes:
                assert len(tree)


def test_limits_do_not_depend_on_what_was_drawn() -> None:
    """With limits that change from round to round the text still follows the target's law."""
    for sampling in SCHEMES:
        propose = fixed(LawTable(3, 11), parse_topology("2x2"), sampling)

        def limited(request: DraftRequest, propose: Grow = propose) -> DraftTree:
            nodes = 1 + sum(request.tokens) % 4
            return propose(
                DraftRequest(
                    request.tokens, request.params, request.noise, request.max_depth, nodes
                )
            )

        assert bias(ExactRule(), limited, LawTable(3, 12), 2) < TOLERANCE


# -- siblings without replacement ------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_siblings_are_the_draws_made_in_turn(seed: int) -> None:
    """Nodes, draws and every law, bit for bit, also where others are drawn below the same node."""
    rng = np.random.default_rng(seed)
    probs = rng.dirichlet(np.ones(12))
    law = Law(probs, np.sort(rng.choice(100, 12, replace=False)))
    assert law.ids is not None
    tokens = rng.permutation(law.ids)[:4].tolist()
    together, in_turn = TreeBuilder(), TreeBuilder()
    first = together.add_siblings(ROOT, tokens, law)
    nodes = [*range(first, first + len(tokens))]
    left, single = law, []
    for token in tokens:
        single.append(in_turn.add(ROOT, token, left))
        left = left.without(token)
    assert nodes == single
    if seed % 2:  # another drafter guesses one of them, and a new one
        for builder in (together, in_turn):
            assert builder.add(ROOT, tokens[1]) == nodes[1]
            assert builder.add(ROOT, 101) == 4
    for builder in (together, in_turn):
        builder.add(nodes[2], 7)
    ours, theirs = together.build(), in_turn.build()
    assert (ours.tokens, ours.parents, ours.depths) == (
        theirs.tokens,
        theirs.parents,
        theirs.depths,
    )
    assert set(ours.draws) == set(theirs.draws)
    assert len(ours.draws) == len(theirs.draws)
    for parent, draws in theirs.draws.items():
        for mine, other in zip(ours.draws[parent], draws, strict=True):
            assert mine.node == other.node
            if mine.law is None or other.law is None:
                assert mine.law is other.law
            else:
                assert mine.law.probs.tobytes() == other.law.probs.tobytes()
    assert ours.draws[ROOT] is ours.draws[ROOT]  # laws are worked out once


def test_a_refused_node_leaves_no_mark() -> None:
    builder = TreeBuilder()
    with pytest.raises(OptionError, match="a tree of 0 nodes has no node 3"):
        builder.add_hidden(3, 1)
    builder.add(builder.add(ROOT, 1), 2)  # the number of the refused one, and it can be accepted
    hidden = builder.add_hidden(ROOT, 1)
    with pytest.raises(OptionError, match="node 2 cannot be accepted"):
        builder.add(hidden, 2)
    with pytest.raises(OptionError, match="node 2 cannot be accepted"):
        builder.add_siblings(hidden, [2], Law.point(2))
    builder.add_hidden(hidden, 3)
    tree = builder.build()
    assert (tree.tokens, tree.parents) == ((1, 2, 1, 3), (ROOT, 0, ROOT, 2))
    assert (tree.is_candidate, tree.depths) == ((True, True, False, False), (1, 2, 1, 2))
