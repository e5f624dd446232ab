"""Distributions of cascades along known texts: cross-entropy, deferral, rejection, without draws.

Teacher forcing: at every place of a text both models are read after the real tokens before it, and
a rule's distribution pi is taken for the token that came. The log-probability of a cascade's own
text would mean nothing: repetition is always likely.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from specrun.bench.timing import Spread, spread_of
from specrun.bindings.contexts import Context, ContextOptions
from specrun.bindings.errors import OptionError
from specrun.bindings.models import Model
from specrun.runtime.acceptance import (
    LawPair,
    PairRule,
    RawLaw,
    Rule,
    SequentialCascade,
    TokenCascade,
    largest,
    total_variation,
)
from specrun.runtime.laws import Law, Logits, SamplingParams, transformed_law
from specrun.runtime.tuning import ROWS_AT_ONCE, scored_logits

_SAME = 1e-9  # distributions that are no further apart agree: neither model's token


@dataclass(frozen=True, slots=True)
class TeacherForced:
    """Measures of a rule's distribution pi along texts.

    `cross_entropy` is -log pi of the real tokens in nats a token, its spread over texts; None if
    a text holds a token with pi 0; `excess` is its difference to the first of the distributions,
    text by text. `expected_accuracy` is the mean of pi of the real tokens: at temperature 0 the
    share of tokens that are foretold. `deferral_rate` is, of the places where both models'
    distributions differ, the share where pi is the target's; a pi between the two counts by its way
    from the drafter's, by total variation. `rejection_rate` is TV(pi, S(q)), the chance that a
    drawn draft is rejected (lemma 3).
    """

    n_tokens: int
    cross_entropy: Spread | None
    excess: Spread | None
    expected_accuracy: float
    deferral_rate: float | None
    rejection_rate: float


StatedLaw = Callable[[LawPair], Law]
"""pi of both distributions at a place."""


def stated_law(rule: Rule | SequentialCascade) -> StatedLaw | None:
    """Return the distribution that a rule states for a place; None if it needs other places."""
    if isinstance(rule, PairRule):
        # If a draft would have ended for want of certainty, the target's distribution counts.
        return lambda pair: (
            pair.target if largest(pair.raw_draft) < rule.fallback else rule.law(pair)
        )
    if isinstance(rule, TokenCascade):
        return lambda pair: pair.target if rule.defers(largest(pair.raw_draft)) else pair.draft
    if isinstance(rule, SequentialCascade) or not rule.exact:
        return None
    return target_law


def target_law(pair: LawPair) -> Law:
    """Return the target's distribution: that of plain decoding and of all exact rules."""
    return pair.target


def draft_law(pair: LawPair) -> Law:
    """Return the drafter's distribution: that of the small model alone."""
    return pair.draft


@dataclass(frozen=True, slots=True)
class _Place:
    """A place of a text: both models' rows of logits, their raw distributions, and its token."""

    draft_row: Logits
    target_row: Logits
    draft: RawLaw
    target: RawLaw
    token: int

    def pair(self, params: SamplingParams) -> LawPair:
        """Return the distributions by the settings of sampling."""
        # A draft model may have more tokens than the target: they have no mass.
        shared = self.draft_row[: len(self.target_row)]
        drawn = (transformed_law(row, params) for row in (shared, self.target_row))
        return LawPair(self.draft, self.target, *drawn)


class Teacher:
    """Both models, read along texts; each is evaluated once for all rules and settings.

    `texts` are the tokens of each text and how many of them are its prompt. Rows of all texts are
    kept: 8 bytes and more for a token of the vocabulary and place.
    """

    def __init__(
        self,
        target: Path,
        small: Path,
        texts: Sequence[tuple[list[int], int]],
        n_threads: int = 0,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        longest = max(len(tokens) for tokens, _ in texts)
        self._texts: list[list[_Place]] = []
        with ExitStack() as stack:
            contexts = []
            for path in (target, small):
                model = stack.enter_context(Model(path, n_gpu_layers=0))
                if longest > model.n_ctx_train:
                    has = f"{longest} tokens, and {path.name} reads {model.n_ctx_train}"
                    raise OptionError(f"a text with its prompt has {has}: give shorter ones")
                options = ContextOptions(n_ctx=longest, n_outputs=ROWS_AT_ONCE, n_threads=n_threads)
                contexts.append(stack.enter_context(Context(model, options)))
            for number, (tokens, n_prompt) in enumerate(texts):
                progress(f"reading text {number + 1} of {len(texts)}")
                self._texts.append([*_read(contexts, tokens, n_prompt)])

    def force(
        self, laws: Sequence[StatedLaw | None], params: SamplingParams
    ) -> list[TeacherForced | None]:
        """Return the measures of each distribution along all texts, by the settings of sampling."""
        sums = [None if law is None else _Sums() for law in laws]
        for places in self._texts:
            for place in places:
                pair = place.pair(params)
                apart = total_variation(pair.target, pair.draft)
                for law, found in zip(laws, sums, strict=True):
                    if law is not None and found is not None:
                        found.add(pair, law(pair), apart, place.token)
            for found in sums:
                if found is not None:
                    found.end_text()
        base = [] if sums[0] is None else sums[0].surprises
        return [None if found is None else found.result(base) for found in sums]


def _read(contexts: Sequence[Context], tokens: list[int], n_prompt: int) -> Iterator[_Place]:
    """Yield the places of a text after its prompt."""
    place = n_prompt
    blocks = (scored_logits(context, tokens, n_prompt - 1) for context in contexts)
    for targets, drafts in zip(*blocks, strict=True):
        for target, draft in zip(targets, drafts, strict=True):
            yield _Place(draft, target, RawLaw(draft), RawLaw(target), tokens[place])
            place += 1


class _Sums:
    """Adds up the measures of one distribution along texts."""

    def __init__(self) -> None:
        self.surprises: list[float] = []  # of each text, in nats a token
        self._text: list[float] = []
        self._mass = self._deferred = self._rejected = 0.0
        self._n = self._n_apart = 0

    def add(self, pair: LawPair, law: Law, apart: float, token: int) -> None:
        """Count one place, whose text went on with `token`; the distributions are TV `apart`."""
        mass = law.probability(token)
        self._text.append(-math.log(mass) if mass > 0.0 else math.inf)
        self._mass += mass
        self._n += 1
        rejected = total_variation(law, pair.draft)
        self._rejected += rejected
        if apart > _SAME:
            # Of a rule that defers whole places this is 0 or 1.
            self._deferred += min(1.0, rejected / apart)
            self._n_apart += 1

    def end_text(self) -> None:
        """Count a text as a whole."""
        if self._text:
            self.surprises.append(sum(self._text) / len(self._text))
        self._text = []

    def result(self, base: Sequence[float]) -> TeacherForced:
        """Return the figures over all places; `base`: the surprises of the first distribution."""
        finite = all(map(math.isfinite, (*self.surprises, *base)))
        pairs = zip(self.surprises, base, strict=False) if finite else ()
        excess = [own - other for own, other in pairs]
        return TeacherForced(
            n_tokens=self._n,
            cross_entropy=spread_of(self.surprises) if finite else None,
            excess=spread_of(excess) if excess else None,
            expected_accuracy=self._mass / self._n,
            deferral_rate=self._deferred / self._n_apart if self._n_apart else None,
            rejection_rate=self._rejected / self._n,
        )
