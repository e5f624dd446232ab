"""Rules that emit a stated law, proven by enumeration: what comes out is pi, place by place.

As in `rules`, every outcome of small trees with its exact probability; but the law that comes out
has to be the product of the rule's own pi, of random rows of a drafter and a target and of sampling
settings from temperature 0 to a narrow top-p. A rule of one's own runs through it by one call:

    register_rule("mean", lambda q, p: (q + p) / 2)
    prove_rule("mean").sound
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from specrun.bench.prove.enumeration import (
    SHAPES,
    BranchingNoise,
    Shape,
    WentAnotherWay,
    enumerate_law,
    grow,
)
from specrun.bench.prove.setting import Check, Setting, judged
from specrun.bindings.errors import OptionError
from specrun.runtime.acceptance import (
    Acceptance,
    LawPair,
    PairAt,
    PairRule,
    RawLaw,
    build_rule,
    settle_point_masses,
    total_variation,
)
from specrun.runtime.laws import Law, Logits, NoiseSource, SamplingParams, transformed_law
from specrun.runtime.trees import ROOT, DraftTree

TOLERANCE = 1e-12
_TOKENS = 3  # of an emitted text: drafts of depth 2, and the token after them
_SEEN = 1e-3  # what a wrong rule has to be off by, for the check to say anything
_OPEN = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
_SETTINGS = (
    _OPEN,
    _OPEN.replace(temperature=0.5),
    _OPEN.replace(top_p=0.8),
    _OPEN.replace(temperature=2.0, top_k=2),
    _OPEN.replace(temperature=0.0),
)


@dataclass(frozen=True, slots=True)
class RuleProof:
    """What became of a rule: the largest error of any text's probability, in so many laws.

    `control` is what the wrong rule is off by that draws the token after a rejection from what is
    left of the target's law, and the one after a whole draft from that law itself. Where pi is the
    target's law everywhere, that rule is right.
    """

    rule: str
    error: float
    control: float
    times: int

    @property
    def sound(self) -> bool:
        """Whether the rule emits its own law, to 1e-12, and a wrong one was seen not to."""
        return self.error <= TOLERANCE and self.control > _SEEN


def prove_rule(rule: str | PairRule, times: int = 50, seed: int = 0) -> RuleProof:
    """Enumerate a rule over random laws, settings and trees; a name is what `--accept` takes.

    Raises `OptionError` for an exact rule, and where a rule's function returns no law.
    """
    built = build_rule(rule) if isinstance(rule, str) else rule
    if not isinstance(built, PairRule):
        raise OptionError(f"{built.name} states no law of its own: `specrun prove` is for it")
    if built.chains_only:
        raise OptionError(f"{built.name} has another law where drafts end: it is not proven here")
    error = control = 0.0
    for number in range(times):
        shape = SHAPES[number % len(SHAPES)]
        settings = _SETTINGS[number // len(SHAPES) % len(_SETTINGS)]
        laws = PairTable(3 + (shape == "chain"), 1000 * seed + number, settings)
        error = max(error, largest_error(built, laws, shape))
        control = max(control, largest_error(LeavesPi(built), laws, shape, built))
    return RuleProof(built.name, error, control, times)


class PairTable:
    """Random rows of logits after every text, of a drafter and a target, as pairs of laws.

    They agree about half, as models do; now and then a token has no mass.
    """

    def __init__(self, n_vocab: int, seed: int, params: SamplingParams) -> None:
        self.n_vocab, self._seed, self._params = n_vocab, seed, params
        self.after = functools.cache(self._after)

    def _after(self, text: tuple[int, ...]) -> LawPair:
        source = np.random.default_rng([self._seed, len(text), *text])
        shared, *own = 1.5 * source.normal(size=(3, self.n_vocab)).astype(np.float32)
        draft, target = (shared + row for row in own)
        if source.random() < 0.3:
            target[source.integers(self.n_vocab)] = -np.inf
        return pair_of(draft, target, self._params)


def pair_of(draft: Logits, target: Logits, params: SamplingParams) -> LawPair:
    """Return the laws of two rows of logits."""
    tempered = (transformed_law(row, params) for row in (draft, target))
    return LawPair(RawLaw(draft), RawLaw(target), *tempered)


class LeavesPi:
    """A wrong rule, for controls: it accepts by pi, and then forgets it."""

    def __init__(self, rule: PairRule) -> None:
        self._rule = rule

    def accept(
        self, tree: DraftTree, pair_at: PairAt, noise: NoiseSource, position: int
    ) -> Acceptance:
        """Test draws against pi; every token that was not drafted comes from the target's law."""
        path: list[int] = []
        while True:
            node = path[-1] if path else ROOT
            pair = pair_at(node)
            law, left = self._rule.law(pair), pair.target
            kept = None
            draws = tree.draws.get(node, ())
            for draw in draws:
                token = tree.tokens[draw.node]
                drawn_from = Law.point(token) if draw.law is None else draw.law
                if noise.accept(law.probability(token) / drawn_from.probability(token)):
                    kept = draw.node
                    break
                left = left.residual(drawn_from)
            if kept is None:
                _, token = settle_point_masses(tree, (), left, noise)
                return Acceptance(tuple(path), token, rejected=bool(draws))
            path.append(kept)


