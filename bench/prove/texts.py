"""Texts of a pair against plain decoding: the same text, the same distribution, also after faults.

Drafts that are chosen rather than drawn change no token at any temperature, and at temperature 0 no
drafts do. If evaluations vary in width, rounding may turn a choice between two tokens that are
almost equally likely: texts may then part, but neither between tokens that are further apart than
chains were seen to move them, nor more often than chains explain. Texts whose drafts are drawn can
only be compared in distribution: by a chi-square test.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specrun.bench.prove.faults import Fault, take_answer
from specrun.bench.prove.setting import ALPHA, Check, ForkingDrafter, Setting, judged
from specrun.runtime.acceptance import PairRule, SequentialCascade
from specrun.runtime.drafters.build import build_drafter
from specrun.runtime.drafters.environment import DraftEnvironment
from specrun.runtime.engine import Session
from specrun.runtime.laws import Law, SamplingParams, SeededNoise, transformed_law
from specrun.runtime.round import Conversation, NoDrafter, common_prefix
from specrun.runtime.trees import DraftTree

_TEMPERATURES = (0.0, 0.7, 1.3)
_LENGTH = 32  # tokens of a text that is compared

_TIMES_RATE = 2.0  # at other temperatures than that at which it was measured

_DEPTH = 3  # tokens of a text whose distribution is tested
_LEAST_TEXTS, _MOST_TEXTS = 150, 1500
_EXPECTED = 5.0  # texts in a cell
_CELLS = 8
_LAWS = 48  # prefixes whose distributions are computed
_TILTS = (1.1, 1.25, 1.5, 2.0, 3.0)

_FAULTY_LENGTH = 16  # tokens of an answer that a fault may cut short
_MOST_FAULTS = 40
_LEAST_FAULTS = 6

Text = tuple[int, ...]


def sampled(temperature: float) -> SamplingParams:
    """Return settings without truncation: rounding may turn a truncation."""
    return SamplingParams(temperature=temperature, top_k=0, top_p=1.0, min_p=0.0)


def answer(
    session: Session,
    prompt: Sequence[int],
    params: SamplingParams,
    seed: int,
    length: int = _LENGTH,
) -> list[int]:
    """Return an answer's tokens."""
    return session.stream(prompt, params, seed=seed, max_tokens=length).drain().token_ids


def plain_law(session: Session, tokens: Sequence[int], params: SamplingParams) -> Law:
    """Return the distribution after tokens, by an evaluation without drafts."""
    conversation: Conversation = session.conversation
    conversation.begin(session.target, tokens)
    rows = session.target.evaluate(conversation, DraftTree())
    law = transformed_law(rows.logits(0), params)
    return Law(law.probs.copy(), law.ids)


def parting(
    session: Session,
    prompt: Sequence[int],
    texts: tuple[Sequence[int], Sequence[int]],
    temperature: float,
    seed: int,
) -> float | None:
    """Return the distance, in nats of logits, of the two tokens at which texts part.

    That is by how much the other text's token would have to gain on the one that plain decoding
    takes, for it to be taken by the same draw. None if the texts are the same; infinite if one is
    longer, which no rounding explains.
    """
    ours, plain = texts
    pairs = enumerate(zip(ours, plain, strict=False))
    place = next((index for index, (a, b) in pairs if a != b), None)
    if place is None:
        return None if len(ours) == len(plain) else math.inf
    law = plain_law(session, [*prompt, *plain[:place]], sampled(temperature or 1.0))
    plain_now, ours_now, gains = plain[place], ours[place], (0.0, 20.0)
    chances = [law.probability(token) for token in (plain_now, ours_now)]
    if min(chances) <= 0.0:
        return math.inf
    if temperature == 0.0:
        return abs(math.log(chances[0] / chances[1]))
    noise = SeededNoise.for_answer(seed, prompt)

    def taken(gain: float) -> bool:
        # The draw is a race, so the two need no others, whatever a grammar forbids of these.
        weights = np.array([chances[0], chances[1] * math.exp(gain)])
        noise.seek(len(prompt) + place)
        return noise.choose(_law_of_two((plain_now, ours_now), weights)) == ours_now

    if not taken(gains[1]):
        return math.inf
    while gains[1] - gains[0] > 1e-6:  # the draw is a race: gaining never loses it
        middle = sum(gains) / 2
        gains = (gains[0], middle) if taken(middle) else (middle, gains[1])
    return temperature * gains[1]


