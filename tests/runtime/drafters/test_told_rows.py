"""Rows that drafters of every method tell rules: those of the depth they say, on tiny models.

Where a draft ends, the row after its last token is evaluated for the rule. A draft that is one
token deeper evaluates the same token on its way: both have to say the same. So no row stands one
place off, and what is evaluated late is what drafting evaluates.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from support.every_drafter import DRAFTERS, named
from support.tiny_models import F32

from specrun.bindings.errors import OptionError
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.laws import SeededNoise
from specrun.runtime.round import Drafter, DraftRequest
from specrun.runtime.round.drafter import Keep
from specrun.runtime.trees import ROOT, DraftTree

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4]
RULE = "cascade-opt(alpha=0.1)"
ATOL = 1e-4

DEEPER = [
    ("shallow", "eagle(FILE:eagle, n={})", 3),
    ("shallow", "eagle(FILE:eagle, n={}, p_min=0.001)", 2),
    ("deep", "eagle3(FILE:eagle3, n={})", 2),
    ("shallow", "hydra(FILE:hydra, n={})", 2),
    ("shallow", "hydra(FILE:hydra++, n={})", 2),
    ("nextn", "mtp(n={})", 3),
    ("shallow", "cascade(draft(FILE:twin, n={}), draft(FILE:small))", 3),
    ("shallow", "relay(draft(FILE:twin)@2, draft(FILE:small)@{})", 2),
    ("shallow", "early-exit(layers=1, n={})", 2),
]
TREES = [
    ("nextn", "mtp(tree={})", "2x1", "2x1x1"),
    ("shallow", "eagle(FILE:eagle, tree={})", "2x1", "2x1x1"),
    ("deep", "eagle3(FILE:eagle3, tree={})", "2x1", "2x1x1"),
    ("shallow", "hydra(FILE:hydra++, tree={})", "2x1", "2x1x1"),
    ("shallow", "medusa(FILE:medusa, tree={})", "2x1", "2x1x1"),
]
LOOKS_AHEAD = re.compile("pass|space")
TELLING = (
    "dflash",
    *("draft(", "partial(", "early-exit(", "eagle", "hydra", "medusa", "mtp", "ngram("),
    *("pass(", "space(", "cascade(", "relay("),
    *("ensemble(draft(FILE:twin), ngram", "ensemble(pass("),
)


def opened(files: dict[str, Path], target: str, drafter: str, accept: str = RULE) -> Runtime:
    return Runtime(files[target], drafter=named(drafter, files), accept=accept, **F32)


def proposed(runtime: Runtime, keep: Keep = "rows", most: int = 8) -> tuple[Drafter, DraftTree]:
    """What is drafted after a round, whose states the drafter has seen."""
    params = SamplingParams(temperature=0.0, seed=1)
    runtime.generate(PROMPT, params, max_tokens=3)
    tokens = list(runtime.session.conversation.tokens)
    drafter = runtime.session.drafter
    request = DraftRequest(tokens, params, SeededNoise(1), most, 16, keep=keep)
    return drafter, drafter.propose(request)


def rows_of(tree: DraftTree) -> dict[tuple[int, ...], np.ndarray]:
    """The rows by the tokens above them, all copied."""
    assert tree.rows is not None
    found = {}
    for node in range(ROOT, len(tree)):
        row = tree.rows.logits(node)
        if row is not None:
            found[tuple(tree.tokens[above] for above in tree.path_to(node))] = row.copy()
    return found


def compare(files: dict[str, Path], target: str, short: str, deep: str) -> None:
    with opened(files, target, short) as runtime:
        _, tree = proposed(runtime)
        rows = rows_of(tree)
        assert len(tree) > 1
    with opened(files, target, deep) as runtime:
        _, deeper = proposed(runtime)
        others = rows_of(deeper)
    assert deeper.max_depth == tree.max_depth + 1
    assert len(rows) == len(tree) + 1
    for path, row in rows.items():
        np.testing.assert_allclose(row, others[path], atol=ATOL)
        if len(path) < tree.max_depth:  # the favourite below it was drafted
            assert (*path, int(row.argmax())) in others
    laws = list(rows.values())
    assert not any(np.allclose(row, laws[0], atol=1e-3) for row in laws[1:])  # else no test


@pytest.mark.parametrize(("target", "drafter", "n"), DEEPER, ids=lambda part: str(part))
def test_the_row_after_a_chain_is_that_of_a_longer_one(
    files: dict[str, Path], target: str, drafter: str, n: int
) -> None:
    compare(files, target, drafter.format(n), drafter.format(n + 1))


@pytest.mark.parametrize(
    ("target", "drafter", "shape", "deeper"), TREES, ids=lambda part: str(part)
)
def test_the_rows_after_a_trees_leaves_are_those_of_a_deeper_one(
    files: dict[str, Path], target: str, drafter: str, shape: str, deeper: str
) -> None:
    if "medusa" not in drafter:
        compare(files, target, drafter.format(shape), drafter.format(deeper))
        return
    # Medusa's heads do not see the path: one row for each depth.
    with opened(files, target, drafter.format(deeper)) as runtime:
        _, tree = proposed(runtime)
        rows = rows_of(tree)
    drafted = [tuple(tree.tokens[above] for above in tree.path_to(n)) for n in range(len(tree))]
    assert all((*path, int(row.argmax())) in drafted for path, row in rows.items())
    for path, row in rows.items():
        np.testing.assert_array_equal(row, next(v for k, v in rows.items() if len(k) == len(path)))
    with opened(files, target, drafter.format(shape)) as runtime:
        _, tree = proposed(runtime)
        for path, row in rows_of(tree).items():
            np.testing.assert_allclose(row, rows[path], atol=ATOL)


MIXED = [
    ("shallow", "ensemble(draft(FILE:twin, n=2), draft(FILE:small, tree=2x2))"),
    ("shallow", "ensemble(eagle(FILE:eagle, n=2), medusa(FILE:medusa, tree=2x1))"),
    ("shallow", "relay(draft(FILE:twin)@2, eagle(FILE:eagle, n=2))"),
    ("shallow", "relay(hydra(FILE:hydra++, n=2), draft(FILE:twin)@2)"),
]
"""Members that tell, of several methods."""


@pytest.mark.parametrize(("target", "drafter"), [*DRAFTERS, *MIXED], ids=lambda part: str(part))
def test_who_has_laws_tells_them_and_who_has_none_is_refused(
    files: dict[str, Path], target: str, drafter: str
) -> None:
    """Texts are made with every drafter that tells; they repeat, and end with pi's own token."""
    tells = drafter == "none" or (drafter.startswith(TELLING) and "=text" not in drafter)
    tells = tells and not (drafter.startswith(("eagle", "dflash")) and "window=" in drafter)
    tells = tells or (target, drafter) in MIXED
    if not tells:
        with pytest.raises(
            OptionError, match=r"has none: give draft\(FILE\), heads|by measured|leave window out"
        ):
            opened(files, target, drafter)
        return
    with opened(files, target, drafter) as runtime:
        for temperature in (0.0, 0.9):
            params = SamplingParams(temperature=temperature, seed=1)
            results = [runtime.generate(PROMPT, params, max_tokens=12) for _ in range(2)]
            assert results[0].token_ids == results[1].token_ids
            assert results[0].stats.total_variation is not None
        if drafter != "none":
            _, tree = proposed(runtime, most=0)
            assert len(tree) == 0
            # The last token of an answer comes from pi, too; but nobody looks ahead beyond it.
            assert len(rows_of(tree)) == (not LOOKS_AHEAD.search(drafter))


def test_what_no_head_says_comes_from_the_target(files: dict[str, Path]) -> None:
    """Two NextN blocks say two tokens: after these there is no law of theirs."""
    with opened(files, "two blocks", "mtp(n=2)") as runtime:
        _, tree = proposed(runtime)
        assert tree.rows is not None
        assert len(tree) == 2
        assert tree.rows.logits(0) is not None
        assert tree.rows.logits(1) is None


@pytest.mark.parametrize("drafter", ["eagle(FILE:eagle, n=3)", "hydra(FILE:hydra, n=3)"])
def test_heads_stay_one_graph_where_drafted_tokens_stand_for_their_law(
    files: dict[str, Path], drafter: str
) -> None:
    with opened(files, "shallow", drafter, "cascade-token-v3(alpha=0.5)") as runtime:
        _, tree = proposed(runtime, "points")
        assert tree.rows is None
        assert len(tree) == 3
