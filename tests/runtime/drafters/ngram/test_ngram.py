"""N-gram laws: Witten-Bell smoothing by hand, counts that grow and shrink, and exact drafts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from support.enumeration import TOLERANCE, chain, drafter_bias
from support.scripted import LawTable, ScriptedDrafter, TableDraftModel
from support.tiny_models import F32

from specrun.bindings.errors import FileMissingError
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.acceptance import BlockRule, ExactRule
from specrun.runtime.drafters.combinators import CascadeDrafter, EnsembleDrafter, RelayDrafter
from specrun.runtime.drafters.growing import GrowingDrafter
from specrun.runtime.drafters.lookahead import NgramPool, save_pool
from specrun.runtime.drafters.ngram import (
    GrowingCounts,
    NgramLaw,
    NgramSource,
    TextCounts,
    row_of,
)
from specrun.runtime.language import quoted
from specrun.runtime.laws import Law, SeededNoise
from specrun.runtime.round import Drafter, DraftRequest
from specrun.runtime.trees import DraftTree, Topology

WHOLE = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


def counted(texts: Sequence[Sequence[int]], context: Sequence[int]) -> Counter[int]:
    """What followed a context, counted by looking at every place."""
    n, found = len(context), Counter[int]()
    for text in texts:
        for place in range(n, len(text)):
            if list(text[place - n : place]) == list(context):
                found[text[place]] += 1
    return found


def by_hand(
    sources: Sequence[tuple[Sequence[Sequence[int]], int]], tokens: Sequence[int]
) -> dict[int, Fraction]:
    """Witten and Bell's law in fractions, straight from the formula."""
    law: dict[int, Fraction] = {}
    for texts, order in sources:
        for length in range(min(order, len(tokens) + 1)):
            found = counted(texts, tokens[len(tokens) - length :])
            if not found:
                break
            total, different = sum(found.values()), len(found)
            if not law:
                law = {token: Fraction(count, total) for token, count in found.items()}
                continue
            law = {
                token: (found[token] + different * law.get(token, Fraction(0)))
                / (total + different)
                for token in {*law, *found}
            }
    return law


def assert_law(law: Law | None, wanted: dict[int, Fraction]) -> None:
    if not wanted:
        assert law is None
        return
    assert law is not None
    assert law.ids is not None
    assert law.ids.tolist() == sorted(wanted)
    np.testing.assert_allclose(law.probs, [float(wanted[t]) for t in sorted(wanted)], atol=1e-14)
    assert law.probs.sum() == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("order", [1, 2, 3, 5])
@pytest.mark.parametrize("with_file", [False, True])
def test_the_law_is_witten_and_bells(order: int, with_file: bool) -> None:
    rng = random.Random(order)
    for _ in range(30):
        text = [rng.randrange(6) for _ in range(rng.randrange(12))]
        files = [[rng.randrange(9) for _ in range(rng.randrange(15))] for _ in range(3)]
        growing = GrowingCounts(order)
        growing.extend(text)
        sources = [TextCounts(files, order, 9)] if with_file else []
        law = NgramLaw([*sources, growing])
        named = [(files, order)] * with_file + [([text], order)]
        for length in range(5):
            tokens = [rng.randrange(6) for _ in range(length)]
            assert_law(law.after(tokens), by_hand(named, tokens))


def test_other_smoothings_are_told_apart() -> None:
    """The control: add-one and no smoothing at all are not this law."""
    text = [0, 1, 0, 2, 0, 1, 1]
    growing = GrowingCounts(2)
    growing.extend(text)
    law = NgramLaw([growing]).after([0])
    assert law is not None
    found = counted([text], [0])
    relative = np.array([found[token] / 3 for token in range(3)])
    add_one = np.array([(found[token] + 1) / 6 for token in range(3)])
    assert np.abs(law.probs - relative).max() > 0.05
    assert np.abs(law.probs - add_one).max() > 0.02


def test_counts_of_texts_are_those_of_every_place() -> None:
    rng = random.Random(3)
    texts = [[rng.randrange(5) for _ in range(rng.randrange(30))] for _ in range(6)]
    counts = TextCounts(texts, 4, 5)
    for _ in range(300):
        context = [rng.randrange(5) for _ in range(rng.randrange(4))]
        ids, times = counts.followers(context)
        assert dict(zip(ids.tolist(), times.tolist(), strict=True)) == counted(texts, context)
        assert ids.tolist() == sorted(ids.tolist())
    grams = {tuple(t[i : i + n]) for t in texts for n in range(1, 5) for i in range(len(t) - n + 1)}
    assert len(counts) == len(grams)
    # Large vocabularies: entries are numbered, so that keys stay within 64 bits at any order.
    large = TextCounts([[2**17 - 1] * 6], 5, 2**17)
    assert large.followers([2**17 - 1] * 4)[1].tolist() == [2.0]


def test_counts_that_grew_and_were_cut_are_those_of_the_text() -> None:
    rng = random.Random(4)
    counts, text = GrowingCounts(3), list[int]()
    for _ in range(200):
        choice = rng.random()
        if choice < 0.3:
            text = text[: rng.randrange(len(text) + 1)]
            counts.cut(len(text))
        elif choice < 0.4:
            text = [*text[: rng.randrange(len(text) + 1)], *(rng.randrange(4) for _ in range(3))]
            counts.begin(text)
        else:
            new = [rng.randrange(4) for _ in range(rng.randrange(4))]
            counts.extend(new)
            text += new
        if rng.random() < 0.5:
            counts.followers([])  # from here on the array of all tokens is kept up to date
        fresh = GrowingCounts(3)
        fresh.extend(text)
        assert counts.tokens == text
        assert counts._followers == fresh._followers
        for context in ([], [1], [2, 1]):
            for grown, anew in zip(
                counts.followers(context), fresh.followers(context), strict=True
            ):
                np.testing.assert_array_equal(grown, anew)


