"""Alpha, the mean of sum min(p, q): by its definition, and along texts for n-gram laws."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from support.scripted import LawTable, law_of

from specrun.runtime.drafters.ngram import GrowingCounts, NgramLaw
from specrun.runtime.laws import Law, SamplingParams
from specrun.runtime.planning import CostCurve, MemoryTraffic, RoundCosts
from specrun.runtime.tuning import CalibrationText, RankedPair, acceptance_by_rank
from specrun.runtime.tuning.acceptance import PairCosts, mean_alpha, ngram_alpha, shared_mass

WHOLE = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
TEXTS = [CalibrationText((0, 1, 2, 0, 1, 1, 2, 0), 3), CalibrationText((2, 2, 1, 2, 2), 2)]


def laws(seed: int) -> list[tuple[Law, Law]]:
    table, drafts = LawTable(5, seed), LawTable(5, seed + 50)
    contexts = [*itertools.product(range(3), repeat=2)]
    return [(law_of(table(context)), law_of(drafts(context))) for context in contexts]


def dense(law: Law) -> np.ndarray:
    return law.aligned_to(Law(np.ones(5)))


@pytest.mark.parametrize("seed", range(3))
def test_alpha_is_what_the_exact_rule_accepts_of_one_draw(seed: int) -> None:
    """The chance of every draw times min(1, p/q), summed; and 1 - TV."""
    pairs = laws(seed)
    for target, draft in pairs:
        accepted = sum(
            q * min(1.0, target.probability(int(x)) / q)
            for x, q in zip(draft.ids, draft.probs, strict=True)
            if q > 0
        )
        assert shared_mass(target, draft) == pytest.approx(accepted, abs=1e-12)
        distance = 0.5 * np.abs(dense(target) - dense(draft)).sum()
        assert shared_mass(target, draft) == pytest.approx(1 - distance, abs=1e-12)
    mean = np.mean([shared_mass(*pair) for pair in pairs])
    assert mean_alpha(pairs) == pytest.approx(mean, abs=1e-12)
    ranked = [RankedPair(target, draft, draft) for target, draft in pairs]
    drawn, points = (acceptance_by_rank(ranked, kind, 2)[0] for kind in ("with", "argmax"))
    assert mean_alpha(pairs) == pytest.approx(drawn, abs=1e-12)
    assert abs(mean_alpha(pairs) - points) > 0.01  # what a favourite is accepted with is not alpha


def test_no_positions_have_no_alpha() -> None:
    assert mean_alpha([]) == 0.0


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("params", [WHOLE, SamplingParams(temperature=0.0)])
def test_an_ngram_laws_alpha_is_that_of_the_text_so_far(order: int, params: SamplingParams) -> None:
    """Each token is judged by counts of what is before it, and then counted itself."""
    table = LawTable(5, 7)
    targets, wanted = [], []
    for text in TEXTS:
        for end in range(text.n_prompt, len(text.tokens)):
            target = law_of(table(text.tokens[:end]))
            if params.is_greedy:
                target = Law.point(target.most_likely[0])
            targets.append(target)
            counts = GrowingCounts(order)
            counts.extend(text.tokens[:end])
            draft = NgramLaw([counts]).after(text.tokens[:end][end - order + 1 :])
            assert draft is not None
            if params.is_greedy:
                draft = Law.point(draft.most_likely[0])
            wanted.append(np.minimum(dense(target), dense(draft)).sum())
    alpha, seconds = ngram_alpha(TEXTS, targets, order, params)
    assert alpha == pytest.approx(np.mean(wanted), abs=1e-6)  # laws are cut in float32
    assert seconds > 0.0


def test_rows_say_what_follows_of_alpha() -> None:
    table = LawTable(5, 7)
    laws = [
        law_of(table(text.tokens[:end]))
        for text in TEXTS
        for end in range(text.n_prompt, len(text.tokens))
    ]
    costs = RoundCosts(CostCurve.flat([1.0] * 20), CostCurve.flat([0.1]))
    pair = PairCosts(costs, MemoryTraffic(1000.0, 2.0), 6.5)
    draft = pair.row("draft(a)", 1.0, 0.1, MemoryTraffic(100.0, 1.0))
    ngram, other = pair.ngram_rows(TEXTS, laws, WHOLE)
    assert [ngram.drafter, other.drafter] == ["ngram(order=2)", "ngram(order=3)"]
    assert draft.alpha == 1.0
    assert draft.theory.cost_ratio == pytest.approx(0.1)
    assert draft.operation_ratio == 0.1
    assert draft.theory.length == 16
    n, context = 16, 6.5
    read = (1000 + 2 * context + n * (100 + context)) / (n + 1) / (1000 + 2 * context)
    assert draft.bytes == pytest.approx(read)
    assert 0.0 < ngram.alpha < 1.0
    assert ngram.operation_ratio == 0.0
