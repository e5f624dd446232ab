"""Rules proven by enumeration: every outcome of small trees, with its exact probability.

A noise source that branches replays a program under every script of decisions, so the distribution
of its results is computed and not sampled. The rule is the one that decides rounds: compiled, if it
is there.
"""

from __future__ import annotations

import functools
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, get_args

import numpy as np

from specrun.bench.prove.setting import Check, Setting, judged
from specrun.bindings.errors import OptionError, SpecrunError
from specrun.runtime.acceptance import (
    Acceptance,
    AcceptanceRule,
    ExactRule,
    LawAt,
    LawPair,
    PairAt,
    PairRule,
    RawLaw,
    SequentialCascade,
    build_rule,
    settle_point_masses,
    total_variation,
)
from specrun.runtime.drafters.growing.drafter import GrowingDrafter
from specrun.runtime.drafters.growing.source import NodeRows, Source
from specrun.runtime.laws import Law, Logits, NoiseSource, SamplingParams, transformed_law
from specrun.runtime.laws.law import RowLaws
from specrun.runtime.laws.transform import row_cuts
from specrun.runtime.round import DraftRequest
from specrun.runtime.trees import ROOT, DraftTree, TreeBuilder, most_likely, parse_topology

# == Enumeration: the exact distribution of a program's result, and small trees of every kind ======


Shape = Literal["chain", "siblings", "without replacement", "point masses", "mixed"]
SHAPES: tuple[Shape, ...] = get_args(Shape)
_WIDTHS: dict[Shape, tuple[int, int]] = {
    "chain": (1, 1),
    "siblings": (2, 1),
    "without replacement": (2, 1),
    "point masses": (2, 2),
    "mixed": (2, 1),
}


class WentAnotherWay(SpecrunError):
    """A program that was replayed did not decide as it had."""


class BranchingNoise:
    """Replays a script of decisions, then takes the first possible branch and notes the others.

    `accept` and `choose` are the only sources of randomness in the shipped loop, so running it
    under every script enumerates the distribution of its result.
    """

    def __init__(self, script: list[int]) -> None:
        self._script = script
        self.taken: list[tuple[int, int]] = []  # (branch, number of branches)
        self.probability = 1.0

    def seek(self, position: int) -> None:
        """Positions only key seeded noise."""

    def accept(self, probability: float) -> bool:
        """Return each of both answers in turn, unless one is certain."""
        if probability >= 1.0:
            return True
        if probability <= 0.0:
            return False
        return self._branch([probability, 1.0 - probability]) == 0

    def choose(self, law: Law) -> int:
        """Return each token of the distribution's support in turn."""
        support = law.probs.nonzero()[0]
        index = int(support[self._branch([float(law.probs[place]) for place in support])])
        return index if law.ids is None else int(law.ids[index])

    def for_drafting(self, round_start: int) -> BranchingNoise:
        """Return this source: drafts are enumerated with all else."""
        return self

    def _branch(self, probabilities: list[float]) -> int:
        step = len(self.taken)
        branch = self._script[step] if step < len(self._script) else 0
        if branch >= len(probabilities):
            raise WentAnotherWay("it must depend on nothing but the noise")
        self.taken.append((branch, len(probabilities)))
        self.probability *= probabilities[branch]
        return branch


def enumerate_law(program: Callable[[BranchingNoise], Hashable]) -> dict[Hashable, float]:
    """Return the exact distribution of the result of `program`."""
    law: dict[Hashable, float] = defaultdict(float)
    script: list[int] = []
    while True:
        noise = BranchingNoise(script)
        outcome = program(noise)
        law[outcome] += noise.probability
        taken = noise.taken
        while taken and taken[-1][0] + 1 == taken[-1][1]:
            taken.pop()
        if not taken:
            return dict(law)
        script = [branch for branch, _ in taken[:-1]] + [taken[-1][0] + 1]


def grow(
    shape: Shape, law_after: Callable[[tuple[int, ...]], Law], noise: NoiseSource
) -> DraftTree:
    """Return a tree of depth 2 drawn from the draft distributions; nothing but draws is random."""
    tree = TreeBuilder()
    parents: dict[int, tuple[int, ...]] = {ROOT: ()}
    for width in _WIDTHS[shape]:
        children: dict[int, tuple[int, ...]] = {}
        for parent, text in parents.items():
            law = law_after(text)
            ranked = most_likely(law, width)
            for rank in range(width):
                if shape == "point masses" or (shape == "mixed" and rank == 0):
                    if rank == len(ranked):  # the distribution has no more tokens
                        break
                    token, drawn_from = ranked[rank][0], None
                else:
                    token, drawn_from = noise.choose(law), law
                children[tree.add(parent, token, drawn_from)] = (*text, token)
                if shape == "without replacement" and drawn_from is not None:
                    law = law.without(token)
        parents = children
    return tree.build()


