"""The target's exact law of whole texts, a chi-square test against it, and a rule that fails.

Hypothesis: the texts are independent draws from the product of the target's conditional laws. Test:
Pearson's chi-square of the tokens at each place, of each two neighbours and of whole texts, the
rarest pooled, with Bonferroni's correction; its size is what `sampled_texts` is asked for. Whole
texts alone need twice as many samples: most of them are rare. A correct sampler had a chance of
ALPHA to be given seeds that fail; they are fixed, and so the outcome is. Negative control: the
texts of `KeepsTooMuch`, as many, have a p-value below REJECTED.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy import stats

from specrun.bindings.contexts.batch import Batch
from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.models.model import Model
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.acceptance import Acceptance, ExactRule, LawAt
from specrun.runtime.laws import Law, NoiseSource
from specrun.runtime.trees import DraftTree
from support.plain_laws import plain_law

ALPHA = 1e-4
REJECTED = 1e-6
LEAST_EXPECTED = 5.0  # of a cell, for the chi-square law to hold (Cochran 1954)
WHOLE = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)

Text = tuple[int, ...]
NextLaw = Callable[[Text], npt.NDArray[np.float64]]
"""The law [V] of the token after the prompt and a text."""


def softmax(logits: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    probs = np.exp(logits.astype(np.float64) - logits.max())
    return probs / probs.sum()


def joint_law(
    next_law: NextLaw, length: int, end: frozenset[int], least_entropy: float = 0.0
) -> dict[Text, float]:
    """Return the probability of every text of `length` tokens, or fewer that end in one of `end`.

    `least_entropy` are the nats that every conditional law must have: a bias needs room to show.
    """
    law: dict[Text, float] = {(): 1.0}
    for _ in range(length):
        longer: dict[Text, float] = {}
        for text, probability in law.items():
            if text and text[-1] in end:
                longer[text] = probability
                continue
            conditional = next_law(text)
            assert stats.entropy(conditional) >= least_entropy
            longer |= {
                (*text, token): probability * float(share)
                for token, share in enumerate(conditional)
            }
        law = longer
    assert abs(sum(law.values()) - 1.0) < 1e-9
    return law


def model_joint_law(
    path: Path,
    prompt: list[int],
    length: int,
    least_entropy: float = 0.0,
    params: SamplingParams = WHOLE,
) -> dict[Text, float]:
    """Return a GGUF's joint law, every prefix evaluated from nothing in a context of the runtime's
    defaults."""
    with Model(path) as model, Context(model, ContextOptions(n_ctx=256, n_threads=1)) as context:
        batch = Batch(context.n_batch, 1)

        def next_law(text: Text) -> npt.NDArray[np.float64]:
            context.memory.clear()
            batch.fill_chain([*prompt, *text], 0, [0], 1)
            row = context.decode(batch).logits(0)
            return plain_law(row, params, []).aligned_to(Law(np.zeros(len(row))))

        return joint_law(next_law, length, model.vocabulary.end_of_generation, least_entropy)


def sampled_texts(
    runtime: Runtime,
    prompt: list[int],
    length: int,
    samples: int,
    params: SamplingParams = WHOLE,
) -> Counter[Text]:
    """Return the texts of the seeds below `samples`, each with how often it came."""
    texts = (
        runtime.generate(prompt, params.replace(seed=seed), max_tokens=length)
        for seed in range(samples)
    )
    return Counter(tuple(text.token_ids) for text in texts)


def p_value(counts: Counter[Text], law: Mapping[Text, float]) -> float:
    """Return the test's p-value of such counts under the law; a text that it lacks is impossible.

    The least of the chi-square tests' of all parts, times their number.
    """
    if not counts.keys() <= law.keys():
        return 0.0
    length = max(map(len, law))
    parts = {(first, first + n) for n in (1, 2, length) for first in range(length + 1 - n)}
    return min(1.0, len(parts) * min(_of_part(counts, law, *part) for part in parts))


def _of_part(counts: Counter[Text], law: Mapping[Text, float], first: int, end: int) -> float:
    """Return the chi-square test's p-value of the tokens from `first` to before `end`."""
    found, wanted = Counter[Text](), dict[Text, float]()
    for text, probability in law.items():
        part = text[first:end]
        found[part] += counts[text]
        wanted[part] = wanted.get(part, 0.0) + probability
    return _chi_square(found, wanted)


def _chi_square(counts: Counter[Text], law: Mapping[Text, float]) -> float:
    """Return the p-value of Pearson's test."""
    samples = counts.total()
    texts = sorted(law, key=law.__getitem__)
    expected = samples * np.array([law[text] for text in texts])
    observed = np.array([counts[text] for text in texts])
    # The rarest share a cell: as many as it takes for it, and every other, to be expected often
    # enough.
    n_rare = int((expected < LEAST_EXPECTED).sum())
    pooled = max(n_rare, int(np.searchsorted(expected.cumsum(), LEAST_EXPECTED)) + 1)
    if pooled >= len(texts):
        return 1.0
    cells = [np.append(counts[pooled:], counts[:pooled].sum()) for counts in (observed, expected)]
    return float(stats.chisquare(*cells).pvalue)


class KeepsTooMuch(ExactRule):
    """Accepts with min(1, 1.5 p/q): the kind of slip that reads well."""

    def accept(
        self, tree: DraftTree, law_at: LawAt, noise: NoiseSource, position: int
    ) -> Acceptance:
        return super().accept(tree, law_at, _Eager(noise), position)


class _Eager:
    def __init__(self, noise: NoiseSource) -> None:
        self.seek, self.choose, self.for_drafting = noise.seek, noise.choose, noise.for_drafting
        self._accept = noise.accept

    def accept(self, probability: float) -> bool:
        return self._accept(1.5 * probability)
