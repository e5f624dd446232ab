"""Planning trees that grow by path probability: replayed acceptance, and the choice among
shapes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scripted import LawTable
from support.tree_laws import TableLaws

from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.models.model import Model
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.drafters.draft_model import draft_size
from specrun.runtime.planning import CostCurve, RoundCosts
from specrun.runtime.trees import (
    ROOT,
    DraftTree,
    DynamicShape,
    expand_by_path_probability,
    grow_by_path_probability,
)
from specrun.runtime.tuning import (
    CalibrationText,
    DynamicAcceptance,
    kept_nodes,
    measure_dynamic_acceptance,
    plan_dynamic_tree,
)

PROMPT = (1, 2)
GREEDY = SamplingParams(temperature=0.0)


def walk(tree: DraftTree, text: tuple[int, ...]) -> int:
    """How many tokens of the text a tree spells from its root."""
    node = ROOT
    for length, token in enumerate(text):
        below = [
            child
            for child, parent in enumerate(tree.parents)
            if parent == node and tree.tokens[child] == token
        ]
        if not below:
            return length
        node = below[0]
    return len(text)


@settings(max_examples=60, derandomize=True, deadline=None, database=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 4),
    st.lists(st.integers(0, 3), min_size=1, max_size=5),
    st.integers(1, 4),
)
def test_one_expansion_tells_what_every_shape_keeps(
    seed: int, topk: int, text: list[int], max_depth: int
) -> None:
    """Against the tree that a drafter of each shape would really propose."""
    table = LawTable(4, seed)
    grown = expand_by_path_probability(max_depth, topk, TableLaws(table, PROMPT))
    kept = kept_nodes(grown, text, max_depth, 20)
    assert not kept[0].any()
    for depth in range(1, max_depth + 1):
        for nodes in range(depth, 21):
            tree = grow_by_path_probability(
                DynamicShape(depth, topk, nodes), TableLaws(table, PROMPT)
            )
            assert kept[depth, nodes] == walk(tree, tuple(text)), (depth, nodes)


def test_replayed_acceptance_is_what_decoding_accepts(
    tiny_model: Path, tiny_flat_twin: Path
) -> None:
    """At each position of a greedy text the real drafter, asked for one round, keeps what the table
    says on average."""
    shape, n_tokens = DynamicShape(3, 2, 4), 24
    expression = f'draft("{tiny_flat_twin}", depth=3, topk=2, nodes=4)'
    with Runtime(tiny_model, "none", n_ctx=128, n_threads=1) as plain:
        text = (5, 6, 7, *plain.generate([5, 6, 7], GREEDY, max_tokens=n_tokens).token_ids)
    accepted = []
    with Runtime(tiny_model, drafter=expression, n_ctx=128, n_threads=1) as runtime:
        for start in range(3, len(text) - shape.depth + 1):
            # The first round may draft three tokens and adds the target's own.
            events = list(runtime.stream(list(text[:start]), GREEDY, max_tokens=shape.depth + 1))
            accepted.append(next(i for i, event in enumerate(events) if event.origin == "target"))
    with Model(tiny_model) as target, Model(tiny_flat_twin) as draft:
        sequences, outputs = draft_size(shape)
        options = ContextOptions(n_ctx=128, n_threads=1, n_sequences=sequences, n_outputs=outputs)
        with Context(draft, options) as context:
            table = measure_dynamic_acceptance(
                context,
                [CalibrationText(text, 3)],
                GREEDY,
                topk=2,
                max_depth=3,
                max_nodes=6,
                target_vocab_size=target.vocabulary.size,
                seconds=60.0,
            )
    assert table.accepted[3, 4] == pytest.approx(float(np.mean(accepted)))
    assert 0.0 < table.accepted[3, 4] < 3.0


def curve(*times: float) -> CostCurve:
    return CostCurve.flat(times)


COSTS = RoundCosts(
    curve(*(1.0 + 0.15 * size for size in range(16))),
    CostCurve(tuple(range(1, 17)), *(tuple(a + 0.01 * n for n in range(16)) for a in (0.05, 0.08))),
    per_round=0.01,
    per_node=0.002,
)


def rising(
    topk: int, max_depth: int = 5, max_nodes: int = 12, share: float = 0.7
) -> DynamicAcceptance:
    """Deeper and larger trees keep more, with falling returns."""
    depth, nodes = np.arange(max_depth + 1)[:, None], np.arange(max_nodes + 1)[None, :]
    accepted = (1 - share**depth) / (1 - share) * (1 - np.exp(-nodes * topk / (2.0 + depth)))
    return DynamicAcceptance(topk, accepted)


def test_the_plan_is_the_best_of_all_shapes() -> None:
    measured = [rising(topk) for topk in (2, 3)]
    plan = plan_dynamic_tree(measured, COSTS, sizes=range(1, 13))
    assert plan is not None
    speeds = {}
    for acceptance in measured:
        before = [1, *[acceptance.topk] * 4]
        for depth in range(1, 6):
            for nodes in range(
                depth, 1 + min(12, acceptance.topk + (depth - 1) * acceptance.topk**2)
            ):
                shape = DynamicShape(depth, acceptance.topk, nodes)
                # One wide evaluation a depth: the first of them rebuilds the graph.
                drafting = COSTS.depth_seconds(1, None)
                drafting += sum(
                    COSTS.depth_seconds(acceptance.topk, n) for n in before[: depth - 1]
                )
                seconds = COSTS.verify_seconds(nodes) + drafting
                speeds[shape] = (1 + acceptance.accepted[depth, nodes]) / seconds
    assert plan.tokens_per_second == pytest.approx(max(speeds.values()))
    assert plan.tokens_per_second == pytest.approx(speeds[plan.shape])
    smaller = plan_dynamic_tree(measured, COSTS, sizes=range(1, 13), tolerance=0.1)
    assert smaller is not None
    assert smaller.shape.nodes < plan.shape.nodes
    assert smaller.tokens_per_second >= 0.9 * plan.tokens_per_second
