"""Replay of decoding along a known text: what a drafter would have gained, without the target.

Drafts that are point masses are accepted exactly where they are what the text says next, so how a
drafter fares along a text is a function of the text. With a cost curve T(n), the time of an
evaluation of n tokens, it says what a drafter gains: every round of n drafted nodes takes T(1 + n),
plain decoding T(1) for every token. Nothing is timed, so the figures are the same on any machine,
however busy, and `auto`, which measures, is given a clock that these costs move. A text may be
anything; those that a target wrote at temperature 0 show what would happen on its answers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from specrun.bindings.errors import OptionError
from specrun.runtime.laws import SamplingParams, SeededNoise
from specrun.runtime.planning import CostCurve
from specrun.runtime.round import Drafter, DraftRequest
from specrun.runtime.round.drafter import NOTHING, RoundOutcome
from specrun.runtime.trees import ROOT, DraftTree

FIRST = 64
"""Tokens of an answer after which a drafter has to know whether drafting pays."""

_LONGEST_ANSWER = 1 << 20


@dataclass(frozen=True, slots=True)
class ReplayText:
    """A prompt and how it goes on, as token ids; `name` says what it is an example of.

    `end_tokens` are those after which a model would have said nothing more.
    """

    name: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    end_tokens: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if not self.prompt or not self.answer:
            least = "a prompt and an answer of at least one token each"
            raise OptionError(f"{self.name}: a text to replay has {least}")


@dataclass(frozen=True, slots=True)
class ReplayRound:
    """One round: nodes drafted, tokens accepted, tokens produced, and its time."""

    drafted: int
    accepted: int
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """One drafter over the texts of one name; speed-ups are over plain decoding on the same curve.

    `late_speed_up` counts what comes after the first 64 tokens of answers, None where no answer was
    that long; `worst_speed_up` is that of the text on which the drafter did worst.
    """

    name: str
    drafter: str
    n_texts: int
    tokens: int
    rounds: int
    drafted: int
    accepted: int
    mean_accepted_length: float
    speed_up: float
    late_speed_up: float | None
    worst_speed_up: float


class ReplayClock:
    """The time of a replay, in seconds of the cost curve."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


def replay(
    drafter: Drafter,
    text: ReplayText,
    curve: CostCurve,
    *,
    clock: ReplayClock | None = None,
    draft_seconds: float = 0.0,
) -> list[ReplayRound]:
    """Return the rounds of decoding a text with a drafter that goes on from what it knows.

    `draft_seconds` is what every depth of a draft costs in rounds for which the drafter evaluated
    models of its own. Raises `OptionError` for drafters that read the target's rows, which no text
    has.
    """
    clock = clock or ReplayClock()
    if drafter.reads_target:
        raise OptionError(
            f"{drafter.name} reads the target's states: a text alone cannot replay it"
        )
    whole = (*text.prompt, *text.answer)
    tokens = list(text.prompt)
    params, noise = SamplingParams(temperature=0.0), SeededNoise(0)
    rounds: list[ReplayRound] = []
    drafter.begin(tokens)
    while len(tokens) < len(whole):
        start, evaluated = len(tokens), drafter.native_seconds
        left, tree = _LONGEST_ANSWER - start, NOTHING
        own, asked = noise.for_drafting(start), not drafter.pause.rounds
        if asked:
            tree = drafter.propose(
                DraftRequest(tokens, params, own, left, drafter.max_nodes, text.end_tokens)
            )
        else:
            drafter.pause.rounds -= 1
        seconds = curve.seconds(1 + len(tree))
        if drafter.native_seconds > evaluated:
            seconds += draft_seconds * tree.max_depth
        clock.now += seconds
        path = written_path(tree, whole, start)
        tokens += whole[start : start + len(path) + 1]
        produced = len(tokens) - start
        next_token = tokens[-1] if produced > len(path) else None
        if asked:
            drafter.observe(RoundOutcome(tokens, tree, path, next_token, _NoRows(drafter.name)))
        rounds.append(ReplayRound(len(tree), len(path), produced, seconds))
    return rounds


def replay_all(
    drafter: Drafter,
    texts: Sequence[ReplayText],
    curve: CostCurve,
    *,
    clock: ReplayClock | None = None,
    draft_seconds: float = 0.0,
    keeps_state: bool = False,
) -> ReplayResult:
    """Return how a drafter fares over texts; `keeps_state` leaves it what it learned from one.

    `clock` is the one that the drafter reads, if it reads any.
    """
    if not texts:
        raise OptionError("there is no text to replay")
    answers = []
    for text in texts:
        if not keeps_state:
            drafter.begin(())
        answers.append(replay(drafter, text, curve, clock=clock, draft_seconds=draft_seconds))
    return _result(drafter.name, texts[0].name, answers, curve.seconds(1))


def written_path(tree: DraftTree, text: Sequence[int], position: int) -> tuple[int, ...]:
    """Return the path of the tree that `text` takes from `position` on."""
    children = {
        (parent, tree.tokens[node]): node
        for node, parent in enumerate(tree.parents)
        if tree.is_candidate[node]
    }
    path: list[int] = []
    for token in text[position : position + tree.max_depth]:
        node = children.get((path[-1] if path else ROOT, token))
        if node is None:
            break
        path.append(node)
    return tuple(path)


def _result(
    drafter: str, name: str, answers: Sequence[Sequence[ReplayRound]], plain: float
) -> ReplayResult:
    rounds = list(itertools.chain.from_iterable(answers))
    late = list(itertools.chain.from_iterable(map(_late, answers)))
    tokens = sum(entry.tokens for entry in rounds)
    return ReplayResult(
        name=name,
        drafter=drafter,
        n_texts=len(answers),
        tokens=tokens,
        rounds=len(rounds),
        drafted=sum(entry.drafted for entry in rounds),
        accepted=sum(entry.accepted for entry in rounds),
        mean_accepted_length=tokens / len(rounds),
        speed_up=_speed_up(rounds, plain),
        late_speed_up=_speed_up(late, plain) if late else None,
        worst_speed_up=min(_speed_up(answer, plain) for answer in answers),
    )


def _late(answer: Sequence[ReplayRound]) -> Sequence[ReplayRound]:
    """Return the rounds that begin after the first `FIRST` tokens."""
    tokens = 0
    for index, entry in enumerate(answer):
        if tokens >= FIRST:
            return answer[index:]
        tokens += entry.tokens
    return ()


def _speed_up(rounds: Sequence[ReplayRound], plain: float) -> float:
    """Return the rounds' tokens per second over 1 / `plain`, the rate of plain decoding."""
    return sum(entry.tokens for entry in rounds) * plain / sum(entry.seconds for entry in rounds)


class _NoRows:
    """Stands for rows that a replay does not have."""

    def __init__(self, drafter: str) -> None:
        self._drafter = drafter

    def _refuse(self, *_: object) -> NoReturn:
        raise OptionError(
            f"{self._drafter} reads the target's answers at every node: a text alone cannot "
            "replay it"
        )

    logits = hidden_states = layer_input = nextn_state = _refuse