# -- drafts ----------------------------------------------------------------------------------------


def ngram(
    order: int = 2, num_draft_tokens: int = 5, p_min: float = 0.0, kind: type = GrowingDrafter
) -> Callable[[], Drafter]:
    file, shape = TextCounts([[0, 1, 2, 0, 1, 1, 2]], order, 3), Topology.chain(num_draft_tokens)
    return lambda: kind(NgramSource(order, [file]), shape, sampling="with", p_min=p_min)


@pytest.mark.parametrize("rule", [ExactRule(), BlockRule()], ids=["token", "block"])
@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("seed", range(2))
def test_drawn_chains_give_the_targets_law(
    rule: ExactRule | BlockRule, order: int, seed: int
) -> None:
    table = LawTable(3, seed)
    for options in ({"num_draft_tokens": 2}, {"num_draft_tokens": 2, "p_min": 0.5}):
        assert drafter_bias(rule, ngram(order, **options), table) < TOLERANCE


@pytest.mark.parametrize("seed", range(2))
def test_members_of_combinators_give_the_targets_law(seed: int) -> None:
    table, other = LawTable(3, seed), LawTable(3, seed + 100)

    def scripted() -> Drafter:
        return ScriptedDrafter(chain(other, 1), 2)

    made: dict[str, Callable[[], Drafter]] = {
        "relay": lambda: RelayDrafter([scripted(), ngram()()], [1, 2]),
        "relay first": lambda: RelayDrafter([ngram()(), scripted()], [1, 2]),
        "ensemble": lambda: EnsembleDrafter([ngram(num_draft_tokens=1)(), scripted()]),
        "cascade": lambda: CascadeDrafter(
            TableDraftModel(other),  # type: ignore[arg-type]
            ngram(num_draft_tokens=2)(),
            num_draft_tokens=2,
        ),
    }
    for name, make in made.items():
        assert drafter_bias(ExactRule(), make, table) < TOLERANCE, name


class _StatesTheNextLaw(GrowingDrafter):
    """Wrong: counts a drawn token before it says what law it was drawn from."""

    def propose(self, request: DraftRequest) -> DraftTree:
        tree = super().propose(request)
        laws, tokens, counts = [], list(request.tokens), self.source
        assert isinstance(counts, NgramSource)
        for token in tree.tokens:
            counts._text.extend([token])
            tokens.append(token)
            law = counts._law.after(tokens[1 - counts._order : -1] if counts._order > 1 else [])
            assert law is not None
            laws.append(law)
        counts._text.cut(len(request.tokens))
        return DraftTree.chain(tree.tokens, laws)


def test_a_law_that_has_seen_its_draw_is_caught() -> None:
    errors = [
        drafter_bias(ExactRule(), ngram(2, 2, kind=_StatesTheNextLaw), LawTable(3, s))
        for s in range(3)
    ]
    assert max(errors) > 1e-3


@pytest.mark.parametrize(
    "params", [WHOLE, WHOLE.replace(temperature=0.5, top_k=3), SamplingParams(top_p=0.7)]
)
def test_laws_are_cut_and_tempered_as_the_targets_are(params: SamplingParams) -> None:
    """By hand: cut first, then p^(1/T)."""
    law = Law(np.array([0.4, 0.1, 0.3, 0.2]), np.array([3, 7, 9, 70]))
    found = row_of(law).laws(params)[0]
    by_rank = np.argsort(-law.probs)
    kept = by_rank[: params.top_k or 4]
    if params.top_p < 1:
        kept = by_rank[:2]  # 0.4 + 0.3 reaches 0.7
    probs = np.zeros(4)
    probs[kept] = law.probs[kept] ** (1 / params.temperature)
    probs /= probs.sum()
    assert law.ids is not None
    for token, prob in zip(law.ids.tolist(), probs, strict=True):
        assert found.probability(token) == pytest.approx(prob, abs=1e-6)


# -- with a model ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sources(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("ngram")
    text = folder / "notes.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. the quick dog.\n" * 3)
    pool, path = NgramPool(4), folder / "pool.ngrams"
    pool.add([104, 105, 106, 107])
    with Runtime(tiny_model, "none", **F32) as runtime:
        save_pool(pool, path, runtime.session.target.context.model.vocabulary)
    return {"TEXT": quoted(str(text)), "POOL": quoted(str(path))}


def test_drafts_are_what_was_counted(tiny_model: Path, sources: dict[str, str]) -> None:
    params = SamplingParams(temperature=0.0)
    for drafter, prompt, said in (
        ("ngram(order=3, n=4, sampling=argmax)", b"abcdabcdabcdab", b"cdab"),
        (f"ngram(order=4, n=2, sampling=argmax, pool={sources['POOL']})", b"xxhi", b"jk"),
    ):
        with Runtime(tiny_model, drafter=drafter, **F32) as runtime:
            made = runtime.session.drafter
            made.begin(list(prompt))
            request = DraftRequest(list(prompt), params, SeededNoise(0), 8, 8)
            assert bytes(made.propose(request).tokens) == said


def test_a_file_that_is_not_there_is_named(tiny_model: Path, tmp_path: Path) -> None:
    missing = tmp_path / "missing.txt"
    with pytest.raises(FileMissingError, match=r"missing\.txt"):
        Runtime(tiny_model, drafter=f"ngram(file={quoted(str(missing))})", **F32)