def _law_of_two(tokens: tuple[int, int], weights: npt.NDArray[np.float64]) -> Law:
    order = np.argsort(tokens)
    return Law.normalised(weights[order], np.array(tokens)[order])


def most_partings(expected: float) -> int:
    """Return how many there are at most, but for a probability of ALPHA, of so many expected.

    By the law of Poisson, of rare events.
    """
    most, chance = 0, math.exp(-expected)
    within = chance
    while within < 1.0 - ALPHA:
        most += 1
        chance *= expected / most
        within += chance
    return most


class Partings:
    """The partings of texts from plain decoding's, and the part of them that rounding explains."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._distances: list[float] = []
        self.n_tokens = 0

    def add(
        self,
        plain: Session,
        prompt: Sequence[int],
        texts: tuple[Sequence[int], Sequence[int]],
        temperature: float,
        seed: int,
    ) -> None:
        """Compare a text with plain decoding's, the second."""
        self.n_tokens += 1 + common_prefix(*texts)
        found = parting(plain, prompt, texts, temperature, seed)
        self._distances += [] if found is None else [found]

    def __len__(self) -> int:
        return len(self._distances)

    @property
    def n_unexplained(self) -> int:
        """How many are too far apart for rounding; in a fixed shape all are."""
        bound = -1.0 if self._setting.width is not None else self._setting.near
        return sum(distance > bound for distance in self._distances)

    @property
    def largest(self) -> float | None:
        """How close the tokens of the clearest parting are, in nats; None if not at all."""
        largest = max(self._distances, default=0.0)
        return largest if math.isfinite(largest) else None

    @property
    def problem(self) -> str:
        """The partings that rounding does not explain; empty if it explains all."""
        setting, found = self._setting, self._distances
        if setting.width is not None:
            return f"{len(found)} texts part from plain decoding's" if found else ""
        if far := self.n_unexplained:
            return f"{far} texts part from plain decoding's"
        n, most = sum(distance > setting.step for distance in found), self._most
        problem = f"{n} texts part from plain decoding's in {self.n_tokens} tokens, chains explain"
        return f"{problem} {most}" if n > most else ""

    @property
    def _most(self) -> int:
        return most_partings(_TIMES_RATE * self._setting.rate * self.n_tokens)

    @property
    def false_alarm(self) -> str:
        """How probable a failure of a sound pair is, in words."""
        if self._setting.width is not None:
            return "none: the bits must be the same"
        return (
            "no figure of how far tokens are apart: twice that of chains, or that of one step of "
            f"the cache's type; {ALPHA:g} of more than {self._most} partings in "
            f"{self.n_tokens} tokens, at {_TIMES_RATE:g} times the rate of chains"
        )


def _point_masses(
    setting: Setting, opened: ExitStack
) -> list[tuple[Session, ForkingDrafter | None]]:
    """Return sessions whose drafts are chosen, no larger than those of the pair."""
    forking = setting.forking_drafter("texts")
    environment = DraftEnvironment(setting.model, setting.context, by_clock=False)
    size = f"n={min(4, setting.max_nodes)}, nodes={setting.max_nodes}"
    lookup = f"prompt-lookup(min_ngram=1, {size}, branches={min(4, setting.max_leaves)})"
    weights = build_drafter(lookup, environment)
    return [
        (opened.enter_context(setting.session(forking)), forking),
        (opened.enter_context(setting.session(weights.start())), None),
    ]


