"""Compiled loops: the same bits as Python's own, and laws bit for bit what a plain sort makes."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from support.plain_laws import plain_law

from specrun.bindings.errors import DecodeFailedError, OptionError
from specrun.runtime import SamplingParams, compiled
from specrun.runtime.acceptance import (
    Acceptance,
    BlockRule,
    ExactRule,
    LawPair,
    RawLaw,
    build_rule,
    cascades,
    decide,
    entropy,
    largest,
    total_variation,
    walk,
)
from specrun.runtime.acceptance import rule as rule_module
from specrun.runtime.acceptance.law_pair import entropy_between, largest_between
from specrun.runtime.acceptance.rule import CertainLaws
from specrun.runtime.compiled import LOOPS, MOST_RANKED
from specrun.runtime.laws import Law, SeededNoise, law, noise, transform, transformed_law
from specrun.runtime.laws.transform import greedy_token
from specrun.runtime.trees import ROOT, DraftTree, TreeBuilder

MODULES = (law, noise, transform)
SIZES = [1, 2, 15, 16, 40, 41, 300, 511, 512, 513, 2047, 2048, 5000]
needs_loops = pytest.mark.skipif(LOOPS is None, reason="installed without a compiler")


@pytest.fixture(params=["compiled", "python"])
def either_way(request, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "python":
        for module in MODULES:
            monkeypatch.setattr(module, "LOOPS", None)
    elif LOOPS is None:
        pytest.skip("installed without a compiler")


def random_case(seed: int) -> tuple[np.ndarray, SamplingParams, list[int]]:
    """A row with ties, zeros of both signs and infinities, and settings of every kind."""
    generator = np.random.default_rng(seed)
    size = int(generator.choice(SIZES))
    row = (generator.choice([0.5, 2.0, 6.0]) * generator.standard_normal(size)).astype(np.float32)
    if generator.random() < 0.4:  # ties, also across every cut
        row = np.round(row * generator.choice([0.2, 1.0, 4.0])).astype(np.float32)
    if generator.random() < 0.3:
        row[generator.random(size) < generator.choice([0.1, 0.999])] = -math.inf
        row[-1] = 1.0  # the bias below leaves it, too
    params = SamplingParams(
        temperature=float(generator.choice([0.0, 1e-40, 0.3, 0.8, 1.0, 2.5])),
        top_k=int(generator.choice([0, 1, 2, 7, 40, 64, 65, MOST_RANKED, MOST_RANKED + 1])),
        top_p=float(generator.choice([0.0, 0.4, 0.95, 1.0])),
        min_p=float(generator.choice([0.0, 0.05, 1.0])),
        repeat_penalty=float(generator.choice([1.0, 1.3])),
        frequency_penalty=float(generator.choice([0.0, 0.7])),
        presence_penalty=float(generator.choice([0.0, -0.4])),
        logit_bias={0: -math.inf, 3: 2.0} if size > 1 and generator.random() < 0.3 else {},
    )
    return row, params, generator.integers(size, size=int(generator.integers(9))).tolist()


def same_law(first: Law, other: Law) -> bool:
    if (first.ids is None) != (other.ids is None):
        return False
    same_ids = first.ids is None or np.array_equal(first.ids, other.ids)
    return same_ids and first.probs.tobytes() == other.probs.tobytes()


@pytest.mark.usefixtures("either_way")
def test_laws_are_bit_for_bit_those_of_a_plain_sort():
    told_apart = 0
    for seed in range(1500):
        row, params, window = random_case(seed)
        before = row.tobytes()
        made = transformed_law(row, params, window)
        assert same_law(made, plain_law(row, params, window)), seed
        assert row.tobytes() == before
        told_apart += not same_law(made, plain_law(row, params, window, higher_ids_first=True))
    assert told_apart > 100  # where ties fall the other way, this test sees it


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("size", [30, 3000, 70_000])
@pytest.mark.parametrize("top_k", [1, 20])
def test_rows_that_are_no_law_are_refused(size, top_k):
    params = SamplingParams(top_k=top_k)
    for broken in (math.nan, math.inf):
        # In both halves of what is compared in pairs, within blocks and behind them.
        for place in (0, min(65, size - 2), size // 2, size - 1):
            row = np.linspace(-1, 1, size).astype(np.float32)
            row[place] = broken
            with pytest.raises(DecodeFailedError, match="logits of"):
                transformed_law(row, params)
    with pytest.raises(DecodeFailedError, match="logits of -inf"):
        transformed_law(np.full(size, -math.inf, np.float32), params)
    with pytest.raises(OptionError, match="none of"):
        bias = dict.fromkeys(range(size), -math.inf)
        transformed_law(np.zeros(size, np.float32), params.replace(logit_bias=bias))


def random_law(generator: np.random.Generator) -> Law:
    """A law of 1 to 300 tokens, dense or on a support, some of mass zero."""
    size = int(generator.choice([1, 2, 7, 8, 9, 31, 128, 129, 300]))
    weights = generator.exponential(size=size) ** 3 * (generator.random(size) < 0.8)
    weights[int(generator.integers(size))] = 1.0
    ids = None if generator.random() < 0.3 else np.sort(generator.choice(900, size, replace=False))
    return Law(weights / np.add.reduce(weights), ids)


@needs_loops
def test_draws_and_residuals_are_pythons_own(monkeypatch: pytest.MonkeyPatch):
    def results() -> list[object]:
        generator, found = np.random.default_rng(5), []
        for position in range(600):
            target, draft = random_law(generator), random_law(generator)
            source = SeededNoise(position)
            source.seek(position)
            drafting = source.for_drafting(position)
            found += [source.choose(target), source.choose(draft), drafting.choose(target)]
            found += [target.token_at(uniform) for uniform in (0.0, 0.5, 1.0 - 2.0**-53)]
            found += drafting.choose_distinct(target, 6)
            found.append(draft.aligned_to(target).tobytes())
            rest = (target.residual(draft), target.without(target.most_likely[0]))
            found += [left.probs.tobytes() for left in rest]
            found.append(target.left_over(draft, 0.3).tobytes())
            found += [target.probability(token) for token in (0, 5, 899, 2000)]
        return found

    compiled = results()
    for module in MODULES:
        monkeypatch.setattr(module, "LOOPS", None)
    assert compiled == results()


@needs_loops
@pytest.mark.parametrize("size", [1, 7, 8, 9, 127, 128, 129, 136, 137, 300, 1000, 5000])
def test_sums_are_numpys(size):
    generator, told_apart = np.random.default_rng(size), 0
    for _ in range(50):
        weights = generator.exponential(size=size) ** 3
        total = float(np.add.reduce(weights))
        assert LOOPS.scale_to_one(weights.copy()) == total
        told_apart += float(weights.cumsum()[-1]) != total
    assert told_apart > 0 or size < 8  # added one by one they differ


@needs_loops
def test_arrays_of_another_kind_are_refused():
    row, ids, values = np.zeros(50, np.float32), np.zeros(5, np.intp), np.zeros(5)
    settings = (np.exp, 0.9, -1.0, 1.0)
    assert LOOPS.truncate(row, ids, values, *settings) == 5
    for wrong in (
        (row.astype(np.float64), ids, values),
        (np.zeros(100, np.float32)[::2], ids, values),
        (row.reshape(5, 10), ids, values),
        (row, ids.astype(np.int32), values),
        (row, ids, values[:4]),
        (row[:4], ids, values),
        (row, ids[:0], values[:0]),
        (row, ids, "values"),
    ):
        with pytest.raises((TypeError, ValueError, BufferError)):
            LOOPS.truncate(*wrong, *settings)
    with pytest.raises(TypeError, match="3 arguments where 7"):
        LOOPS.truncate(row, ids, values)
    with pytest.raises(TypeError):
        LOOPS.truncate(row, ids, values, lambda _: None, 0.9, -1.0, 1.0)
    read_only = values.copy()
    read_only.flags.writeable = False
    with pytest.raises((BufferError, ValueError)):
        LOOPS.scale_to_one(read_only)
    with pytest.raises(ValueError, match="differ in length"):
        LOOPS.left_over(values, ids, values, ids[:3], 1.0, values)


@pytest.mark.skipif(LOOPS is None, reason="nothing was compiled")
@pytest.mark.parametrize("scale", [0.1, 3.0, 40.0])
@pytest.mark.parametrize("size", [1, 5, 31, 32, 33, 100, 32_000])
def test_sums_of_exponentials_are_numpys_but_for_rounding(size: int, scale: float) -> None:
    """Also of rows with entries of no mass; they decide thresholds, so bits do not matter."""
    row = (scale * np.random.default_rng(size).normal(size=size)).astype(np.float32)
    if size > 5:
        row[3] = -np.inf
    highest = LOOPS.highest(row)
    mass, weighted = LOOPS.log_mass(row, highest)
    shifted = row.astype(np.float64) - float(row.max())
    powers = np.exp(shifted)
    shifted[powers == 0.0] = 0.0
    assert highest == row.max()
    assert mass == pytest.approx(powers.sum(), rel=3e-6)
    assert weighted == pytest.approx((shifted * powers).sum(), rel=1e-5, abs=1e-6)


@needs_loops
def test_rows_of_no_entries_and_of_another_kind() -> None:
    empty = np.empty(0, np.float32)
    assert LOOPS.highest(empty) == -math.inf
    assert LOOPS.log_mass(empty, 0.0) == (0.0, 0.0)
    assert LOOPS.rough_mass(empty) == (-math.inf, 0.0, 0.0)
    for call in (LOOPS.highest, LOOPS.rough_mass, lambda row: LOOPS.log_mass(row, 0.0)):
        with pytest.raises(TypeError, match="an array of kind 'd' where one of 'f' is needed"):
            call(np.empty(3))


def random_pair(generator: np.random.Generator) -> LawPair:
    """Rows of 900 tokens, the drafter's often shorter, and laws on supports that overlap."""
    rows = [generator.normal(size=900).astype(np.float32) for _ in range(2)]
    rows[1][generator.random(900) < 0.2] = -np.inf
    draft, target = random_law(generator), random_law(generator)
    if generator.random() < 0.3 and draft.ids is not None:
        target = Law(target.probs, np.arange(len(target.probs)) + draft.ids[0])
    raws = RawLaw(rows[0][: int(generator.integers(300, 901))]), RawLaw(rows[1])
    return LawPair(*raws, draft, target)


