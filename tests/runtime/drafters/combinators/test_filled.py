"""Blocks that are filled up: exact beside draws and points, and as much as is free."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.enumeration import (
    TOLERANCE,
    Propose,
    bias,
    branching_tree,
    chain,
    mixed_tree,
    top_k_points,
    wandering_chain,
)
from support.every_drafter import named
from support.scripted import PLAIN, LawTable, ScriptedDrafter
from support.tiny_models import F32, fresh_logits

from specrun.bindings.contexts.context_options import ContextOptions
from specrun.runtime import Engine, Runtime, SamplingParams
from specrun.runtime.acceptance import ExactRule, build_rule
from specrun.runtime.drafters.combinators import FilledDrafter, filled
from specrun.runtime.drafters.retrieval import ContextIndex, PromptLookupDrafter
from specrun.runtime.laws import SeededNoise
from specrun.runtime.planning import CostCurve, save_curve
from specrun.runtime.round import Drafter, DraftRequest, NoDrafter
from specrun.runtime.round.drafter import RoundOutcome
from specrun.runtime.trees import ROOT, DraftTree

pytestmark = pytest.mark.long

SIZE = 3
FREE = CostCurve((1, 64), (1.0, 1.0), (1.0, 1.0), (0.0, 0.0))
HISTORY = [int(n) for n in np.random.default_rng(5).integers(0, SIZE, 300)]
DRAFTS = LawTable(SIZE, 101, 0.0)
PROPOSERS: dict[str, Propose] = {
    "chain": chain(DRAFTS, 2),
    "wandering": wandering_chain(DRAFTS, 7, 2),
    "i.i.d.": branching_tree(DRAFTS, (2, 1), True),
    "siblings": branching_tree(DRAFTS, (2, 1), False),
    "points": top_k_points(DRAFTS, 2, 2),
    "mixed": mixed_tree(DRAFTS, 3),
    "nothing": lambda _: DraftTree(),
}


def scripted(propose: Propose, most: int = 9) -> Drafter:
    drafter = ScriptedDrafter(propose)
    drafter.max_nodes, drafter.max_leaves = most, 4
    return drafter


def filling(propose: Propose, curve: CostCurve = FREE, **options: bool) -> FilledDrafter:
    """A drafter whose lookup has read a history, so that it finds something below any text."""
    lookup = PromptLookupDrafter(
        num_draft_tokens=2,
        branches=1,
        min_ngram=1,
        reference=ContextIndex.of_text(HISTORY, SIZE),
        costs=curve,
    )
    return FilledDrafter(scripted(propose), lookup, curve, **options)


def proposing(name: str) -> Propose:
    return lambda request: filling(PROPOSERS[name]).propose(request)


RULES = ("token", "exact", "kseq")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("beside", [0.0, 1.1], ids=["beside the root", "behind alone"])
@pytest.mark.parametrize("name", PROPOSERS)
def test_what_is_filled_in_leaves_the_targets_law(
    name: str, beside: float, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To 1e-12, for draws, points and both, with tokens that the drafter drew too."""
    if rule == "kseq" and name in ("wandering", "siblings", "mixed"):
        pytest.skip("k-SEQ takes i.i.d. siblings")
    monkeypatch.setattr(filled, "_BESIDE", beside)
    rule_ = build_rule(rule)
    length = 3 if rule == "exact" and name in ("chain", "wandering") else 2  # of blocks
    assert bias(rule_, proposing(name), LawTable(SIZE, 1, 0.1), length) < TOLERANCE
    grown = [proposing(name)(request_of([0, 1], seed)) for seed in range(8)]
    alone = [PROPOSERS[name](request_of([0, 1], seed)) for seed in range(8)]
    assert sum(map(len, grown)) > sum(map(len, alone))


def request_of(tokens: Sequence[int], seed: int, depth: int = 6, nodes: int = 12) -> DraftRequest:
    return DraftRequest(list(tokens), PLAIN, SeededNoise(seed).for_drafting(2), depth, nodes)


