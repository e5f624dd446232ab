"""Rules proven by enumeration: every outcome of small trees, with its exact probability.

A noise source that branches replays a program under every script of decisions, so the law of what
the program returns is computed and not sampled. Here the program drafts a small tree, lets the rule
under test accept, and goes on from the target's own laws; what it emits must have their product.

Laws are what the settings under test make of rows of logits, as in a round: where compiled code
walks for a rule there, it is compiled code that is enumerated here, and so are its draws of trees
without replacement. Settings that cut nothing off are tried beside them: rules walk in Python by
these.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
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
from specrun.runtime.acceptance import (
    Acceptance,
    AcceptanceRule,
    ExactRule,
    FollowedLaws,
    LawAt,
    PairRule,
    SequentialCascade,
)
from specrun.runtime.drafters.growing import GrowingDrafter, can_draw
from specrun.runtime.drafters.source import NodeRows, Source
from specrun.runtime.laws import Law, Logits, NoiseSource, SamplingParams, transformed_law
from specrun.runtime.round import DraftRequest, followed_laws
from specrun.runtime.trees import ROOT, DraftTree, parse_topology

_TOLERANCE = 1e-12
_TOKENS = 3  # of an emitted text: drafts of depth 2, and the target's own
_MOST = 60  # random laws
_SIBLINGS = parse_topology("2x1")
_OPEN = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


class _Rows:
    """Random rows of logits after every text, few of whose tokens may be said."""

    def __init__(self, n_said: int, seed: int, params: SamplingParams) -> None:
        self.n_said, self._seed, self._params = n_said, seed, params
        # More than top-k leaves, so that it cuts.
        self._n_vocab = n_said if params.top_k == 0 else max(n_said, params.top_k) + 1
        self._known: dict[tuple[int, ...], tuple[Logits, Law]] = {}

    def of(self, text: tuple[int, ...]) -> tuple[Logits, Law]:
        """Return the row after a text, float32 [n_vocab], and its law."""
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
        """Return the law after a text."""
        return self.of(text)[1]


class _WatchedLaws(FollowedLaws):
    """Laws that settings make of rows; `walks` counts who walks by them."""

    def __init__(
        self, kind: type[FollowedLaws], rows: Logits, params: SamplingParams, walks: Counter[str]
    ) -> None:
        super().__init__(rows.__getitem__, params, rows.data)
        self._kind, self._walks = kind, walks

    def __call__(self, node: int) -> Law:
        """Return the law after a node."""
        return self._kind(self.logits, self.params)(node)

    def followed(
        self, tree: DraftTree, noise: NoiseSource, position: int, *, as_block: bool
    ) -> Acceptance | NoiseSource:
        """Return what compiled code keeps; note that it did."""
        laws = self._kind(self.logits, self.params, self.matrix)
        kept = laws.followed(tree, noise, position, as_block=as_block)
        if isinstance(kept, Acceptance):
            self._walks["compiled"] += 1
        return kept


def _draft(
    shape: Shape, rows: _Rows, params: SamplingParams, noise: NoiseSource, walks: Counter[str]
) -> DraftTree:
    """Return a tree of depth 2; `walks` counts those that compiled code drew, "drawn"."""
    if shape != "without replacement":
        return grow(shape, rows.after, noise)
    request = DraftRequest([], params, noise, max_depth=2, max_nodes=4)
    source = RowsByPath(lambda paths: NodeRows([rows.of(tuple(path))[0] for path in paths]))
    walks["drawn"] += can_draw(request)
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
    """Return the largest error of any text's probability, against the target's product of laws.

    `walks` counts how often the rule accepted, "all", how often compiled code did it, "compiled",
    and how often that drew the tree.
    """
    if params.is_greedy:  # whose drafts are chosen
        shape = "point masses"
    n_said, kind = 3 + (shape == "chain"), followed_laws(params)
    target, drafts = (_Rows(n_said, 2 * seed + i, params) for i in range(2))

    def law_at(tree: DraftTree) -> LawAt:
        texts = [
            tuple(tree.tokens[above] for above in tree.path_to(node))
            for node in range(ROOT, len(tree))
        ]
        if kind is None:
            return lambda node: target.after(texts[node + 1])
        rows = np.array([target.of(text)[0] for text in texts])
        return _WatchedLaws(kind, rows, params, walks)

    def program(noise: BranchingNoise) -> tuple[int, ...]:
        tree = _draft(shape, drafts, params, noise, walks)
        accepted = rule.accept(tree, law_at(tree), noise, 0)
        walks["all"] += 1
        text = (*(tree.tokens[node] for node in accepted.path), accepted.next_token)
        while len(text) < _TOKENS:
            text = (*text, noise.choose(target.after(text)))
        return text

    emitted, errors = enumerate_law(program), []
    for text in {*product(range(n_said), repeat=_TOKENS), *emitted}:
        assert isinstance(text, tuple)
        wanted = 1.0
        for place, token in enumerate(text):
            wanted *= target.after(text[:place]).probability(token) if wanted else 0.0
        errors.append(abs(emitted.get(text, 0.0) - wanted))
    return max(errors)


class WithoutResidual:
    """A wrong rule, for controls: a rejected draft is replaced from the target's whole law.

    It is a right rule, by compiled code where that walks for it, with a source of decisions that
    draws every token from the target's law at the node in place of the law that it is given.
    """

    name = "without residual"
    exact = True

    def __init__(self, rule: AcceptanceRule | None = None) -> None:
        self._rule = ExactRule() if rule is None else rule

    def accept(
        self, tree: DraftTree, law_at: LawAt, noise: NoiseSource, position: int
    ) -> Acceptance:
        """Accept as the rule does, and forget the residual."""
        asked: dict[int, int] = {}  # by depth, the node whose law was asked for

        def note(node: int) -> int:
            asked[0 if node == ROOT else tree.depths[node]] = node
            return node

        if not isinstance(law_at, FollowedLaws):
            forgetful = _Forgetful(noise, lambda depth: law_at(asked[depth]), position)
            return self._rule.accept(tree, lambda node: law_at(note(node)), forgetful, position)
        logits, matrix, params = law_at.logits, law_at.matrix, law_at.params
        forgetful = _Forgetful(
            noise, lambda depth: transformed_law(logits(asked[depth] + 1), params), position
        )
        law_at.logits, law_at.matrix = lambda row: logits(note(row - 1) + 1), None
        try:
            return self._rule.accept(tree, law_at, forgetful, position)
        finally:
            law_at.logits, law_at.matrix = logits, matrix


class _Forgetful:
    """A source that draws from the target's law at a depth, whatever law it is given."""

    def __init__(self, source: NoiseSource, whole: Callable[[int], Law], start: int) -> None:
        self._source, self._whole, self._start = source, whole, start
        self._depth = 0
        self.accept, self.for_drafting = source.accept, source.for_drafting

    def seek(self, position: int) -> None:
        """Turn to the draws of `position`."""
        self._depth = position - self._start
        self._source.seek(position)

    def choose(self, law: Law) -> int:
        """Return a token of another law than `law`."""
        return self._source.choose(self._whole(self._depth))