@needs_loops
def test_laws_of_pairs_are_pythons_own(monkeypatch: pytest.MonkeyPatch):
    rules = [
        *(
            build_rule(f"cascade-token-v{n}(alpha={alpha})")
            for n in (1, 2, 3)
            for alpha in (0, 0.9)
        ),
        *(build_rule(f"top-beta(beta={beta}, tau=1.5)") for beta in (1, 300)),
        *(build_rule(f"lossy(alpha=0.3, beta={beta})") for beta in ("solve", 1)),
        build_rule("cascade-opt(alpha=0.01)"),
        build_rule("bild(rollback=6)"),
    ]

    def results() -> list[object]:
        generator, found = np.random.default_rng(6), []
        for _ in range(200):
            pair = random_pair(generator)
            for rule in rules:
                law = rule.law(pair)
                where = None if law.ids is None else law.ids.tobytes()
                found += [law.probs.tobytes(), where, total_variation(pair.target, law)]
        return found

    compiled = results()
    # Of rows they stay: sums of exponentials round otherwise than numpy's.
    for module in (law, cascades):
        monkeypatch.setattr(module, "LOOPS", None)
    assert compiled == results()


@needs_loops
@pytest.mark.parametrize("scale", [0.01, 0.5, 2.0, 6.0, 40.0])
def test_rough_sums_hold_what_is_computed(scale: float) -> None:
    """Also of rows with entries of no mass; and they are narrow."""
    generator = np.random.default_rng(8)
    for size in [1, 2, 31, 32, 33, 700, 5000, *[32_000] * 3]:
        row = (scale * generator.normal(size=size)).astype(np.float32)
        row[1::7] = -np.inf
        for measure, between in ((largest, largest_between), (entropy, entropy_between)):
            low, high = between(RawLaw(row))
            exact = measure(RawLaw(row))
            assert low < exact < high
            assert high - low < 0.001 * (1.0 + 2.0 * exact)


