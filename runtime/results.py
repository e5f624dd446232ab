"""What callers get: token events while an answer is made, and the finished result."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from specrun.runtime.statistics import SpecStats
from specrun.runtime.transform import Logits, log_probability

__all__ = ["FinishReason", "GenerationResult", "LogprobKeeper", "TokenEvent", "Usage"]

FinishReason = Literal["stop", "length", "cancelled"]
Origin = Literal["drafted", "target"]


class TokenEvent:
    """One token of an answer.

    `text` is the text that became certain with it: empty while a character or a possible stop string is
    incomplete. `origin` is "drafted" for an accepted guess and "target" for the target's own token.
    `round` counts from 0. `logprob` is the target's log-probability in nats, before any transformation.
    """

    __slots__ = ("__weakref__", "_logits", "_logprob", "origin", "round", "text", "token_id")

    def __init__(
        self, text: str, token_id: int, origin: Origin, round_number: int, logits: Callable[[], Logits]
    ) -> None:
        self.text = text
        self.token_id = token_id
        self.origin: Origin = origin
        self.round = round_number
        self._logits = logits
        self._logprob: float | None = None

    @property
    def logprob(self) -> float:
        """The target's log-probability of the token: a softmax over the vocabulary, made when first asked."""
        if self._logprob is None:
            self._logprob = log_probability(self._logits(), self.token_id)
        return self._logprob

    def keep_logits(self, room: Logits | None = None) -> Logits | None:
        """Copy the target's row, which the next evaluation overwrites: cheaper than the softmax.

        The copy goes into `room`, if given, and is returned; where the value is known already, `room` comes back.
        """
        if self._logprob is not None:
            return room
        logits = self._logits()
        copied = np.empty_like(logits) if room is None else room
        np.copyto(copied, logits)
        self._logits = lambda: copied
        return copied

    def __repr__(self) -> str:
        return f"TokenEvent(text={self.text!r}, token_id={self.token_id}, origin={self.origin!r}, round={self.round})"


class LogprobKeeper:
    """Keeps `TokenEvent.logprob` readable after the target's rows are gone, at the price of what is used.

    A softmax over the vocabulary for every token would be the largest part of a round's overhead. Only
    events that somebody still holds when the next round starts need anything: the last one, which a
    `for` loop always holds, gets a copy of its row; others, which are being collected, get their value.
    """

    def __init__(self) -> None:
        self._current: list[weakref.ref[TokenEvent]] = []
        self._copied: weakref.ref[TokenEvent] | None = None
        # One row of memory for all copies in turn: whoever still reads the last one is given its value first.
        self._room: Logits | None = None

    def add(self, event: TokenEvent) -> None:
        """Watch an event of the current round."""
        self._current.append(weakref.ref(event))

    def before_evaluation(self) -> None:
        """Save what is still held, because the rows are about to be overwritten."""
        earlier = self._copied() if self._copied is not None else None
        if earlier is not None:
            _ = earlier.logprob
        self._copied = None
        for reference in self._current[:-1]:
            event = reference()
            if event is not None:
                _ = event.logprob
        last = self._current[-1]() if self._current else None
        if last is not None:
            self._room = last.keep_logits(self._room)
            self._copied = weakref.ref(last)
        self._current.clear()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts: of the prompt, of those the cache already held, and of the answer."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    def to_dict(self) -> dict[str, int]:
        """Return the counts as a mapping."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """A finished answer. `token_ids` include the token that ended it, if one did; `text` does not."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    usage: Usage
    stats: SpecStats

    def to_dict(self) -> dict[str, Any]:
        """Return the result as a mapping, ready for JSON."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "usage": self.usage.to_dict(),
            "stats": self.stats.to_dict(),
        }