_TOKENS = 3  # of an emitted text: drafts of depth 2, and the token after them


def _emitted(
    tree: DraftTree,
    accepted: Acceptance,
    law_after: Callable[[tuple[int, ...]], Law],
    noise: NoiseSource,
) -> tuple[int, ...]:
    """Return the accepted tokens, gone on with from the distributions after them."""
    text = (*(tree.tokens[node] for node in accepted.path), accepted.next_token)
    while len(text) < _TOKENS:
        text = (*text, noise.choose(law_after(text)))
    return text


def _error_of(
    program: Callable[[BranchingNoise], tuple[int, ...]],
    law_after: Callable[[tuple[int, ...]], Law],
    n_vocab: int,
) -> float:
    """Return the largest error of any text's probability, against the product of distributions."""
    emitted = enumerate_law(program)
    errors = []
    for text in {*product(range(n_vocab), repeat=_TOKENS), *emitted}:
        assert isinstance(text, tuple)
        wanted = 1.0
        for place, token in enumerate(text):
            wanted *= law_after(text[:place]).probability(token) if wanted else 0.0
        errors.append(abs(emitted.get(text, 0.0) - wanted))
    return max(errors)


# == Rules that emit a stated distribution: they must emit pi, position by position ================
#
# The emitted tokens must have the product of the rule's own pi, for random rows of a drafter
# and a target, and for sampling settings from temperature 0 to a narrow top-p. A user's own rule
# is proven by one call: `register_rule("mean", lambda q, p: (q + p) / 2)`, then
# `prove_rule("mean").sound`.


TOLERANCE = 1e-12
_SEEN = 1e-3  # the least error of a wrong rule for which a check proves something
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
    """The result for a rule: the largest error of any text's probability, in so many distributions.

    `control` is the error of the wrong rule that draws the token after a rejection from the
    rest of the target's distribution, and the one after a whole draft from that distribution
    itself. If pi is the target's distribution everywhere, that rule is right.
    """

    rule: str
    error: float
    control: float
    times: int

    @property
    def sound(self) -> bool:
        """Whether the rule emits its own distribution, to 1e-12, and the control did not."""
        return self.error <= TOLERANCE and self.control > _SEEN