@needs_loops
def test_pairs_of_another_kind_are_refused():
    probs, ids, room = np.ones(3) / 3, np.arange(3), np.empty(6)
    joint = np.empty(6, np.intp)
    with pytest.raises(ValueError, match="differ in length"):
        LOOPS.distance(probs, ids[:2], probs, ids)
    with pytest.raises(ValueError, match="no room"):
        LOOPS.join(probs, ids, probs, ids, room, room[:5], joint)
    with pytest.raises(ValueError, match="no room"):
        row = np.zeros(9, np.float32)
        LOOPS.interleave(row, 0.0, probs, ids, probs, ids, room, joint[:5])
    with pytest.raises(TypeError):
        LOOPS.join(probs, ids.astype(np.int32), probs, ids, room, room, joint)


GREEDY = SamplingParams(temperature=0.0)


def random_tree_of_points(generator: np.random.Generator, rows: list[np.ndarray]) -> DraftTree:
    """A tree whose children often are what the rows say, some of them drafted twice or hidden."""
    builder = TreeBuilder()
    for _ in range(len(rows) - 1):
        parents = [ROOT, *(place for place in range(len(builder)) if place not in builder._hidden)]
        parent = int(generator.choice(parents))
        likely = int(rows[parent + 1].argmax())
        token = likely if generator.random() < 0.6 else int(generator.integers(len(rows[0])))
        if generator.random() < 0.1:
            builder.add_hidden(parent, token)
        else:
            builder.add(parent, token)
    return builder.build()