def check_texts(setting: Setting) -> Check:
    """Compare texts with plain decoding's: point masses at every temperature, all drafters at 0."""
    deadline = setting.deadline(0.2)
    partings, control, times = Partings(setting), Partings(setting), 0
    tried: dict[float, None] = {}
    # At temperature 0 all other rules give plain decoding's text, whatever the drafter.
    states_its_own = isinstance(setting.rule, PairRule | SequentialCascade)
    with ExitStack() as opened:
        drafting = _point_masses(setting, opened)
        plain = opened.enter_context(setting.session(NoDrafter()))
        for number, prompt in enumerate(setting.prompts()):
            for temperature in _TEMPERATURES:
                # Texts and a control there have to be.
                if (number or control.problem) and time.monotonic() > deadline:
                    break
                tried[temperature] = None
                params, seed = sampled(temperature), setting.seed + number
                wanted = answer(plain, prompt, params, seed)
                sessions = list(drafting)
                if temperature == 0.0 and not states_its_own:
                    sessions.append((setting.runtime.session, None))
                for session, forking in sessions:
                    if forking is not None:
                        forking.text = [*prompt, *wanted]
                    ours = answer(session, prompt, params, seed)
                    partings.add(plain, prompt, (ours, wanted), temperature, seed)
                    times += 1
                if temperature > 0.0:  # another seed's texts have to part, and not by rounding
                    ours = answer(plain, prompt, params, seed + 1000)
                    control.add(plain, prompt, (ours, wanted), temperature, seed)
    return Check(
        "same text",
        judged(not partings.problem, bool(control.problem)),
        f"texts of at most {_LENGTH} tokens, {partings.n_tokens:,} in all until they part, drafted "
        f"by random trees and prompt lookup at temperatures {', '.join(map('{:g}'.format, tried))}"
        + (", under the exact rule" if states_its_own else ", and by the drafter at 0"),
        times,
        partings.largest,
        setting.near,
        f"nats between the tokens where texts part ({len(partings)} did), the largest",
        partings.false_alarm,
        f"of another seed {control.problem or 'no texts part but by rounding'}",
        partings.problem,
    )


def check_faults(setting: Setting) -> Check:
    """Let evaluations fail and interrupts come; the next answer has to be plain decoding's.

    Under a rule that states a distribution of its own it has to be that of the session when it was
    fresh.
    """
    source, deadline = setting.source("faults"), setting.deadline(0.15)
    params, prompts = sampled(0.0), setting.prompts()
    partings, session = Partings(setting), setting.runtime.session
    times, cut = 0, 0
    with setting.session(NoDrafter()) as plain:
        wanted: dict[int, list[int]] = {}
        for number in range(
            len(prompts) if isinstance(setting.rule, PairRule | SequentialCascade) else 0
        ):
            session.forget()
            wanted[number] = answer(session, prompts[number], params, 0, _FAULTY_LENGTH)
        while times < _MOST_FAULTS and (times < _LEAST_FAULTS or time.monotonic() < deadline):
            hit = source.randrange(len(prompts))
            # The same again takes all of the cache that the fault has left.
            asked = source.choice((hit, source.randrange(len(prompts))))
            stream = session.stream(prompts[hit], params, seed=0, max_tokens=_FAULTY_LENGTH)
            fault: Fault = source.choice(("interrupted", "decode failed"))
            cut += not take_answer(setting.runtime, stream, fault, source)
            ours = answer(session, prompts[asked], params, 0, _FAULTY_LENGTH)
            if asked not in wanted:
                wanted[asked] = answer(plain, prompts[asked], params, 0, _FAULTY_LENGTH)
            partings.add(plain, prompts[asked], (ours, wanted[asked]), 0.0, 0)
            times += 1
    return Check(
        "faults",
        judged(not partings.problem, cut > 0),
        "answers after a failed evaluation or an interrupt at a random line",
        times,
        partings.largest,
        setting.near,
        f"nats between the tokens where answers part ({len(partings)} did), the largest",
        partings.false_alarm,
        f"{cut} answers were cut short by their fault",
        f"answers are not a fresh session's: {partings.problem}" if partings.problem else "",
    )


