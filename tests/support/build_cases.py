"""Random cases of all that Cython compiles, as digests: `python -m support.build_cases [plugin]`.

With `interpreted` the files themselves run, whatever Cython made of them.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
from collections.abc import Iterator, Sequence

if sys.argv[1:] == ["interpreted"]:  # before anything of specrun is imported
    importlib.import_module("support.interpreted")

import numpy as np

from specrun.runtime.acceptance import BlockRule, ExactRule
from specrun.runtime.laws import Law, SamplingParams, SeededNoise, transformed_law
from specrun.runtime.laws import law as law_module
from specrun.runtime.laws.law import side_by_side
from specrun.runtime.trees import (
    Threshold,
    TreeSampling,
    grow_tree,
    parse_topology,
    proposal_scheme,
)
from support.random_rounds import random_round, row_of


def law_of(generator: np.random.Generator) -> Law:
    """A distribution of 1 to 300 tokens, dense or on a support, some of mass zero."""
    size = int(generator.choice([1, 2, 7, 8, 9, 31, 128, 129, 300]))
    weights = generator.exponential(size=size) ** 3 * (generator.random(size) < 0.8)
    weights[int(generator.integers(size))] = 1.0
    ids = None if generator.random() < 0.3 else np.sort(generator.choice(900, size, replace=False))
    return Law(weights / np.add.reduce(weights), ids)


def draws() -> Iterator[object]:
    """Draws, races and residuals."""
    generator = np.random.default_rng(5)
    for position in range(400):
        target, draft = law_of(generator), law_of(generator)
        source = SeededNoise(position - 200, position)
        source.seek(position)
        drafting = source.for_drafting(position)
        yield [source.choose(target), source.choose(draft), drafting.choose(target)]
        yield [source.accept(0.3), drafting.for_drafting(3).accept(0.7), source.source]
        yield [target.token_at(uniform) for uniform in (0.0, 0.5, 1.0 - 2.0**-53)]
        yield drafting.choose_distinct(target, 6)
        yield [target.residual(draft).probs.tobytes(), target.surplus(draft)]
        yield [draft.without(target.most_likely[0]).probs.tobytes()]
        yield [target.left_over(draft, 0.3).tobytes(), draft.aligned_to(target).tobytes()]
        yield [target.probability(token) for token in (0, 5, 899, 2000)]
        yield [part.tobytes() for part in side_by_side(target, draft) if part is not None]


def truncations() -> Iterator[object]:
    """Rows with ties and infinities, by settings of every kind."""
    for seed in range(300):
        generator = np.random.default_rng(seed)
        row = row_of(generator, int(generator.choice([1, 15, 40, 300, 2048, 5000])))
        row[generator.random(len(row)) < generator.choice([0.0, 0.5])] = -np.inf
        row[0] = 1.0
        params = SamplingParams(
            temperature=float(generator.choice([0.0, 1e-40, 0.3, 0.8, 2.5])),
            top_k=int(generator.choice([1, 2, 40, 65, 256])),
            top_p=float(generator.choice([0.0, 0.4, 0.95, 1.0])),
            min_p=float(generator.choice([0.0, 0.05, 1.0])),
        )
        law = transformed_law(row, params)
        yield [law.probs.tobytes(), None if law.ids is None else law.ids.tobytes()]


def walks() -> Iterator[object]:
    """What both rules keep of random trees."""
    for seed in range(300):
        tree, rows, params = random_round(seed)
        for rule in (ExactRule(), BlockRule()):
            laws = [transformed_law(row, params) for row in rows]
            noise = SeededNoise(seed + 2**63, seed % 5 - 2)
            kept = rule.accept(tree, lambda node, laws=laws: laws[node + 1], noise, seed)
            yield [kept.path, kept.next_token, kept.rejected]


class RandomLaws:
    """Distributions of a growing tree, one after the other."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.default_rng(seed)

    def root(self) -> Law:
        """The first distribution."""
        return law_of(self._generator)

    def below(self, parents: Sequence[int], tokens: Sequence[int]) -> list[Law]:
        """A distribution for each token."""
        return [law_of(self._generator) for _ in tokens]


def growths() -> Iterator[object]:
    """Trees of every scheme, drawn by numbers and by another source's decisions."""
    names: tuple[TreeSampling, ...] = ("with", "without", "argmax")
    for seed in range(180):
        noise = SeededNoise(seed)
        source = noise.for_drafting(seed) if seed % 2 else noise
        topology = parse_topology(("3x2x2", "1x1x1x1", "5x1", "2x3")[seed % 4])
        stop = Threshold(0.3) if seed % 5 == 0 else None
        scheme = proposal_scheme(names[seed % 3])
        tree = grow_tree(topology, RandomLaws(seed), scheme, source, seed, stop)
        laws = [
            (parent, draw.node, None if draw.law is None else draw.law.probs.tobytes())
            for parent, drawn in tree.draws.items()
            for draw in drawn
        ]
        yield [tree.tokens, tree.parents, tree.depths, laws]


def digests() -> dict[str, list[str]]:
    """The digests of all cases, by their kind, and which build they are of."""
    found = {
        kind.__name__: [hashlib.sha256(repr(case).encode()).hexdigest()[:16] for case in kind()]
        for kind in (draws, truncations, walks, growths)
    }
    return {"files": [str(law_module.__file__)], **found}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(digests()))
