"""Invariant 1 end to end: on a real GGUF, the sampled texts follow the target's joint law.

The joint law of three tokens is computed exactly from the model's own logits (every prefix evaluated). The
hypothesis "texts are draws from it" is tested by a chi-square test over all texts with expected counts of at
least 5, the rest pooled. Seeds are fixed, so the test's outcome is too; for a correct sampler the chance of
having fixed seeds that fail is ALPHA. A wrong rule is rejected at the same sample size.
"""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from specrun.bindings.batch import Batch
from specrun.bindings.context import Context, ContextOptions
from specrun.bindings.model import Model
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.acceptance.exact import ExactRule
from specrun.runtime.acceptance.rule import Acceptance, LawAt
from specrun.runtime.drafters.expression import quoted
from specrun.runtime.noise import NoiseSource
from specrun.runtime.tree import DraftTree

VOCABULARY = 12
PROMPT = [3, 1, 4]
SAMPLES = 5000
ALPHA = 1e-4
PARAMS = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("law")
    # Random laws that differ clearly between target and drafter, at more than two nats of entropy.
    write_random_llama(folder / "target.gguf", RandomLlama(vocab_size=VOCABULARY, seed=1, scale=0.6))
    write_random_llama(folder / "drafter.gguf", RandomLlama(vocab_size=VOCABULARY, seed=2, scale=0.8))
    return folder / "target.gguf", folder / "drafter.gguf"


@pytest.fixture(scope="module")
def joint(pair: tuple[Path, Path]) -> np.ndarray:
    """The target's exact joint law of the three tokens after the prompt, [V, V, V]."""
    law = np.zeros((VOCABULARY,) * 3)
    with Model(pair[0]) as model, Context(model, ContextOptions(n_ctx=256, n_threads=1)) as context:
        batch = Batch(context.n_batch, 1)

        def next_law(tokens: list[int]) -> np.ndarray:
            context.memory.clear()
            batch.fill_chain(tokens, 0, [0], 1)
            logits = context.decode(batch).logits(0).astype(np.float64)
            probs = np.exp(logits - logits.max())
            return probs / probs.sum()

        first = next_law(PROMPT)
        entropies = [stats.entropy(first)]
        for a in range(VOCABULARY):
            second = next_law([*PROMPT, a])
            entropies.append(stats.entropy(second))
            for b in range(VOCABULARY):
                third = next_law([*PROMPT, a, b])
                entropies.append(stats.entropy(third))
                law[a, b] = first[a] * second[b] * third
    assert min(entropies) >= 2.0  # flat enough that a bias has room to show
    return law


def sample(runtime: Runtime) -> Counter[tuple[int, ...]]:
    return Counter(
        tuple(runtime.generate(PROMPT, PARAMS.replace(seed=seed), max_tokens=3).token_ids) for seed in range(SAMPLES)
    )


def p_value(counts: Counter[tuple[int, ...]], joint: np.ndarray, end: frozenset[int]) -> float:
    """The chi-square test's p-value; texts that end early count as one text each."""
    expected: dict[tuple[int, ...], float] = {}
    for text in itertools.product(range(VOCABULARY), repeat=3):
        stop = next((i + 1 for i, token in enumerate(text) if token in end), 3)
        expected[text[:stop]] = expected.get(text[:stop], 0.0) + SAMPLES * float(joint[text])
    big = [text for text, count in expected.items() if count >= 5]
    observed = [counts[text] for text in big]
    wanted = [expected[text] for text in big]
    observed.append(SAMPLES - sum(observed))
    wanted.append(SAMPLES - sum(wanted))
    return float(stats.chisquare(observed, wanted).pvalue)


@pytest.mark.parametrize(
    "drafter", ["none", "draft(FILE, n=1)", "draft(FILE, n=3)", "draft(FILE, n=3, sampling=argmax)"]
)
def test_texts_follow_the_targets_joint_law(pair: tuple[Path, Path], joint: np.ndarray, drafter: str) -> None:
    expression = drafter.replace("FILE", quoted(str(pair[1])))
    with Runtime(pair[0], drafter=expression, n_ctx=256, n_threads=1) as runtime:
        assert p_value(sample(runtime), joint, runtime.vocabulary.end_of_generation) > ALPHA


class KeepsTooMuch(ExactRule):
    """Accepts with min(1, 1.5 p/q): the kind of slip that reads well."""

    def accept(self, tree: DraftTree, law_at: LawAt, noise: NoiseSource, position: int) -> Acceptance:
        return super().accept(tree, law_at, _Eager(noise), position)


class _Eager:
    def __init__(self, noise: NoiseSource) -> None:
        self.seek, self.choose, self.for_drafting = noise.seek, noise.choose, noise.for_drafting
        self._accept = noise.accept

    def accept(self, probability: float) -> bool:
        return self._accept(1.5 * probability)


def test_a_biased_rule_is_rejected_at_the_same_sample_size(pair: tuple[Path, Path], joint: np.ndarray) -> None:
    with Runtime(pair[0], drafter=f"draft({quoted(str(pair[1]))}, n=3)", n_ctx=256, n_threads=1) as runtime:
        runtime.session.rule = KeepsTooMuch()
        assert p_value(sample(runtime), joint, runtime.vocabulary.end_of_generation) < 1e-6