# -- the distribution of texts ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fit:
    """A chi-square test: its statistic, degrees of freedom and p-value."""

    statistic: float
    freedom: int
    p_value: float


def chi_square_tail(statistic: float, freedom: int) -> float:
    """Return the probability that a chi-square variable of so many degrees exceeds `statistic`.

    By the recurrence Q(k) = Q(k - 2) + (x/2)^(k/2 - 1) exp(-x/2) / Gamma(k/2).
    """
    half = statistic / 2
    if half <= 0.0:
        return 1.0
    odd = freedom % 2
    tail = math.erfc(math.sqrt(half)) if odd else math.exp(-half)
    for k in range(3 if odd else 4, freedom + 1, 2):
        tail += math.exp((k / 2 - 1) * math.log(half) - half - math.lgamma(k / 2))
    return min(1.0, tail)


def tilted(laws: Mapping[Text, Law], factor: float) -> dict[Text, Law]:
    """Return the distributions at `factor` times their temperature: those of a wrong sampler."""
    return {
        prefix: Law.normalised(law.probs ** (1.0 / factor), law.ids) for prefix, law in laws.items()
    }


def fit(texts: Sequence[Text], laws: Mapping[Text, Law]) -> Fit:
    """Test texts against distributions of all tokens, after some of their beginnings, () included.

    Each text falls into the cell of its shortest beginning that has no distribution. Cells that
    expect fewer than 5 texts are pooled with their siblings, likeliest first, so that a
    distribution of many rare tokens has many cells, too; the rest of a beginning is pooled with the
    rest of the others.
    """
    n_texts = len(texts)
    chances: dict[Text, float] = {(): 1.0}
    expected: list[float] = []
    observed: list[int] = []
    rest: list[tuple[float, int]] = []
    for prefix in sorted(laws, key=len):
        probs = laws[prefix].probs
        deeper = [path[-1] for path in laws if path and path[:-1] == prefix]
        chances |= {(*prefix, token): chances[prefix] * float(probs[token]) for token in deeper}
        weights = n_texts * chances[prefix] * probs
        weights[deeper] = 0.0
        begun = [text for text in texts if text[: len(prefix)] == prefix and text != prefix]
        counts = np.bincount([text[len(prefix)] for text in begun], minlength=len(probs))
        counts[deeper] = 0
        if counts[len(probs) :].any() or counts[: len(probs)][weights == 0.0].any():
            return Fit(math.inf, max(1, len(expected)), 0.0)  # an excluded token
        for weight, count in _cells(weights, counts):
            if weight >= _EXPECTED:
                expected.append(weight)
                observed.append(count)
            else:
                rest.append((weight, count))
    left, n_left = sum(weight for weight, _ in rest), sum(count for _, count in rest)
    if left >= _EXPECTED or not expected:
        expected.append(left)
        observed.append(n_left)
    else:  # to the smallest cell, so that each expects enough
        smallest = expected.index(min(expected))
        expected[smallest] += left
        observed[smallest] += n_left
    statistic = sum(
        (count - weight) ** 2 / weight for weight, count in zip(expected, observed, strict=True)
    )
    freedom = len(expected) - 1
    return Fit(statistic, freedom, chi_square_tail(statistic, freedom))


