"""Draft & Verify's adaptive stop: exact by enumeration, its rule by hand, and in a real drafter."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.enumeration import TOLERANCE, drafter_bias
from support.scripted import LawTable, law_of
from support.tree_laws import drawn_chain

from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.acceptance import ExactRule
from specrun.runtime.language import quoted
from specrun.runtime.planning import AdaptiveExit, AdaptiveExitOptions
from specrun.runtime.round import Drafter, DraftRequest
from specrun.runtime.round.drafter import RoundOutcome
from specrun.runtime.trees import DraftTree

# A large step, so that a few rounds move the threshold across the probabilities of the laws.
FAST = AdaptiveExitOptions(start=0.5, acceptance=0.6, step=1.0, beta1=0.2, beta2=0.6)


class ChainDrafter(Drafter):
    """The shipped chain and the shipped stop over a table of laws."""

    name = "chain"

    def __init__(self, table: LawTable, length: int, *, drops_unlikely_draws: bool = False) -> None:
        self._table, self._length, self._wrong = table, length, drops_unlikely_draws
        self.exit = AdaptiveExit(FAST)
        self.thresholds: list[float] = []

    def propose(self, request: DraftRequest) -> DraftTree:
        threshold = self.exit.threshold(greedy=False)
        self.thresholds.append(threshold)
        self.exit.start(points=True, greedy=False)
        tree = drawn_chain(
            lambda drafted: law_of(self._table([*request.tokens, *drafted])),
            request,
            min(self._length, request.max_depth),
            None if self._wrong else self.exit,
        )
        if not self._wrong:
            return tree
        # The mistake: the drawn token's own probability decides whether it is kept.
        kept: list[int] = []
        for node, token in enumerate(tree.tokens):
            if self._table([*request.tokens, *kept])[token] < threshold:
                break
            kept.append(node)
        laws = [law_of(self._table([*request.tokens, *tree.tokens[:node]])) for node in kept]
        return DraftTree.chain([tree.tokens[node] for node in kept], laws)

    def observe(self, outcome: RoundOutcome) -> None:
        self.exit.learn(len(outcome.tree), len(outcome.path), most=self._length)


def largest_error(seed: int, *, wrong: bool) -> tuple[float, set[float]]:
    made: list[ChainDrafter] = []

    def make() -> Drafter:
        made.append(ChainDrafter(LawTable(3, seed + 500), 2, drops_unlikely_draws=wrong))
        return made[-1]

    error = drafter_bias(ExactRule(), make, LawTable(3, seed), 4)
    return error, {round(threshold, 6) for each in made for threshold in each.thresholds}


@pytest.mark.parametrize("seed", range(4))
def test_a_stop_that_reads_the_law_before_the_draw_is_exact(seed: int) -> None:
    error, thresholds = largest_error(seed, wrong=False)
    assert error < TOLERANCE
    assert len(thresholds) > 2  # it did adapt


def test_a_stop_that_drops_a_token_by_its_own_probability_is_biased() -> None:
    assert any(largest_error(seed, wrong=True)[0] > 0.01 for seed in range(4))


def test_the_rule_is_the_papers() -> None:
    stop = AdaptiveExit(AdaptiveExitOptions(start=0.6))
    assert stop.threshold(greedy=True) == 0.6
    stop.learn(4, 4, most=8)  # AR = 0.5 * 0 + 0.5 * 1 < 0.9: up by a tenth of 0.01
    assert stop.threshold(greedy=True) == pytest.approx(0.601)
    for _ in range(3):  # AR = 0.75, 0.875 and 0.9375
        stop.learn(4, 4, most=8)
    assert stop.threshold(greedy=True) == pytest.approx(0.602)
    stop.learn(8, 8, most=8)  # good, but longer drafts are not to be had
    assert stop.threshold(greedy=True) == pytest.approx(0.602)
    stop.learn(0, 0, most=8)
    assert stop.threshold(greedy=True) == pytest.approx(0.602)
    stop.begin()
    assert (stop.threshold(greedy=True)) == 0.6
    assert AdaptiveExit().threshold(greedy=True) == 0.8
    assert AdaptiveExit().threshold(greedy=False) == 0.5


def test_the_threshold_stays_a_probability() -> None:
    stop = AdaptiveExit(AdaptiveExitOptions(start=0.99, step=1.0, beta2=0.0))
    stop.threshold(greedy=True)
    for _ in range(3):
        stop.learn(2, 0, most=2)
    assert stop.threshold(greedy=True) == 1.0


def test_texts_come_again_with_a_real_drafter(tiny_model: Path, tiny_flat_twin: Path) -> None:
    drawn = SamplingParams(temperature=0.8, seed=3)
    expression = f"draft({quoted(str(tiny_flat_twin))}, n=6, p_min=adaptive(start=0.4, step=0.5))"
    with Runtime(tiny_model, drafter=expression, n_ctx=256, n_threads=1) as runtime:
        first, again = (runtime.generate("abc", drawn, max_tokens=40) for _ in range(2))
    assert 0 < first.stats.drafted < 6 * first.stats.rounds
    assert first.token_ids == again.token_ids
    assert (first.stats.drafted, first.stats.rounds) == (again.stats.drafted, again.stats.rounds)
