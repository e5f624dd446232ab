"""Forced texts: one text through rounds of any drafts, its distributions against plain ones.

Plain decoding writes a text, greedily, after a real prompt. The same text is then evaluated in
rounds whose drafts hold some of it, as a target does while it generates. The rows that decide its
tokens are compared with those of plain decoding by their total variation, that of the target's own
distributions (softmax of the logits, temperature 1): about how often a sampled text parts there. A
row whose most likely token is another one is a flip: a greedy text parts there.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import NamedTuple

import numpy as np

from specrun.bench.drafters.prompts import demo_pairs
from specrun.bench.prove.setting import (
    ALPHA,
    PROMPTS,
    Check,
    ForkingDrafter,
    Logits,
    Setting,
    judged,
)
from specrun.bindings.errors import UnsupportedModelError
from specrun.runtime.acceptance import RawLaw, total_variation
from specrun.runtime.round import CachedText, NoDrafter, Target, TargetModel
from specrun.runtime.trees import ROOT, DraftTree

LENGTH = 100  # tokens of a forced text
_BLOCK = 256  # cells by which attention reads further
_BEYOND = f"texts beyond {_BLOCK} cells"
_LONG = _BLOCK + 24  # tokens of a long prompt
_ARTICLE = 16  # questions and their answers in it
_NEAR = 16  # the last tokens of a prompt, of which one is wrong in a control
_SHORTEST = 8  # tokens of a prompt
_KEPT = 3  # texts that several checks read
FLOOR = 1e-4  # total variation a token: texts part every 10,000 tokens
_FAR = 8.0  # times the noise
_FLATTER = 1.3  # the highest temperature of texts that are compared

UNIT = "total variation a token (at temperature 1) beyond that of other rounds as wide"
FALSE_ALARM = (
    f"{ALPHA:g} at most in noise (Hoeffding); no figure if the others have no noise, or if few "
    "texts make the bound half of a wrong cell's effect"
)


# -- texts -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ForcedText:
    """A prompt, the tokens that plain decoding goes on with, and the rows that decide them."""

    prompt: list[int]
    coming: list[int]
    rows: list[Logits]

    @property
    def group(self) -> str:
        """The texts that it is judged with: attention reads cells by blocks."""
        is_long = len(self.prompt) + len(self.coming) > _BLOCK
        return _BEYOND if is_long else f"texts within {_BLOCK} cells"

    def with_wrong_cell(self, source: random.Random, n_vocab: int) -> ForcedText:
        """Return the text after a prompt of whose last tokens, but the very last, one is wrong."""
        prompt = list(self.prompt)
        place = source.randrange(max(0, len(prompt) - _NEAR), len(prompt) - 1)
        prompt[place] = (prompt[place] + 1 + source.randrange(n_vocab - 1)) % n_vocab
        return ForcedText(prompt, self.coming, self.rows)


def plain_texts(setting: Setting, target: TargetModel) -> Generator[ForcedText]:
    """Yield texts of plain decoding, without end, as users have it: of a session without drafter.

    They fit into the target with their last round. The second has a prompt of more than 256
    tokens, if that fits. Raises `UnsupportedModelError` if no prompt does. The first are kept for
    other checks.
    """
    n_positions = min(target.n_positions, setting.context.n_ctx)
    room = n_positions - LENGTH - setting.max_nodes - 1
    if room < _SHORTEST:
        why = f"{LENGTH} tokens after a prompt do not fit into a context of {n_positions}"
        raise UnsupportedModelError(f"{why}: raise the context size (-c)")
    prompts = [prompt[:room] for prompt in _real_prompts(setting)]
    yield from setting.forced
    with setting.session(NoDrafter()) as plain:
        ends = list(plain.vocabulary.end_of_generation)
        for prompt in islice(cycle(prompts), len(setting.forced), None):
            text = _go_on(plain.target, prompt, ends)
            if len(setting.forced) < _KEPT:
                setting.forced.append(text)
            yield text


def _real_prompts(setting: Setting) -> list[list[int]]:
    """Return beginnings and questions, every fourth from the second on a long article."""
    pairs = demo_pairs()
    pieces = [" ".join(pair) for pair in pairs]
    short = iter([*PROMPTS, *(pair.question for pair in pairs)])
    texts: list[str] = []
    for start in range(0, len(pairs), 4):
        article = "\n".join(pieces[start : start + _ARTICLE])
        texts += [next(short), article, next(short), next(short)]
    return [setting.model.vocabulary.tokenize(text)[:_LONG] for text in texts]


def _go_on(target: TargetModel, prompt: list[int], ends: list[int]) -> ForcedText:
    """Let plain decoding go on with a prompt, greedily, with anything but an end token."""
    text, rows = CachedText(), list[Logits]()
    target.rewind(text, 0)
    text.tokens = list(prompt)
    target.prefill(text, len(prompt) - 1)
    for _ in range(LENGTH):
        rows.append(target.evaluate(text, DraftTree()).logits(0).copy())
        target.commit(text, DraftTree(), ())
        going_on = rows[-1].copy()
        going_on[ends] = -np.inf
        text.tokens.append(int(going_on.argmax()))
    return ForcedText(prompt, text.tokens[len(prompt) :], rows)


def known_text(target: TargetModel, prompt: list[int], coming: list[int]) -> ForcedText:
    """Return a text that is known, with the rows that plain decoding has."""
    text = ForcedText(prompt, coming, [])
    rows = force(target, CachedText(), text, lambda *_: (DraftTree(), ()))
    return ForcedText(prompt, coming, [row.copy() for row in rows if row is not None])


# -- rounds ----------------------------------------------------------------------------------------


class Round(NamedTuple):
    """How many tokens an evaluation had, and how many drafts were kept of them."""

    width: int
    kept: int


Draft = Callable[[CachedText, Sequence[int]], tuple[DraftTree, Sequence[int]]]
"""Returns a tree for the next tokens of a text, and the path of it that is to be kept."""


def force(
    target: TargetModel, text: CachedText, forced: ForcedText, draft: Draft
) -> Iterator[Logits | None]:
    """Yield the row that decides each token, valid until the next; None: an evaluation is due.

    The earlier content of `text` is dropped from the target.
    """
    target.rewind(text, 0)
    text.tokens = list(forced.prompt)
    target.prefill(text, len(text.tokens) - 1)
    evaluator: Target = target  # a slot has no rows before the others' requests, too
    done = 0
    while done < len(forced.coming):
        tree, path = draft(text, forced.coming[done:])
        while (rows := evaluator.evaluate(text, tree)) is None:
            yield None
        yield from (rows.logits(node + 1) for node in (ROOT, *path))
        target.commit(text, tree, path)
        done += len(path) + 1
        text.tokens.append(forced.coming[done - 1])


def n_uncached(text: CachedText) -> int:
    """Return how many tokens of a text the next evaluation has in addition to the drafts."""
    return len(text.tokens) - text.n_cached


class TreeDrafts:
    """Random trees that hold some of the next tokens; notes the rounds that they make."""

    def __init__(self, drafter: ForkingDrafter) -> None:
        self._drafter = drafter
        self.rounds: list[Round] = []

    def __call__(self, text: CachedText, coming: Sequence[int]) -> tuple[DraftTree, list[int]]:
        """Return a tree, and the path of it that holds most of the next tokens but the last."""
        most, right = self._drafter.max_nodes, coming[:-1]
        tree = self._drafter.tree(most, most, right)
        path, node = list[int](), ROOT
        children = {(parent, tree.tokens[at]): at for at, parent in enumerate(tree.parents)}
        for token in right:
            if (node := children.get((node, token), ROOT)) == ROOT:
                break
            path.append(node)
        self.rounds.append(Round(n_uncached(text) + len(tree), len(path)))
        return tree, path


def chain_drafts(rounds: Iterable[Round], source: random.Random, n_vocab: int) -> Draft:
    """Return drafts that make these rounds of chains: kept tokens are right, the rest random."""
    waiting = iter(rounds)

    def draft(text: CachedText, coming: Sequence[int]) -> tuple[DraftTree, range]:
        width, kept = next(waiting)
        n_wrong = max(0, width - n_uncached(text) - kept)
        wrong = [source.randrange(n_vocab) for _ in range(n_wrong)]
        return DraftTree.chain([*coming[:kept], *wrong]), range(kept)

    return draft


def whole_drafts(rounds: Iterable[Round]) -> Draft:
    """Return drafts as wide as these rounds, by turns, of which all are right."""
    waiting = cycle(rounds)

    def draft(text: CachedText, coming: Sequence[int]) -> tuple[DraftTree, range]:
        right = list(coming[: min(next(waiting).width - n_uncached(text), len(coming) - 1)])
        return DraftTree.chain(right), range(len(right))

    return draft


# -- how far rows are apart ------------------------------------------------------------------------


@dataclass(slots=True)
class Drift:
    """How far the rows of texts are from those of plain decoding.

    `variations` are total variations, for each half of a text; `n_flips` counts rows with another
    most likely token, `n_equal` those of equal bits. `shift` is the largest by which three tokens
    of a row move against each other, in nats: the most likely one, and two that are drawn.
    """

    variations: list[list[float]] = field(default_factory=list)
    n_flips: int = 0
    n_equal: int = 0
    shift: float = 0.0
    _source: random.Random = field(default_factory=lambda: random.Random(0))

    def add(self, rows: Iterable[Logits | None], forced: ForcedText) -> None:
        """Add the rows of a text."""
        found: list[float] = []
        for row, plain in zip(rows, forced.rows, strict=True):
            assert row is not None
            found.append(self._distance(row, plain))
        self.variations += [found[: len(found) // 2], found[len(found) // 2 :]]

    def _distance(self, row: Logits, plain: Logits) -> float:
        if (row == plain).all():
            self.n_equal += 1
            return 0.0
        best, flat = int(plain.argmax()), RawLaw(plain / _FLATTER)
        self.n_flips += int(row.argmax() != best)
        tokens = [best, *(flat.token_at(self._source.random()) for _ in range(2))]
        self.shift = max(self.shift, float(np.ptp(row[tokens] - plain[tokens])))
        return total_variation(RawLaw(row), RawLaw(plain))

    @property
    def n_tokens(self) -> int:
        """How many tokens were compared."""
        return sum(map(len, self.variations))

    @property
    def mean(self) -> float:
        """The total variation a token."""
        return sum(map(sum, self.variations)) / max(1, self.n_tokens)

    @property
    def largest(self) -> float:
        """The largest total variation of a row."""
        return max(map(max, self.variations), default=0.0)

    @property
    def rate(self) -> float:
        """How often a text parts, a token: sampled or, if that is more, greedy."""
        return max(self.mean, self.n_flips / max(1, self.n_tokens))

    @property
    def n_unequal(self) -> int:
        """How many rows have other bits."""
        return self.n_tokens - self.n_equal

    @property
    def is_equal(self) -> bool:
        """Whether all rows have the same bits."""
        return self.n_unequal == 0

    @property
    def is_quiet(self) -> bool:
        """Whether no row is off by more than the floor of detectable errors."""
        return self.largest <= FLOOR

    def __str__(self) -> str:
        return f"{self.mean:.2g} a token, {self.n_flips} flips"

    def partings(self) -> str:
        """Return how often texts part, in words."""
        if self.is_quiet and not self.n_flips:
            return f"not in the {self.n_tokens:,} tokens tried"
        flips = self.n_flips
        greedy = f"every {self.n_tokens / flips:,.0f}" if flips else f"in none of {self.n_tokens:,}"
        return f"about every {1 / self.mean:,.0f} tokens at temperature 1 (greedy ones {greedy})"


class Excess(NamedTuple):
    """By how much more total variation a token has, and how much of it noise explains."""

    mean: float
    bound: float

    @property
    def is_seen(self) -> bool:
        """Whether noise does not explain it."""
        return not self.mean <= self.bound  # NaN is not explained either


def excess(ours: Drift, theirs: Drift, wrong: Drift, times: float = 1.0, *, quiet: bool) -> Excess:
    """Return by how much a drift exceeds `times` that of the same tokens in other rounds.

    The bound of `quiet` rounds is a floor, else sampling error. If both were noise of one size,
    the difference of each half text would have either sign with the same probability, and the sum
    of such differences exceeds sqrt(2 ln(1/ALPHA)) times the root of the sum of their squares with
    a probability of at most ALPHA, however large they are (Hoeffding). Single tokens would not do:
    the rounding of one cell moves all later rows. Few texts have a large error; then the bound
    is half of the error of a `wrong` cell, if that is far beyond noise.
    """
    pairs = zip(ours.variations, theirs.variations, strict=True)
    apart = [sum(half) - times * sum(same) for half, same in pairs]
    mean = sum(apart) / ours.n_tokens
    if quiet:
        return Excess(mean, FLOOR)
    squares = sum(each * each for each in apart)
    bound = math.sqrt(2 * math.log(1 / ALPHA) * squares) / ours.n_tokens
    if wrong.mean > _FAR * theirs.mean:
        bound = min(bound, (wrong.mean - theirs.mean) / 2)
    return Excess(mean, max(FLOOR, bound))


# -- reports ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Finding:
    """By how much some rounds exceed others of the same widths.

    `problem` names the fault if that is more than noise, `texts` the texts that had it; `control`
    is the amount by which a wrong cell exceeds the same others.
    """

    texts: str
    problem: str
    excess: Excess
    control: float

    @property
    def is_told(self) -> bool:
        """Whether a wrong cell would have been seen."""
        return self.control > self.excess.bound


def report(check: Check, findings: Sequence[Finding]) -> Check:
    """Return a check with its results: status, figures and control; notes before its own."""
    wrong = [each for each in findings if each.excess.is_seen]
    told = [each for each in findings if each.is_told]
    shown = max(wrong or told or findings, key=lambda each: each.excess.mean - each.excess.bound)
    notes = list(dict.fromkeys(f"{each.texts}: {each.problem}" for each in wrong))
    if all(each.texts != _BEYOND for each in findings):
        notes.append(f"no {_BEYOND} fit the context")
    untold = dict.fromkeys(each.texts for each in findings if not each.is_told)
    notes += [f"{texts}: too few to tell noise from faults, raise --minutes" for texts in untold]
    return dataclasses.replace(
        check,
        status=judged(not wrong, bool(told)),
        figure=shown.excess.mean,
        bound=shown.excess.bound,
        control=f"a wrong cell in the prompt makes {shown.control:.2g}",
        note="; ".join([*notes, check.note]),
    )