def _cells(
    weights: npt.NDArray[np.float64], counts: npt.NDArray[np.int64]
) -> list[tuple[float, int]]:
    """Pool one beginning's tokens, likeliest first; return the cells' expected and found counts.

    All but the last of the pooled expect 5 or more.
    """
    order = np.argsort(-weights, kind="stable")[: np.count_nonzero(weights)]
    weights, counts = weights[order], counts[order]
    n_large = int((weights >= _EXPECTED).sum())
    # Tokens of less than 5 each that begin within ten make at least 5 together.
    before = np.cumsum(weights[n_large:]) - weights[n_large:]
    pools = np.concatenate([np.arange(n_large), n_large + (before // (2 * _EXPECTED)).astype(int)])
    sums, numbers = np.bincount(pools, weights), np.bincount(pools, counts)
    return [(float(weight), int(count)) for weight, count in zip(sums, numbers, strict=True)]


def likely_laws(
    law_after: Callable[[Text], Law], n_texts: int, end_tokens: frozenset[int]
) -> dict[Text, Law]:
    """Return the distributions after the likeliest beginnings, which enough texts will have."""
    laws: dict[Text, Law] = {}
    waiting: list[tuple[float, Text]] = [(1.0, ())]
    while waiting and len(laws) < _LAWS:
        chance, prefix = max(waiting)
        waiting.remove((chance, prefix))
        laws[prefix] = law = law_after(prefix)
        if len(prefix) + 1 == _DEPTH:
            continue
        for token in np.flatnonzero(n_texts * chance * law.probs >= 4 * _EXPECTED).tolist():
            if token not in end_tokens:
                waiting.append((chance * float(law.probs[token]), (*prefix, token)))
    return laws


def check_law(setting: Setting) -> Check:
    """Sample short texts with the pair, and test them against plain evaluation's distribution."""
    rule, session = setting.rule, setting.runtime.session
    if not rule.exact:
        why = f"{rule.name} is not exact: its texts do not have the target's distribution"
        return Check("distribution of texts", "left out", note=why)
    prompt, temperature = _open_question(setting)
    params = sampled(temperature)
    texts: list[Text] = []
    # A text's draws depend on its number alone, so when time is over changes no text.
    deadline = setting.deadline(0.25)
    while len(texts) < _MOST_TEXTS and (len(texts) < _LEAST_TEXTS or time.monotonic() < deadline):
        stream = session.stream(
            prompt, params, seed=setting.seed, index=len(texts), max_tokens=_DEPTH
        )
        texts.append(tuple(stream.drain().token_ids))
    with setting.session(NoDrafter()) as plain:
        laws = likely_laws(
            lambda prefix: plain_law(plain, [*prompt, *prefix], params),
            len(texts),
            session.vocabulary.end_of_generation,
        )
    found = fit(texts, laws)
    seen = next((tilt for tilt in _TILTS if fit(texts, tilted(laws, tilt)).p_value < ALPHA), None)
    control = "no distribution that is wrong by its temperature is rejected: too few texts to tell"
    if seen is not None:
        control = f"texts of {seen:g} times the temperature are rejected with the same test"
    sound = found.p_value >= ALPHA
    status = judged(sound, seen is not None)
    problem = f"chi-square {found.statistic:.1f} at {found.freedom} degrees of freedom"
    return Check(
        "distribution of texts",
        status,
        f"texts of {_DEPTH} tokens at temperature {temperature:g}; chi-square, "
        f"{found.freedom} degrees of freedom",
        len(texts),
        found.p_value,
        ALPHA,
        "p-value (at least)",
        f"about {ALPHA:g}, and more only if drafts move the logits by rounding",
        control,
        {"failed": problem, "left out": control}.get(status, ""),
    )


def _open_question(setting: Setting) -> tuple[list[int], float]:
    """Return a prompt and the least temperature with enough cells for a test."""
    prompts = setting.prompts()
    with setting.session(NoDrafter()) as plain:
        for temperature in (1.0, 1.5, 2.0, 3.0):
            for prompt in prompts:
                weights = _LEAST_TEXTS * plain_law(plain, prompt, sampled(temperature)).probs
                if len(_cells(weights, np.zeros(len(weights), dtype=np.int64))) >= _CELLS:
                    return prompt, temperature
    return prompts[0], 3.0
