"""Rules proven by enumeration: every outcome of small trees, with its exact probability.

A noise source that branches replays a program under every script of decisions, so the law of what
the program returns is computed and not sampled. Here the program drafts a small tree, lets the rule
under test accept, and goes on from the target's own laws; what it emits must have their product.

Laws are what the settings under test make of rows of logits, as in a round, and settings that cut
nothing off are tried, too. The rule is the one that decides rounds: compiled, if it is there.
"""

from __future__ import annotations

import sys
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
    LawAt,
    PairRule,
    SequentialCascade,
)
from specrun.runtime.drafters.path_laws import PathLaws, grow_draft
from specrun.runtime.laws import Law, Logits, NoiseSource, SamplingParams, transformed_law
from specrun.runtime.laws.transform import row_cuts
from specrun.runtime.laws.truncation import RowLaws
from specrun.runtime.round import DraftRequest
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


def _draft(shape: Shape, rows: _Rows, params: SamplingParams, noise: NoiseSource) -> DraftTree:
    """Return a tree of depth 2."""
    if shape != "without replacement":
        return grow(shape, rows.after, noise)
    request = DraftRequest([], params, noise, max_depth=2, max_nodes=4)
    laws = PathLaws(
        lambda: [rows.of(())[0]],
        lambda _parents, _tokens, paths: [rows.of(tuple(path))[0] for path in paths()],
        request,
        params,
    )
    return grow_draft(_SIBLINGS, laws, request, sampling="without")


def largest_error(
    rule: AcceptanceRule, params: SamplingParams, seed: int, shape: Shape, walks: Counter[str]
) -> float:
    """Return the largest error of any text's probability, against the target's product of laws.

    `walks` counts how often the rule accepted: "cut" where top-k cuts, else "open".
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
        return RowLaws([target.of(text)[0] for text in texts].__getitem__, cuts)

    def program(noise: BranchingNoise) -> tuple[int, ...]:
        tree = _draft(shape, drafts, params, noise)
        accepted = rule.accept(tree, law_at(tree), noise, 0)
        walks["open" if params is _OPEN else "cut"] += 1
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

    It is a right rule with a source of decisions that draws every token from the target's law at
    the node in place of the law that it is given.
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

        forgetful = _Forgetful(noise, lambda depth: law_at(asked[depth]), position)
        return self._rule.accept(tree, lambda node: law_at(note(node)), forgetful, position)


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
        + _walked(walks, rule, setting.params),
        times,
        error,
        _TOLERANCE,
        "probability of a text",
        "none: nothing is sampled",
        f"a rule that forgets the residual, walked alike, is off by {wrong:.2g}",
        "" if error <= _TOLERANCE else f"{rule.name} changes the target's law",
    )


def _walked(walks: Counter[str], rule: AcceptanceRule, settings: Sequence[SamplingParams]) -> str:
    """Return which code walked how often, and by which settings."""
    named = " and ".join(
        f"temperature {params.temperature:g}, top-k {params.top_k}, top-p {params.top_p:g}, "
        f"min-p {params.min_p:g}"
        for params in settings
    )
    is_compiled = not (sys.modules[type(rule).__module__].__file__ or "").endswith(".py")
    code = "compiled code" if is_compiled else "Python"
    return f"walks in {code}, {walks['cut']:,} by {named}, {walks['open']:,} without cuts"
