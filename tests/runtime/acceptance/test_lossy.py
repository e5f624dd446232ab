"""Lossy speculative sampling: lemma 2's law, by every beta, in the shipped loop."""

from __future__ import annotations

import numpy as np
import pytest
from support.enumeration import TOLERANCE, chain, enumerate_law
from support.law_pairs import Pi, dense, pair_error, transformed
from support.scripted import PLAIN, LawTable

from specrun.bench.prove.rules import BranchingNoise
from specrun.bindings.errors import OptionError
from specrun.runtime.acceptance import LawPair, LossyRule, build_rule, total_variation
from specrun.runtime.acceptance.cascades import Beta, solved_share
from specrun.runtime.laws import Law

SETTINGS = {
    "open": PLAIN,
    "cold": PLAIN.replace(temperature=0.5),
    "narrow": PLAIN.replace(top_p=0.6),
    "greedy": PLAIN.replace(temperature=0.0),
}
BETAS: list[tuple[float, Beta]] = [(0.3, 1.0), (0.3, 0.7), (0.6, 2.5), (0.4, "solve")]


def pair(q: np.ndarray, p: np.ndarray) -> LawPair:
    return LawPair(Law(q), Law(p), Law(q), Law(p))


def by_procedure(alpha: float, beta: float) -> Pi:
    """The law of one token as the procedure says it: tested, and replaced where it is rejected."""

    def pi(q: np.ndarray, p: np.ndarray, sq: np.ndarray, sp: np.ndarray) -> np.ndarray:
        left = np.maximum(0.0, sp / beta - sq)
        instead = left / left.sum() if left.sum() > 0 else sp

        def program(noise: BranchingNoise) -> int:
            token = noise.choose(Law(sq))
            if noise.accept(sp[token] / ((1 - alpha) * sq[token])):
                return token
            return noise.choose(Law(instead))

        found = enumerate_law(program)  # type: ignore[arg-type]
        return np.array([found.get(token, 0.0) for token in range(len(sq))])

    return pi


def lemma_2(alpha: float) -> Pi:
    """max(min(q, p / (1 - alpha)), p / beta), beta by bisection."""

    def pi(q: np.ndarray, p: np.ndarray, sq: np.ndarray, sp: np.ndarray) -> np.ndarray:
        kept = np.minimum(sq, sp / (1 - alpha))
        low, high = 0.0, 1.0 / (1 - alpha)  # of 1 / beta
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (low, middle) if np.maximum(kept, sp * middle).sum() > 1 else (middle, high)
        return np.maximum(kept, sp * low)

    return pi


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(("alpha", "beta"), BETAS)
def test_the_loop_emits_what_the_procedure_says(alpha: float, beta: Beta, settings: str) -> None:
    """Also lemma 2: with the solved beta it is the maximum of what is kept and p / beta."""
    pi = lemma_2(alpha) if beta == "solve" else by_procedure(alpha, beta)
    for seed in range(4):
        tables = LawTable(3, seed + 40), LawTable(3, seed)
        error = pair_error(
            LossyRule(alpha, beta), pi, lambda drafts: chain(drafts, 2), *tables, SETTINGS[settings]
        )
        assert error < TOLERANCE


def test_another_beta_is_another_law() -> None:
    """Else the test above could not tell them apart."""
    tables = LawTable(3, 40), LawTable(3, 0)
    wrong = pair_error(LossyRule(0.3, 1.0), lemma_2(0.3), lambda d: chain(d, 2), *tables)
    assert wrong > 1e-3


@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.5, 0.9])
def test_lemma_2_holds_for_random_laws(alpha: float) -> None:
    """The solved beta is the smallest that makes a law of the maximum, and at least 1 - alpha."""
    for seed in range(200):
        source = np.random.default_rng(seed)
        q, p = source.dirichlet(np.full(6, 0.5), size=2)
        kept = np.minimum(q, p / (1 - alpha))
        share = solved_share(kept, p)
        assert 1.0 / share >= 1 - alpha - 1e-9
        assert np.maximum(kept, p * share).sum() == pytest.approx(1.0, abs=1e-12)
        # A smaller beta makes more than a law.
        assert np.maximum(kept, p * share * 1.01).sum() > 1.0
        law = LossyRule(alpha, "solve").law(pair(q, p))
        assert law.probs == pytest.approx(lemma_2(alpha)(q, p, q, p), abs=1e-12)


def test_where_nothing_is_rejected_the_law_is_the_drafters() -> None:
    q, p = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.4, 0.2])
    for beta in (0.7, 1.0, "solve"):
        laws = pair(q, p)
        assert LossyRule(0.3, beta).law(laws) is laws.draft  # type: ignore[arg-type]
    assert LossyRule(0.1, "solve").law(pair(q, p)).probs != pytest.approx(q)


def test_a_rejection_that_leaves_nothing_draws_from_the_target() -> None:
    """beta 3: p / 3 is below q everywhere, and token 0 is rejected now and then."""
    q, p = np.array([0.6, 0.4]), np.array([0.3, 0.7])
    law = LossyRule(0.1, 3.0).law(pair(q, p)).probs
    kept = 0.3 / 0.9
    assert law == pytest.approx([kept + (0.6 - kept) * 0.3, 0.4 + (0.6 - kept) * 0.7])
    assert law == pytest.approx(by_procedure(0.1, 3.0)(q, p, q, p), abs=1e-12)


@pytest.mark.parametrize("beta", [1.0, "solve"])
def test_alpha_0_is_exact_and_so_is_temperature_0(beta: Beta) -> None:
    far = 0.0
    for seed in range(50):
        q, p = np.random.default_rng(seed).dirichlet(np.ones(5), size=2)
        target = Law(p)
        assert total_variation(target, LossyRule(0.0, beta).law(pair(q, p))) < 1e-12
        greedy = pair(*(transformed(law, SETTINGS["greedy"]) for law in (q, p)))
        assert dense(LossyRule(0.9, beta).law(greedy), 5).tolist() == greedy.target.probs.tolist()
        far = max(far, total_variation(target, LossyRule(0.5, beta).law(pair(q, p))))
    assert far > 0.05


def test_alpha_0_with_a_larger_beta_is_not_exact() -> None:
    q, p = np.array([0.6, 0.3, 0.1]), np.array([0.2, 0.35, 0.45])
    assert total_variation(Law(p), LossyRule(0.0, 2.0).law(pair(q, p))) > 0.01


def test_the_rule_is_built_by_name() -> None:
    assert build_rule("lossy").name == "lossy(alpha=0.1, beta=1)"
    assert build_rule("lossy(alpha=.9, beta=.1)").name == "lossy(alpha=0.9, beta=0.1)"
    assert build_rule("lossy(beta=solve)").name == "lossy(alpha=0.1, beta=solve)"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("lossy(alpha=1)", "lossy: alpha is 1: give 0 or more, less than 1"),
        ("lossy(alpha=nan)", "alpha is nan"),
        ("lossy(alpha=.2, beta=.7)", "beta is 0.7: give 1 - alpha = 0.8 or more, or solve"),
        ("lossy(beta=inf)", "beta is inf"),
        ("lossy(beta=solved)", "'solved', which is not a number"),
    ],
)
def test_values_that_make_no_sense_are_refused(text: str, problem: str) -> None:
    with pytest.raises(OptionError, match=problem):
        build_rule(text)
