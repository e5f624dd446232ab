"""Real texts in trees and in several conversations, on quantized weights with default options."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import islice

import numpy as np
import pytest
from scipy import stats

from specrun.bench.prove import forced
from specrun.bench.prove.cache import check_cache, check_conversations
from specrun.bench.prove.forced import FLOOR, Drift, ForcedText, excess, plain_texts
from specrun.bench.prove.setting import ALPHA, Check, Setting
from specrun.bench.prove.texts import most_partings
from specrun.bindings.contexts import Context, ContextOptions
from specrun.bindings.models import Model
from specrun.runtime.engine import Runtime
from specrun.runtime.engine.slots import SlotTarget
from specrun.runtime.round import CachedText, TargetModel
from specrun.runtime.round.target import EvaluatedRows
from specrun.runtime.trees import DraftTree

pytestmark = pytest.mark.long

SECONDS = 1e-3  # each check does its least
CHECKS = {"trees": check_cache, "conversations": check_conversations}


@pytest.fixture(scope="module")
def plain() -> list[ForcedText]:
    """The first texts of plain decoding, which the tests share."""
    with Runtime.demo("draft(tree=2x2)", n_threads=1) as runtime:
        setting = Setting(runtime, 0, SECONDS)
        with closing(plain_texts(setting, runtime.session.target)) as texts:
            return [*islice(texts, 8)]


@pytest.fixture
def setting(plain: list[ForcedText]) -> Iterator[Setting]:
    """The embedded pair: Q8_0 weights, flash attention and cache as they are without options."""
    with Runtime.demo("draft(tree=2x2)", n_threads=1) as runtime:
        setting = Setting(runtime, 0, SECONDS)
        setting.forced += plain[:3]
        yield setting


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_drafts_of_a_quantized_target_keep_the_bits_of_chains(
    setting: Setting, check: Callable[[Setting], Check]
) -> None:
    found = check(setting)
    assert found.status == "passed", found
    assert (found.figure, found.bound) == (0.0, FLOOR)


def by_level(self: TargetModel, text: CachedText, tree: DraftTree) -> EvaluatedRows:
    """Evaluate a tree as it is laid out, level by level."""
    tokens = [text.tokens[-1], *tree.tokens]
    return self._evaluate_at(text.n_cached, tokens, tree.parents)


def with_holes(self: TargetModel, text: CachedText, tree: DraftTree, path: Sequence[int]) -> None:
    """Keep a path in its place: dropped cells leave holes, which the next cells fill."""
    self._keep_at(text.n_cached, tree.parents, path)
    text.commit(tree.tokens[node] for node in path)


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_cells_out_of_order_fail(
    setting: Setting, check: Callable[[Setting], Check], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TargetModel, "evaluate", by_level)
    monkeypatch.setattr(TargetModel, "commit", with_holes)
    monkeypatch.setattr(SlotTarget, "_park", lambda *_: None)
    found = check(setting)
    assert found.status == "failed"
    assert "drift further than" in found.note
    assert found.figure is not None
    assert found.figure > 10 * FLOOR


def test_where_a_wrong_cell_is_not_seen_nothing_is_said(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ForcedText, "with_wrong_cell", lambda self, *_: self)
    setting.max_leaves = 1
    assert check_cache(setting).status == "left out"


def test_chains_keep_the_bits_of_plain_decoding(setting: Setting) -> None:
    """With one thread, beyond 256 cells too."""
    setting.max_leaves = 1
    found = check_cache(setting)
    assert found.status == "passed", found
    assert "texts beyond 256 cells part from plain decoding not in the 100 tokens" in found.note


def test_texts_go_on_from_real_prompts(plain: list[ForcedText], setting: Setting) -> None:
    assert [len(text.prompt) > 256 for text in plain] == 2 * [False, True, False, False]
    assert {len(text.coming) for text in plain} == {100}
    assert len({tuple(text.prompt) for text in plain}) == len(plain)
    rows = np.stack(plain[0].rows)
    rows[:, list(setting.model.vocabulary.end_of_generation)] = -np.inf
    assert rows.argmax(axis=1).tolist() == plain[0].coming


def test_contexts_have_the_options_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[ContextOptions] = []
    create = Context.__init__

    def noted(self: Context, model: Model, options: ContextOptions) -> None:
        create(self, model, options)
        opened.append(options)

    monkeypatch.setattr(forced, "LENGTH", 8)
    given = {"n_threads": 1, "flash_attention": "on", "cache_type_v": "q8_0", "n_ubatch": 128}
    with Runtime.demo("draft(tree=2x2)", **given) as runtime:
        monkeypatch.setattr(Context, "__init__", noted)
        check_conversations(Setting(runtime, 0, SECONDS))
    assert len(opened) == 2  # of plain decoding, and of the slots
    for each in opened:
        assert {name: getattr(each, name) for name in given} == given


# -- figures ---------------------------------------------------------------------------------------


def drift(variations: list[list[float]]) -> Drift:
    return Drift(variations, n_equal=sum(not each for half in variations for each in half))


def test_the_bound_of_noise_keeps_its_size() -> None:
    """Noise of long tails, the same for all tokens of half a text: 1,000 tests at size 1e-4.

    More than 2 rejections have probability below 2e-4.
    """
    source, rejected, seen = np.random.default_rng(1), 0, 0
    for _ in range(1000):
        ours, theirs = (
            drift(np.repeat(source.exponential(0.01, (120, 1)), 5, axis=1).tolist())
            for _ in range(2)
        )
        rejected += excess(ours, theirs, Drift(), quiet=False).is_seen
        threefold = drift([[3 * each for each in half] for half in ours.variations])
        seen += excess(threefold, theirs, Drift(), quiet=False).is_seen
    assert rejected <= 2
    assert seen > 500


def test_few_texts_are_held_against_a_wrong_cell() -> None:
    noise, wrong = drift([[0.001] * 50] * 2), drift([[0.1] * 50] * 2)
    assert not excess(drift([[0.04] * 50] * 2), noise, wrong, quiet=False).is_seen
    assert excess(drift([[0.06] * 50] * 2), noise, wrong, quiet=False).is_seen
    near = drift([[0.005] * 50] * 2)  # too near to noise to prove anything
    assert not excess(wrong, noise, near, quiet=False).is_seen


def test_rows_that_are_no_numbers_are_seen() -> None:
    broken, noise = drift([[math.nan] * 50] * 2), drift([[0.001] * 50] * 2)
    for quiet in (True, False):
        assert excess(broken, noise, Drift(), quiet=quiet).is_seen


@pytest.mark.parametrize("expected", [0.0, 0.01, 1.0, 30.0])
def test_the_most_partings_that_chains_explain(expected: float) -> None:
    wanted = stats.poisson.ppf(1.0 - ALPHA, expected) if expected else 0.0
    assert most_partings(expected) == wanted