def prove_rule(rule: str | PairRule, times: int = 50, seed: int = 0) -> RuleProof:
    """Enumerate a rule, also by its name, over random distributions, settings and trees.

    Raises `OptionError` for an exact rule, and if a rule's function returns no distribution.
    """
    built = build_rule(rule) if isinstance(rule, str) else rule
    if not isinstance(built, PairRule):
        problem = f"{built.name} states no distribution of its own"
        raise OptionError(f"{problem}: use `specrun prove` to test it")
    if built.chains_only:
        problem = f"{built.name} has another distribution at the end of a draft"
        raise OptionError(f"{problem}: it cannot be proven here")
    error = control = 0.0
    for number in range(times):
        shape = SHAPES[number % len(SHAPES)]
        settings = _SETTINGS[number // len(SHAPES) % len(_SETTINGS)]
        laws = _PairTable(3 + (shape == "chain"), 1000 * seed + number, settings)
        error = max(error, _largest_pair_error(built, laws, shape))
        control = max(control, _largest_pair_error(LeavesPi(built), laws, shape, built))
    return RuleProof(built.name, error, control, times)


class _PairTable:
    """Random rows of logits after every text, of a drafter and a target, as pairs of distributions.

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
    """Return the distributions of two rows of logits."""
    tempered = (transformed_law(row, params) for row in (draft, target))
    return LawPair(RawLaw(draft), RawLaw(target), *tempered)


class LeavesPi:
    """A wrong rule, for controls: it accepts by pi, and then forgets it."""

    def __init__(self, rule: PairRule) -> None:
        self._rule = rule

    def accept(
        self, tree: DraftTree, pair_at: PairAt, noise: NoiseSource, position: int
    ) -> Acceptance:
        """Test draws against pi; other tokens come from the target's distribution."""
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


def _largest_pair_error(
    rule: PairRule | LeavesPi, laws: _PairTable, shape: Shape, stated: PairRule | None = None
) -> float:
    """Return the largest error of any text's probability, against the product of `stated`'s pi.

    `stated` is the rule itself if it is left out.
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

        return _emitted(tree, rule.accept(tree, pair_at, noise, 0), pi, noise)

    try:
        return _error_of(program, pi, laws.n_vocab)
    except WentAnotherWay:
        raise _unsteady(states) from None


def _unsteady(rule: PairRule) -> OptionError:
    problem = f"the rule {rule.name!r} returned two distributions for the same pair"
    return OptionError(f"{problem}: it must depend on nothing else")


def _check_pair_rule(rule: PairRule, setting: Setting) -> Check:
    """Enumerate a rule that states a distribution: its output must have that one."""
    proof = prove_rule(rule, seed=setting.seed)
    settings = "random distributions of 3 or 4 tokens, 5 settings of sampling, trees of depth 2"
    return Check(
        "rule",
        judged(proof.error <= TOLERANCE, proof.control > _SEEN),
        f"{settings}: all outcomes of {rule.name} against its own distribution, not the target's",
        proof.times,
        proof.error,
        TOLERANCE,
        "probability of a text",
        "none: nothing is sampled",
        f"a rule that forgets its distribution after the drafts is off by {proof.control:.2g}",
        "" if proof.error <= TOLERANCE else f"{rule.name} does not emit its stated distribution",
    )


# == Exact rules ===================================================================================
#
# The program drafts a small tree, lets the rule under test accept, and goes on from the target's
# own distributions; the tokens that it emits must have the product of these.
#
# Distributions are made from rows of logits by the settings under test, as in a round. Settings
# without truncation are tried in addition.


_MOST = 60  # random distributions
_SIBLINGS = parse_topology("2x1")


class _Rows:
    """Random rows of logits after every text, with few possible tokens."""

    def __init__(self, n_said: int, seed: int, params: SamplingParams) -> None:
        self.n_said, self._seed, self._params = n_said, seed, params
        # More than top-k leaves, so that it cuts.
        self._n_vocab = n_said if params.top_k == 0 else max(n_said, params.top_k) + 1
        self._known: dict[tuple[int, ...], tuple[Logits, Law]] = {}

    def of(self, text: tuple[int, ...]) -> tuple[Logits, Law]:
        """Return the row after a text, float32 [n_vocab], and its distribution."""
        if text not in self._known:
            source = np.random.default_rng([self._seed, len(text), *text])
            row = np.full(self._n_vocab, -np.inf, np.float32)
            row[: self.n_said] = 1.5 * source.standard_normal(self.n_said)
            if source.random() < 0.3:  # now and then a token has no mass
                row[source.integers(self.n_said)] = -np.inf
            law = transformed_law(row, self._params)
            ids = np.arange(len(law.probs)) if law.ids is None else law.ids
            kept = law.probs > 0.0
            self._known[text] = row, Law(law.probs[kept], ids[kept])
        return self._known[text]

    def after(self, text: tuple[int, ...]) -> Law:
        """Return the distribution after a text."""
        return self.of(text)[1]


def _draft(shape: Shape, rows: _Rows, params: SamplingParams, noise: NoiseSource) -> DraftTree:
    """Return a tree of depth 2."""
    if shape != "without replacement":
        return grow(shape, rows.after, noise)
    request = DraftRequest([], params, noise, max_depth=2, max_nodes=4)
    source = RowsByPath(lambda paths: NodeRows([rows.of(tuple(path))[0] for path in paths]))
    return GrowingDrafter(source, _SIBLINGS, sampling="without").propose(request)


class RowsByPath(Source):
    """Rows of logits by the drafted tokens before them."""

    def __init__(self, rows_after: Callable[[Sequence[Sequence[int]]], NodeRows]) -> None:
        self._rows_after = rows_after
        self._paths: list[list[int]] = []

    def root(self, request: DraftRequest, highest: int) -> NodeRows:
        """Return the row before any drafted token."""
        self._paths = []
        return self._rows_after([[]])

    def below(self, parents: Sequence[int], tokens: Sequence[int]) -> NodeRows:
        """Return the rows after tokens."""
        first = len(self._paths)
        for parent, token in zip(parents, tokens, strict=True):
            self._paths.append([*(self._paths[parent] if parent != ROOT else []), token])
        return self._rows_after(self._paths[first:])


def largest_error(
    rule: AcceptanceRule, params: SamplingParams, seed: int, shape: Shape, walks: Counter[str]
) -> float:
    """Return the largest error of any text's probability, against the product of the target's own.

    `walks` counts how often the rule accepted: "cut" if top-k cuts, else "open".
    """
    if params.is_greedy:  # whose drafts are chosen
        shape = "point masses"
    n_said, cuts = 3 + (shape == "chain"), row_cuts(params)
    target, drafts = (_Rows(n_said, 2 * seed + i, params) for i in range(2))

    def law_at(tree: DraftTree) -> LawAt:
        texts = [
            tuple(tree.tokens[above] for above in tree.path_to(node))
            for node in range(ROOT, len(tree))
        ]
        if cuts is None:
            return lambda node: target.after(texts[node + 1])
        return RowLaws(cuts, [target.of(text)[0] for text in texts].__getitem__)

    def program(noise: BranchingNoise) -> tuple[int, ...]:
        tree = _draft(shape, drafts, params, noise)
        accepted = rule.accept(tree, law_at(tree), noise, 0)
        walks["open" if params is _OPEN else "cut"] += 1
        return _emitted(tree, accepted, target.after, noise)

    return _error_of(program, target.after, n_said)


class WithoutResidual:
    """A wrong rule, for controls: after a rejection it draws from the target's whole distribution.

    It is a right rule with a source of decisions that draws every token from the target's
    distribution at the node in place of the distribution that it is given.
    """

    name = "without residual"
    exact = True

    def __init__(self, rule: AcceptanceRule | None = None) -> None:
        self._rule = ExactRule() if rule is None else rule

    def accept(
        self, tree: DraftTree, law_at: LawAt, noise: NoiseSource, position: int
    ) -> Acceptance:
        """Accept as the rule does, and forget the residual."""
        asked: dict[int, int] = {}  # by depth, the node whose distribution was read

        def note(node: int) -> int:
            asked[0 if node == ROOT else tree.depths[node]] = node
            return node

        forgetful = _Forgetful(noise, lambda depth: law_at(asked[depth]), position)
        return self._rule.accept(tree, lambda node: law_at(note(node)), forgetful, position)


class _Forgetful:
    """A source that draws from the target's distribution at a depth, and from no other."""

    def __init__(self, source: NoiseSource, whole: Callable[[int], Law], start: int) -> None:
        self._source, self._whole, self._start = source, whole, start
        self._depth = 0
        self.accept, self.for_drafting = source.accept, source.for_drafting

    def seek(self, position: int) -> None:
        """Turn to the draws of `position`."""
        self._depth = position - self._start
        self._source.seek(position)

    def choose(self, law: Law) -> int:
        """Return a token of another distribution than `law`."""
        return self._source.choose(self._whole(self._depth))


# -- the check -------------------------------------------------------------------------------------


def check_rule(setting: Setting) -> Check:
    """Enumerate the rule under test over random distributions and trees of every kind."""
    rule = setting.rule
    if isinstance(rule, PairRule) and not rule.chains_only:
        return _check_pair_rule(rule, setting)
    if not rule.exact or isinstance(rule, PairRule | SequentialCascade):
        why = f"{rule.name} is not exact: it trades the target's distribution for speed"
        return Check("rule", "left out", note=why)
    settings = [*setting.params, _OPEN]
    least = len(SHAPES) * len(settings)
    walks: Counter[str] = Counter()
    deadline, times, error, wrong = setting.deadline(0.15), 0, 0.0, 0.0
    while times < max(_MOST, least) and (times < least or time.monotonic() < deadline):
        shape, seed = SHAPES[times % len(SHAPES)], 1000 * setting.seed + times
        params = settings[times // len(SHAPES) % len(settings)]
        error = max(error, largest_error(rule, params, seed, shape, walks))
        wrong = max(wrong, largest_error(WithoutResidual(rule), params, seed, shape, Counter()))
        times += 1
    seen = wrong > 1e-3
    return Check(
        "rule",
        judged(error <= TOLERANCE, seen),
        f"random distributions of 3 or 4 tokens, trees of depth 2, all outcomes of {rule.name}: "
        + _walked(walks, setting.params),
        times,
        error,
        TOLERANCE,
        "probability of a text",
        "none: nothing is sampled",
        f"a rule that forgets the residual, walked alike, is off by {wrong:.2g}",
        "" if error <= TOLERANCE else f"{rule.name} changes the target's distribution",
    )


def _walked(walks: Counter[str], settings: Sequence[SamplingParams]) -> str:
    """Return how many walks there were, by which settings, and the build of the distributions."""
    named = " and ".join(
        f"temperature {params.temperature:g}, top-k {params.top_k}, top-p {params.top_p:g}, "
        f"min-p {params.min_p:g}"
        for params in settings
    )
    is_compiled = not (sys.modules[Law.__module__].__file__ or "").endswith(".py")
    code = "compiled code" if is_compiled else "Python"
    found = f"walks with distributions in {code}, {walks['cut']:,} by {named}"
    return f"{found}, {walks['open']:,} without cuts"
