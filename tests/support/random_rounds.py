"""Random trees with rows of a target, for walks: chains, siblings, point masses, mixtures."""

from __future__ import annotations

import numpy as np

from specrun.runtime.laws import Law, SamplingParams, SeededNoise, transformed_law
from specrun.runtime.trees import ROOT, DraftTree, TreeBuilder


def settings_of(generator: np.random.Generator) -> SamplingParams:
    return SamplingParams(
        temperature=float(generator.choice([0.05, 0.8, 1.0, 1.7])),
        top_k=int(generator.choice([1, 2, 5, 40, 128])),
        top_p=float(generator.choice([0.5, 0.95, 1.0])),
        min_p=float(generator.choice([0.0, 0.05])),
    )


def row_of(generator: np.random.Generator, size: int) -> np.ndarray:
    row = generator.standard_normal(size) * generator.choice([0.5, 2.0, 6.0])
    return (np.round(row) if generator.random() < 0.3 else row).astype(np.float32)


def add_children(
    builder: TreeBuilder,
    parent: int,
    law: Law,
    generator: np.random.Generator,
    draws: SeededNoise,
) -> list[int]:
    """Children of any kind: one draw, several, siblings without replacement, points, a mixture."""
    kind, count = generator.integers(5), int(generator.integers(1, 5))
    if kind == 0:
        return [builder.add(parent, draws.choose(law), law)]
    if kind == 1:
        tokens = draws.for_drafting(parent + 2).choose_distinct(law, count)
        first = builder.add_siblings(parent, tokens, law)
        return [*range(first, first + len(tokens))]
    if kind == 2:
        tokens = [int(generator.integers(len(law.probs))) for _ in range(count)]
        return list({builder.add(parent, int(law.ids[place])) for place in tokens})
    nodes = []
    for i in range(count):
        draws.seek(1000 + 7 * parent + i)
        token, is_point = draws.choose(law), kind == 4 and generator.random() < 0.5
        nodes.append(builder.add(parent, token, None if is_point else law))
    return list(dict.fromkeys(nodes))


def random_round(seed: int) -> tuple[DraftTree, list[np.ndarray], SamplingParams]:
    """A tree that starts with a chain, or does not, and branches below; target and draft differ."""
    generator, draws = np.random.default_rng(seed), SeededNoise(seed, 9)
    size, params = int(generator.choice([130, 300, 5000])), settings_of(generator)
    builder, rows, level = TreeBuilder(), [row_of(generator, size)], [ROOT]
    length = int(generator.integers(0, 6))
    for depth in range(length + int(generator.integers(0, 3))):
        below: list[int] = []
        for node in level[:3]:
            noisy = rows[node + 1] + generator.choice([0.0, 0.3, 2.0]) * row_of(generator, size)
            law = transformed_law(noisy.astype(np.float32), params)
            draws.seek(depth)
            if depth < length and generator.random() < 0.9:
                point = generator.random() < 0.2
                nodes = [builder.add(node, draws.choose(law), None if point else law)]
            else:
                nodes = add_children(builder, node, law, generator, draws)
            while len(rows) < len(builder) + 1:
                rows.append(row_of(generator, size))
            below += nodes
        level = below
    return builder.build(), rows, params
