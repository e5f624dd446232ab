"""Rules proven by enumeration: every outcome of small trees, with its exact probability.

A noise source that branches replays a program under every script of decisions, so the law of what
the program returns is computed and not sampled. Here the program drafts a small tree, lets the rule
under test accept, and goes on from the target's own laws; what it emits must have their product.
"""

from __future__ import annotations

import time
from itertools import product

import numpy as np

from specrun.bench.prove.enumeration import (
    SHAPES,
    BranchingNoise,
    Shape,
    enumerate_law,
    grow,
)
from specrun.bench.prove.pair_rules import check_pair_rule
from specrun.bench.prove.setting import Check, Setting, judged
from specrun.runtime.acceptance import Acceptance, AcceptanceRule, PairRule, SequentialCascade
from specrun.runtime.acceptance.rule import LawAt
from specrun.runtime.law import Law
from specrun.runtime.noise import NoiseSource
from specrun.runtime.tree import ROOT, DraftTree

_TOLERANCE = 1e-12
_TOKENS = 3  # of an emitted text: drafts of depth 2, and the target's own
_MOST = 60  # random laws


class _Laws:
    """A random law after every text, now and then with a token that has no mass."""

    def __init__(self, n_vocab: int, seed: int) -> None:
        self.n_vocab, self._seed = n_vocab, seed
        self._known: dict[tuple[int, ...], Law] = {}

    def after(self, text: tuple[int, ...]) -> Law:
        """Return the law after a text."""
        if text not in self._known:
            source = np.random.default_rng([self._seed, len(text), *text])
            weights = source.dirichlet(np.full(self.n_vocab, 0.7))
            if source.random() < 0.3:
                weights[source.integers(self.n_vocab)] = 0.0
            self._known[text] = Law.normalised(weights)
        return self._known[text]


def largest_error(rule: AcceptanceRule, n_vocab: int, seed: int, shape: Shape) -> float:
    """Return the largest error of any text's probability, against the target's product of laws."""
    target, drafts = _Laws(n_vocab, 2 * seed), _Laws(n_vocab, 2 * seed + 1)

    def program(noise: BranchingNoise) -> tuple[int, ...]:
        tree = grow(shape, drafts.after, noise)

        def law_at(node: int) -> Law:
            return target.after(tuple(tree.tokens[above] for above in tree.path_to(node)))

        accepted = rule.accept(tree, law_at, noise, 0)
        text = (*(tree.tokens[node] for node in accepted.path), accepted.next_token)
        while len(text) < _TOKENS:
            text = (*text, noise.choose(target.after(text)))
        return text

    emitted = enumerate_law(program)
    errors = []
    for text in product(range(n_vocab), repeat=_TOKENS):
        wanted = 1.0
        for place, token in enumerate(text):
            wanted *= target.after(text[:place]).probability(token)
        errors.append(abs(emitted.get(text, 0.0) - wanted))
    return max(errors)


class WithoutResidual:
    """A wrong rule, for controls: a rejected draft is replaced from the target's whole law."""

    name = "without residual"
    exact = True

    def accept(
        self, tree: DraftTree, law_at: LawAt, noise: NoiseSource, position: int
    ) -> Acceptance:
        """Accept as in a chain, with min(1, p/q), and forget the residual."""
        path: list[int] = []
        while True:
            node = path[-1] if path else ROOT
            noise.seek(position + len(path))
            law, kept = law_at(node), None
            for draw in tree.draws.get(node, ()):
                token = tree.tokens[draw.node]
                drafted = 1.0 if draw.law is None else draw.law.probability(token)
                if noise.accept(law.probability(token) / drafted):
                    kept = draw.node
                    break
            if kept is None:
                return Acceptance(tuple(path), noise.choose(law), rejected=node in tree.draws)
            path.append(kept)


# -- the check -------------------------------------------------------------------------------------


def check_rule(setting: Setting) -> Check:
    """Enumerate the rule under test over random laws and trees of every kind."""
    rule = setting.rule
    if isinstance(rule, PairRule) and not rule.chains_only:
        return check_pair_rule(rule, setting)
    if not rule.exact or isinstance(rule, PairRule | SequentialCascade):
        why = f"{rule.name} is not exact: it trades the target's law for speed"
        return Check("rule", "left out", note=why)
    deadline, times, error, wrong = setting.deadline(0.15), 0, 0.0, 0.0
    while times < _MOST and (times < len(SHAPES) or time.monotonic() < deadline):
        shape, seed = SHAPES[times % len(SHAPES)], 1000 * setting.seed + times
        n_vocab = 3 + (shape == "chain")
        error = max(error, largest_error(rule, n_vocab, seed, shape))
        wrong = max(wrong, largest_error(WithoutResidual(), n_vocab, seed, shape))
        times += 1
    seen = wrong > 1e-3
    return Check(
        "rule",
        judged(error <= _TOLERANCE, seen),
        f"random laws of 3 or 4 tokens, trees of depth 2, all outcomes of {rule.name}",
        times,
        error,
        _TOLERANCE,
        "probability of a text",
        "none: nothing is sampled",
        f"a rule that forgets the residual is off by {wrong:.2g}",
        "" if error <= _TOLERANCE else f"{rule.name} changes the target's law",
    )