def test_a_branch_that_depends_on_what_was_drawn_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The control: beside the root only where the drafter drew another token. The token-wise rule
    is exact all the same; block verification is not, for it judges the chain as a whole."""
    monkeypatch.setattr(filled, "_BESIDE", 0.0)
    merge = filled._Filling.merge

    def late(self: object, guesses: Sequence[object], *, branches: bool, decided: bool) -> None:
        merge(self, guesses, branches=branches, decided=False)  # type: ignore[arg-type]

    monkeypatch.setattr(filled._Filling, "merge", late)
    table = LawTable(SIZE, 0, 0.0)
    found = {rule: bias(build_rule(rule), proposing("chain"), table, 3) for rule in RULES}
    assert found["token"] < TOLERANCE
    assert found["exact"] > 1e-3


def test_a_point_that_is_tested_before_the_draws_it_depends_on_is_caught() -> None:
    """The other control: in front, and only where the drafter drew something else."""

    def in_front(request: DraftRequest) -> DraftTree:
        tree = proposing("chain")(request)
        draws = tree.draws.get(ROOT, ())
        if len(draws) < 2 or draws[0].node == draws[1].node:
            return tree
        return dataclasses.replace(tree, draws={**tree.draws, ROOT: (draws[1], draws[0])})

    filled_beside = filled._BESIDE
    filled._BESIDE = 0.0
    try:
        errors = [bias(ExactRule(), in_front, LawTable(SIZE, seed, 0.0), 2) for seed in range(2)]
    finally:
        filled._BESIDE = filled_beside
    assert max(errors) > 1e-2


# -- how much, and where ---------------------------------------------------------------------------

TEXT = [*range(10, 40), 5, *range(10, 20)]  # goes on with 20, 21, ...


def points(*tokens: int) -> Propose:
    return lambda request: DraftTree.chain([*tokens][: min(request.max_depth, request.max_nodes)])


def filled_tree(
    curve: CostCurve, *tokens: int, text: Sequence[int] = TEXT, **options: bool
) -> DraftTree:
    lookup = PromptLookupDrafter(num_draft_tokens=15, branches=1, costs=curve)
    drafter = FilledDrafter(scripted(points(*tokens)), lookup, curve, **options)
    drafter.begin(text)
    return drafter.propose(request_of(text, 0, 30, drafter.max_nodes))


def stepped(*widths: tuple[int, float]) -> CostCurve:
    sizes, times = zip(*widths, strict=True)
    return CostCurve(sizes, times, times, (0.0,) * len(sizes)).as_padded()


# Kernels that make 3 to 8 tokens dear and 9 to 16 cheap, and then steep.
BLOCKS = stepped((1, 1.0), (2, 1.0), (3, 1.5), (8, 1.6), (9, 1.1), (16, 1.1), (17, 3.0), (32, 6.0))


def test_the_block_is_filled_up_to_the_next_step() -> None:
    """Three tokens that agree with the text go on to the 16th; beyond it nothing is worth it."""
    tree = filled_tree(BLOCKS, 20, 21, 22)
    assert tree.tokens == (*range(20, 35),)
    assert tree.max_depth == len(tree) == 15


def test_both_ways_are_taken_where_the_drafter_leaves_the_text() -> None:
    """Its draft goes on where 30 to 33 stood, the text's own stands beside the root."""
    tree = filled_tree(BLOCKS, 30, 31)
    below_root = [tree.tokens[node] for node, above in enumerate(tree.parents) if above == ROOT]
    assert below_root == [30, 20]
    assert 32 in tree.tokens
    assert len(tree) == 15
    assert tree.parents[tree.tokens.index(32)] == 1


def test_a_chain_stays_a_chain_where_the_target_cannot_branch() -> None:
    tree = filled_tree(BLOCKS, 30, 31, branches=False)
    assert tree.tokens[:2] == (30, 31)
    assert tree.max_depth == len(tree) <= 9
    drafter = filling(points(1), branches=False)
    assert (drafter.max_leaves, drafter.max_nodes, drafter.max_filled) == (4, 9, 0)


def test_where_nothing_is_free_or_nothing_known_the_draft_stays_as_it_is() -> None:
    steep = CostCurve((1, 2, 64), (1.0, 2.0, 64.0), (1.0, 2.0, 64.0), (0.0,) * 3)
    assert filled_tree(steep, 30, 31).tokens == (30, 31)
    assert filled_tree(BLOCKS, 50, 51, text=range(10, 40)).tokens == (50, 51)
    assert filled_tree(BLOCKS, text=range(10, 40)).tokens == ()
    assert filled_tree(BLOCKS).tokens == (*range(20, 35),)


