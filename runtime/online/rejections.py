"""The replay buffer of online speculative decoding (Liu et al. 2023, section 3.2).

Where a draft is rejected, the target's row at that place says what should have been drafted. The
buffer keeps it with the text before it: contexts and laws, answer by answer, the oldest dropped
first. Of a row it keeps the law at temperature 1, whatever the answer was sampled at: its
KEPT_TOKENS most likely tokens with their log-probabilities in float16, and how much is left for
all others together. That is 390 bytes a place where a whole row of 32,000 tokens takes 64,000, and
a divergence of the two coarser laws is never more than that of the whole ones (data processing).

The paper empties its buffer after every update. This one forgets the oldest only: a drafter that
learns from few places again and again unlearns the others.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import OptionError
from specrun.runtime.transform import Logits

KEPT_TOKENS = 64
"""How many tokens of a law are kept by name."""

MOST_BYTES = 16 << 20
"""What a buffer holds at most: about 40,000 places."""

_LEAST = -30.0  # the logarithm that stands for nothing at all: finite, also in float16
_ANSWER_BYTES = 64

TokenArray: TypeAlias = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class KeptLaws:
    """Laws of `n` places: token ids [n, K], and their log-probabilities [n, K + 1] in float16.

    The last column is the logarithm of what all other tokens have together.
    """

    ids: TokenArray
    log_probs: npt.NDArray[np.float16]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class RejectedAnswer:
    """A text and the places in it where drafts were rejected.

    `tokens` [T] end with the last of them; the law `laws[i]` is that of the token after
    `positions[i]`, ascending.
    """

    tokens: TokenArray
    positions: TokenArray
    laws: KeptLaws

    @property
    def n_bytes(self) -> int:
        """What it takes, in memory and in a file, nearly."""
        arrays = (self.tokens, self.positions, self.laws.ids, self.laws.log_probs)
        return _ANSWER_BYTES + sum(array.nbytes for array in arrays)

    @property
    def digest(self) -> bytes:
        """A hash of its text: what decides whether it is learnt or measured on."""
        return hashlib.sha256(self.tokens.tobytes()).digest()


def likeliest(logits: Logits, count: int) -> tuple[TokenArray, npt.NDArray[np.float16]]:
    """Return the `count` most likely tokens of a row, ascending by id, and the law's logarithms.

    Those are float16 [count + 1], the last one of all other tokens together. Raises OptionError for
    a row without a finite number.
    """
    row = logits.astype(np.float64)
    highest = float(row.max())
    if not np.isfinite(highest):
        raise OptionError(f"a row of logits has the largest number {highest}: it is no law")
    weights = np.exp(row - highest)
    count = min(count, len(row))
    ids = np.sort(np.argpartition(row, len(row) - count)[len(row) - count :])
    rest = weights.sum() - weights[ids].sum()
    kept = np.append(weights[ids], max(rest, 0.0)) / weights.sum()
    logs = np.log(np.maximum(kept, np.exp(_LEAST)))
    return ids.astype(np.int32), logs.astype(np.float16)


class RejectionNotes:
    """What was rejected in the answer that one conversation is making, for a buffer of all answers.

    `note` takes places while an answer is made, `end_answer` closes it. Nothing is kept of an
    answer whose drafts were all accepted.
    """

    def __init__(self, buffer: RejectionBuffer) -> None:
        self._buffer = buffer
        self._pending: list[tuple[int, TokenArray, npt.NDArray[np.float16]]] = []

    def note(self, position: int, logits: Logits) -> None:
        """Note that a draft after the token at `position` was rejected; copy what the row says."""
        self._pending.append((position, *likeliest(logits, self._buffer.kept_tokens)))

    def end_answer(self, tokens: Sequence[int]) -> None:
        """Keep what was noted of an answer whose prompt and tokens these are."""
        places, self._pending = self._pending, []
        places = [place for place in places if place[0] < len(tokens)]
        if not places:
            return
        positions = np.array([position for position, _, _ in places], np.int32)
        laws = KeptLaws(np.stack([ids for _, ids, _ in places]), np.stack([p for *_, p in places]))
        text = np.array(tokens[: int(positions[-1]) + 1], np.int32)
        self._buffer.add(RejectedAnswer(text, positions, laws))


class RejectionBuffer:
    """Answers with rejected drafts, at most `most_bytes` of them; the oldest go first.

    Every conversation that fills it has `notes` of its own.
    """

    def __init__(self, *, most_bytes: int = MOST_BYTES, kept_tokens: int = KEPT_TOKENS) -> None:
        if most_bytes < 1 or kept_tokens < 1:
            raise OptionError(f"a buffer of {most_bytes} bytes, {kept_tokens} tokens a law: give 1")
        self.most_bytes, self.kept_tokens = most_bytes, kept_tokens
        self._answers: deque[RejectedAnswer] = deque()
        self._n_bytes = 0
        self.n_changes = 0
        """Counts up whenever it changes."""

    def __len__(self) -> int:
        return len(self._answers)

    def __iter__(self) -> Iterator[RejectedAnswer]:
        return iter(tuple(self._answers))

    @property
    def n_places(self) -> int:
        """How many rejected drafts it tells of."""
        return sum(len(answer.laws) for answer in self._answers)

    @property
    def n_bytes(self) -> int:
        """What its answers take."""
        return self._n_bytes

    def notes(self) -> RejectionNotes:
        """Return what takes the rejected drafts of another conversation."""
        return RejectionNotes(self)

    def add(self, answer: RejectedAnswer) -> None:
        """Add an answer, and drop the oldest until all fit; one that is too large is not kept."""
        if answer.n_bytes > self.most_bytes:
            return
        self._answers.append(answer)
        self.n_changes += 1
        self._n_bytes += answer.n_bytes
        while self._n_bytes > self.most_bytes:
            self._n_bytes -= self._answers.popleft().n_bytes

    def clear(self) -> None:
        """Forget everything."""
        self._answers.clear()
        self._n_bytes = 0
        self.n_changes += 1  # it is another buffer now