def python_walk(tree: DraftTree, rows: list[np.ndarray], *, last_of_equals: bool) -> Acceptance:
    """The walk of rules, a law at a time; as a control, of equal logits the last one stands."""

    def law_at(node: int) -> Law:
        row = rows[node + 1]
        last = len(row) - 1 - int(row[::-1].argmax())
        return Law.point(last if last_of_equals else greedy_token(row, GREEDY))

    return walk(tree, law_at, SeededNoise(0), 5, decide)


def follow(laws: CertainLaws, tree: DraftTree) -> Acceptance | None:
    kept = laws.followed(tree, SeededNoise(0), 0, as_block=True)
    return kept if isinstance(kept, Acceptance) else None


@needs_loops
def test_the_walk_at_temperature_0_is_that_of_laws_one_by_one():
    depths, differing = set(), 0
    for seed in range(1500):
        generator = np.random.default_rng(seed)
        size = int(generator.choice([1, 2, 63, 64, 65, 300, 4096, 5000, 8300]))
        rows = [generator.standard_normal(size) for _ in range(int(generator.integers(1, 9)))]
        if seed % 2:  # ties, also of zeros of both signs
            rows = [np.round(row) * generator.choice([0.0, -1.0, 1.0]) for row in rows]
        rows = [row.astype(np.float32) for row in rows]
        if size > 1 and seed % 5 == 0:
            rows[0][generator.integers(size - 1)] = -math.inf
        tree = random_tree_of_points(generator, rows)
        kept = follow(CertainLaws(rows.__getitem__, GREEDY), tree)
        assert kept == python_walk(tree, rows, last_of_equals=False), seed
        depths.add(len(kept.path))
        differing += kept != python_walk(tree, rows, last_of_equals=True)
    assert depths >= {0, 1, 2, 3}
    assert differing > 100  # where ties fall the other way, this test sees it


@needs_loops
@pytest.mark.parametrize("rule", [ExactRule(), BlockRule()])
def test_rules_follow_the_walk_and_do_without(rule, monkeypatch):
    rows = [np.eye(9, dtype=np.float32)[token] for token in (4, 7, 2)]
    tree, noise = DraftTree.chain([4, 7]), SeededNoise(0)
    laws = CertainLaws(rows.__getitem__, GREEDY)
    kept = rule.accept(tree, laws, noise, 3)
    monkeypatch.setattr(rule_module, "LOOPS", None)
    assert follow(laws, tree) is None
    assert kept == rule.accept(tree, laws, noise, 3) == Acceptance((0, 1), 2, False)


@needs_loops
def test_what_the_walk_cannot_follow_is_left_to_the_rules():
    row = np.arange(5, dtype=np.float32)
    for broken in (math.nan, math.inf):
        rows = [row, row.copy()]
        rows[1][2] = broken
        laws = CertainLaws(rows.__getitem__, GREEDY)
        assert follow(laws, DraftTree.chain([4])) is None
        with pytest.raises(DecodeFailedError, match="logits of"):
            ExactRule().accept(DraftTree.chain([4]), laws, SeededNoise(0), 0)
        assert follow(laws, DraftTree.chain([3])) == Acceptance((), 4, True)
    certain_laws = CertainLaws([row, row].__getitem__, GREEDY)
    assert follow(certain_laws, DraftTree.chain([4], [Law(np.full(5, 0.2))])) is None
    other_kind = CertainLaws([row.astype(np.float64)].__getitem__, GREEDY)
    assert follow(other_kind, DraftTree()) is None
    assert other_kind(ROOT).most_likely == (4, 1.0)


def test_loops_that_were_compiled_before_a_change_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkout that was updated without being installed again decodes, with a warning."""
    names = [name for name in vars(compiled.Loops) if not name.startswith("_")]
    whole = SimpleNamespace(BATCH_BYTES=56, **dict.fromkeys(names, len))
    for found, problem in ((whole, False), (SimpleNamespace(truncate=len), True)):
        monkeypatch.setattr(compiled.importlib, "import_module", lambda _name, found=found: found)
        caplog.clear()
        assert (compiled._load() is None) == problem
        assert ("install specrun again" in caplog.text) == problem
    assert "digest" in caplog.text