class Noting(NoDrafter):
    """Drafts `tokens`, and writes down what it is told."""

    name, max_nodes = "noting", 4

    def __init__(self, *tokens: int) -> None:
        self.tokens, self.seen = tokens, list[RoundOutcome]()

    def propose(self, request: DraftRequest) -> DraftTree:
        return DraftTree.chain([*self.tokens])

    def observe(self, outcome: RoundOutcome) -> None:
        self.seen.append(outcome)


class Numbered:
    """Rows that say which they are."""

    def logits(self, row: int) -> np.ndarray:
        return np.array([row])


@pytest.mark.parametrize(
    ("drafted", "came", "own_path", "rows"),
    [
        ((20, 21), (20, 21, 22, 23), (0, 1, 2, 3), [0, 1, 2, 3, 4]),
        ((30, 31), (20, 21), (2, 3), [0]),
        ((30, 31), (), (), [0]),
    ],
)
def test_the_drafter_sees_what_was_accepted_as_if_it_had_drafted_it(
    drafted: tuple[int, ...], came: tuple[int, ...], own_path: tuple[int, ...], rows: list[int]
) -> None:
    """Its own nodes keep their numbers; accepted ones that it lacked follow, with their rows."""
    drafter = Noting(*drafted)
    lookup = PromptLookupDrafter(num_draft_tokens=15, branches=1, costs=BLOCKS)
    whole = FilledDrafter(drafter, lookup, BLOCKS)
    whole.begin(TEXT)
    tree = whole.propose(request_of(TEXT, 0, 30, whole.max_nodes))
    path, node = list[int](), ROOT
    for token in came:
        pairs = enumerate(zip(tree.parents, tree.tokens, strict=True))
        node = next(child for child, found in pairs if found == (node, token))
        path.append(node)
    tokens = [*TEXT, *came, 3]
    whole.observe(RoundOutcome(tokens, tree, tuple(path), 3, Numbered()))  # type: ignore[arg-type]
    (seen,) = drafter.seen
    assert seen.path == own_path
    assert seen.tree.tokens[: len(drafted)] == drafted
    assert [int(seen.rows.logits(row)[0]) for row in seen.path_rows][: len(rows)] == rows
    given = [0, *[node + 1 for node in path]]
    assert [int(seen.rows.logits(row)[0]) for row in seen.path_rows] == given
    again = whole.propose(request_of(tokens, 0, 30, whole.max_nodes))
    assert again.tokens[: len(drafted)] == drafted  # nothing of the guesses stayed in the index


def test_a_drafter_that_is_refused_is_believed_less() -> None:
    """The text goes its own way, four times: what hangs behind the draft counts for less."""
    lookup = PromptLookupDrafter(num_draft_tokens=15, branches=1, costs=BLOCKS)
    whole = FilledDrafter(Noting(30, 31), lookup, BLOCKS)
    whole.begin(TEXT)
    text, chances = list(TEXT), [whole._chance(0)]
    for _ in range(4):
        tree = whole.propose(request_of(text, 0, 30, whole.max_nodes))
        node = next(n for n, above in enumerate(tree.parents) if above == ROOT and n >= 2)
        text += [tree.tokens[node], tree.tokens[node] + 1]
        whole.observe(RoundOutcome(text, tree, (node,), text[-1], Numbered()))  # type: ignore[arg-type]
        chances.append(whole._chance(0))
    assert chances[0] == 0.75
    assert chances == sorted(chances, reverse=True)
    assert chances[-1] < 0.4
    whole.begin(TEXT)
    assert whole._chance(0) == 0.75


# -- with models -----------------------------------------------------------------------------------

POINTS = [
    ("shallow", "draft(FILE:twin, sampling=argmax)"),
    ("shallow", "draft(FILE:twin, nodes=auto)"),
    ("shallow", "medusa(FILE:medusa)"),
    ("shallow", "hydra(FILE:hydra++)"),
    ("shallow", "eagle(FILE:eagle)"),
    ("shallow", "dflash(FILE:dspark)"),
    ("deep", "eagle3(FILE:eagle3)"),
    ("nextn", "mtp"),
    ("hybrid", "mtp"),
    ("shallow", "auto(eagle(FILE:eagle))"),
]