def largest_error(
    rule: PairRule | LeavesPi, laws: PairTable, shape: Shape, stated: PairRule | None = None
) -> float:
    """Return the largest error of any text's probability, against the product of `stated`'s pi.

    `stated` is the rule itself where it is left out.
    """
    states = stated or rule
    assert isinstance(states, PairRule)

    @functools.cache
    def pi(text: tuple[int, ...]) -> Law:
        law, again = (states.law(laws.after(text)) for _ in range(2))
        if total_variation(law, again) > TOLERANCE:
            raise _unsteady(states)
        return law

    def program(noise: BranchingNoise) -> tuple[int, ...]:
        tree = grow(shape, lambda text: laws.after(text).draft, noise)

        def pair_at(node: int) -> LawPair:
            return laws.after(tuple(tree.tokens[above] for above in tree.path_to(node)))

        accepted = rule.accept(tree, pair_at, noise, 0)
        text = (*(tree.tokens[node] for node in accepted.path), accepted.next_token)
        while len(text) < _TOKENS:
            text = (*text, noise.choose(pi(text)))
        return text

    try:
        emitted = enumerate_law(program)
    except WentAnotherWay:
        raise _unsteady(states) from None
    texts: Sequence[tuple[int, ...]] = list(product(range(laws.n_vocab), repeat=_TOKENS))
    return max(abs(emitted.get(text, 0.0) - _wanted(pi, text)) for text in texts)


def _unsteady(rule: PairRule) -> OptionError:
    problem = f"the rule {rule.name!r} returned two laws for the same pair"
    return OptionError(f"{problem}: it must depend on nothing else")


def _wanted(pi: functools._lru_cache_wrapper[Law], text: tuple[int, ...]) -> float:
    probability = 1.0
    for place, token in enumerate(text):
        probability *= pi(text[:place]).probability(token)
        if not probability:
            break
    return probability


def check_pair_rule(rule: PairRule, setting: Setting) -> Check:
    """Enumerate a rule that states its law: what comes out is that law, not the target's."""
    proof = prove_rule(rule, seed=setting.seed)
    settings = "random laws of 3 or 4 tokens, 5 settings of sampling, trees of depth 2"
    return Check(
        "rule",
        judged(proof.error <= TOLERANCE, proof.control > _SEEN),
        f"{settings}: all outcomes of {rule.name} against its own law, not the target's",
        proof.times,
        proof.error,
        TOLERANCE,
        "probability of a text",
        "none: nothing is sampled",
        f"a rule that forgets its law after the drafts is off by {proof.control:.2g}",
        "" if proof.error <= TOLERANCE else f"{rule.name} does not emit the law that it states",
    )
