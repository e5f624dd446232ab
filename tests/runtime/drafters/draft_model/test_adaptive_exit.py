"""Draft & Verify's adaptive stop: exact by enumeration, its rule by hand, and in a real drafter."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.enumeration import PROMPT, TOLERANCE, target_law
from support.scripted import PLAIN, LawTable, TableTarget, conversation_of, law_of
from support.tree_laws import drawn_chain

from specrun.bench.prove.rules import BranchingNoise, enumerate_law
from specrun.bindings.errors import OptionError
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.acceptance import ExactRule
from specrun.runtime.language import quoted
from specrun.runtime.planning import AdaptiveExit, AdaptiveExitOptions
from specrun.runtime.round import Drafter, DraftRequest
from specrun.runtime.round.drafter import RoundOutcome
from specrun.runtime.round.loop import DecodeSettings, RoundLimits, decode_rounds
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
    table, drafts, length = LawTable(3, seed), LawTable(3, seed + 500), 4
    seen: set[float] = set()

    def program(noise: BranchingNoise) -> tuple[int, ...]:
        drafter = ChainDrafter(drafts, 2, drops_unlikely_draws=wrong)
        conversation = conversation_of(drafter, PROMPT, noise)
        limits = RoundLimits(n_ctx=64, max_nodes=32, max_tokens=length)
        for _ in decode_rounds(
            TableTarget(table), conversation, DecodeSettings(ExactRule(), PLAIN, limits)
        ):
            pass
        seen.update(round(threshold, 6) for threshold in drafter.thresholds)
        return tuple(conversation.tokens[len(PROMPT) :])

    emitted, wanted = enumerate_law(program), target_law(table, length, frozenset())
    return max(
        abs(emitted.get(text, 0.0) - wanted.get(text, 0.0)) for text in {*emitted, *wanted}
    ), seen


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


def test_texts_stay_and_come_again_with_a_real_drafter(
    tiny_model: Path, tiny_flat_twin: Path
) -> None:
    greedy, drawn = SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, seed=3)
    options = {"n_ctx": 256, "n_threads": 1}
    expression = f"draft({quoted(str(tiny_flat_twin))}, n=6, p_min=adaptive(start=0.4, step=0.5))"
    with (
        Runtime(tiny_model, "none", **options) as plain,
        Runtime(tiny_model, drafter=expression, **options) as speculative,
    ):
        wanted = plain.generate("abc", greedy, max_tokens=40)
        found = speculative.generate("abc", greedy, max_tokens=40)
        assert found.token_ids == wanted.token_ids
        assert 0 < found.stats.drafted < 6 * found.stats.rounds
        first, again = (speculative.generate("abc", drawn, max_tokens=40) for _ in range(2))
        assert first.token_ids == again.token_ids
        assert (first.stats.drafted, first.stats.rounds) == (
            again.stats.drafted,
            again.stats.rounds,
        )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("p_min=adaptive(start=2)", "start is 2.0: it must be between 0 and 1"),
        ("p_min=adaptive(beta=1)", "beta"),
        ("p_min=adaptiv", "not a number"),
        ("p_min=adaptive, tree=2x2", "ends chains, not trees"),
    ],
)
def test_bad_options_are_named(
    tiny_model: Path, tiny_drafter: Path, options: str, words: str
) -> None:
    with pytest.raises(OptionError, match=words):
        Runtime(tiny_model, drafter=f"draft({quoted(str(tiny_drafter))}, {options})", n_ctx=64)