FREE_ROUNDS = CostCurve((1, 64), (1e-3, 1.01e-3), (1e-3, 1.01e-3), (0.0, 0.0))
"""A machine whose batches cost nothing."""
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4] * 2, [2, 7, 1, 8, 2, 8] * 3]
SETTINGS = [SamplingParams(temperature=t, seed=3) for t in (0.0, 1.0)]


def answered(target: Path, n_settings: int) -> tuple[list[list[int]], list[list[list[int]]]]:
    """Prompts whose texts go on much as they did, and plain decoding's answers to each."""
    save_curve(FREE_ROUNDS, target, ContextOptions(**F32), 0)
    with Runtime(target, "none", **F32) as plain:
        prompts = [
            [*prompt, *plain.generate(prompt, SETTINGS[0], max_tokens=40).token_ids, *prompt]
            for prompt in PROMPTS
        ]
        texts = [
            [plain.generate(prompt, each, max_tokens=30).token_ids for prompt in prompts]
            for each in SETTINGS[:n_settings]
        ]
    return prompts, texts


@pytest.mark.parametrize(("target", "drafter"), POINTS)
def test_bare_drafters_are_filled_and_the_text_is_plain_decodings(
    files: dict[str, Path], target: str, drafter: str
) -> None:
    """Greedy and drawn, and the cache is a fresh one."""
    prompts, wanted = answered(files[target], 2)
    with Runtime(files[target], named(drafter, files), **F32) as runtime:
        done = [runtime.generate(prompts[0], each, max_tokens=30) for each in SETTINGS]
        assert [result.token_ids for result in done] == [texts[0] for texts in wanted]
        if "auto(" not in drafter:
            assert sum(result.stats.drafting.get("filled", 0) for result in done) > 0
        session = runtime.session
        tokens = session.conversation.tokens
        row = session.target.evaluate(session.conversation, DraftTree()).logits(0)
        np.testing.assert_allclose(row, fresh_logits(runtime.model, tokens)[-1], atol=1e-4)


@pytest.mark.parametrize(
    ("target", "drafter"),
    [
        ("shallow", "draft(FILE:twin, sampling=argmax, p_min=0.5)"),
        ("nextn", "mtp(p_min=0.5)"),
        ("hybrid", "mtp(p_min=0.1)"),
    ],
)
def test_drafts_of_several_conversations_are_filled(
    files: dict[str, Path], target: str, drafter: str
) -> None:
    """Also where the drafter evaluates with others, which its part of a request is known by."""
    prompts, wanted = answered(files[target], 1)
    with Engine(files[target], named(drafter, files), slots=2, **F32) as engine:
        streams = [engine.stream(prompt, SETTINGS[0], max_tokens=30) for prompt in prompts]
        for stream in streams:
            deque(stream, maxlen=0)
        results = [stream.result for stream in streams]
    assert [result.token_ids for result in results] == wanted[0]
    assert sum(result.stats.drafting.get("filled", 0) for result in results) > 0


def test_only_bare_drafters_are_filled_where_costs_are_known(files: dict[str, Path]) -> None:
    def most(drafter: str, **options: Any) -> int:
        expression = named(drafter, files)
        with Runtime(files["shallow"], expression, **{**F32, **options}) as runtime:
            return runtime.session.drafter.max_filled

    save_curve(FREE_ROUNDS, files["shallow"], ContextOptions(**F32), 0)
    assert most("draft(FILE:twin)") == most("draft(FILE:twin, n=auto)") == 15
    for drafter in (
        "none",
        "prompt-lookup",
        "draft(FILE:twin, n=4)",
        "draft(FILE:twin, tree=2x2)",
        "relay(draft(FILE:twin)@2, prompt-lookup@3)",
        "ensemble(draft(FILE:twin), prompt-lookup)",
    ):
        assert most(drafter) == 0, drafter
    assert most("draft(FILE:twin)", shape="fixed") == 0
    assert most("draft(FILE:twin)", accept="typical") == 0
    assert most("draft(FILE:twin)", cache_type_k="f16") == 0  # of which nothing was measured