# -- the check -------------------------------------------------------------------------------------


def check_rule(setting: Setting) -> Check:
    """Enumerate the rule under test over random laws and trees of every kind."""
    rule = setting.rule
    if isinstance(rule, PairRule) and not rule.chains_only:
        return check_pair_rule(rule, setting)
    if not rule.exact or isinstance(rule, PairRule | SequentialCascade):
        why = f"{rule.name} is not exact: it trades the target's law for speed"
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
        judged(error <= _TOLERANCE, seen),
        f"random laws of 3 or 4 tokens, trees of depth 2, all outcomes of {rule.name}: "
        + _walked(walks, setting.params),
        times,
        error,
        _TOLERANCE,
        "probability of a text",
        "none: nothing is sampled",
        f"a rule that forgets the residual, walked alike, is off by {wrong:.2g}",
        "" if error <= _TOLERANCE else f"{rule.name} changes the target's law",
    )


def _walked(walks: Counter[str], settings: Sequence[SamplingParams]) -> str:
    """Say which code walked how often, and by which settings."""
    compiled, python = walks["compiled"], walks["all"] - walks["compiled"]
    named = " and ".join(
        f"temperature {params.temperature:g}, top-k {params.top_k}, top-p {params.top_p:g}, "
        f"min-p {params.min_p:g}"
        for params in settings
    )
    whose = f"{python:,} walks in Python, {walks['drawn']:,} trees drawn in compiled code"
    return f"{compiled:,} walks in compiled code by {named}, {whose}"
