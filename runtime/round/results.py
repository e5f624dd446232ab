"""Results: token events while an answer is made, then its text, tokens and statistics."""

from __future__ import annotations

import dataclasses
import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from specrun.bindings.errors import OptionError
from specrun.runtime.acceptance import total_variation
from specrun.runtime.laws.law import Law
from specrun.runtime.laws.noise import NoiseSource
from specrun.runtime.laws.transform import Logits, highest_tokens, log_probabilities

if TYPE_CHECKING:
    from specrun.runtime.chat import Part, ToolCall

FinishReason = Literal["stop", "length", "cancelled"]
Origin = Literal["drafted", "target"]


class DecidingRows(Protocol):
    """The source of a round's tokens."""

    def logits_of(self, index: int) -> Logits:
        """Return the logits that decided the token number `index`, valid until the next round."""


class TokenEvent:
    """One token of an answer.

    `text` is the text that became certain with it: empty while a character or a possible stop
    string is incomplete. `origin` is "drafted" for an accepted guess and "target" for the target's
    own token. `round` counts from 0. `logprob` is the target's log-probability in nats, before any
    transformation, by the row of `decided_by` that decided the round's token number `index`;
    without, it was not requested. So are `top_logprobs`, of at most `n_top` tokens.
    `finish_reason` is why the answer ends with this token, None if it goes on.

    Of an answer to a chat, `text` is of the answer alone. `reasoning` is the text of the model's
    thoughts, `parts` are those two and pieces of tool calls, and `raw_text` is its unchanged text.
    """

    __slots__ = (
        *("__weakref__", "_decided_by", "_index", "_logprob", "_n_top", "_parts", "_row", "_top"),
        *("finish_reason", "origin", "raw_text", "reasoning", "round", "text", "token_id"),
    )

    def __init__(
        self,
        text: str,
        token_id: int,
        origin: Origin,
        round_number: int,
        decided_by: DecidingRows | None,
        index: int = 0,
        n_top: int = 0,
        finish_reason: FinishReason | None = None,
    ) -> None:
        self.text = self.raw_text = text
        self.reasoning = ""
        self._parts: Sequence[Part] | None = None
        self.finish_reason = finish_reason
        self.token_id = token_id
        self.origin: Origin = origin
        self.round = round_number
        # None once the number is known: a row keeps its whole round in memory.
        self._decided_by, self._index = decided_by, index
        self._row: Logits | None = None  # a copy, if the round's was overwritten
        self._logprob: float | None = None
        self._n_top = n_top
        self._top: list[tuple[int, float]] | None = None

    @property
    def parts(self) -> Sequence[Part]:
        """The parts of a chat's answer that became certain with the token."""
        return self._parts or ()

    def tell(self, parts: Sequence[Part], text: str, reasoning: str) -> None:
        """Take the parts of a chat's answer, and their texts."""
        self._parts, self.text, self.reasoning = parts, text, reasoning

    @property
    def logprob(self) -> float:
        """The target's log-probability of the token: a softmax, computed when first read."""
        self.settle()
        if self._logprob is None:
            why = "was asked for without log-probabilities, or the target never saw it"
            raise OptionError(f"this token has no log-probability: it {why}")
        return self._logprob

    def top_logprobs(self, k: int | None = None) -> list[tuple[int, float]]:
        """Return the target's `k` most likely tokens here, best first, with log-probabilities.

        Of equals the lower ids come first. None: as many as the answer's request has; more are
        an error.
        """
        count = self._n_top if k is None else k
        if not 0 <= count <= self._n_top:
            problem = f"the answer was asked for with {self._n_top}"
            raise OptionError(f"top_logprobs is {k!r}: {problem} (top_logprobs)")
        _ = self.logprob  # raises if there is none
        return (self._top or [])[:count]

    def settle(self) -> None:
        """Compute the values that may be read later, now that the row is there."""
        row, decided_by = self._row, self._decided_by
        if row is None:
            if decided_by is None:
                return
            row = decided_by.logits_of(self._index)
        best = highest_tokens(row, self._n_top)
        self._logprob, *others = log_probabilities(row, [self.token_id, *best])
        self._top = [*zip(best, others, strict=True)] or None
        self._decided_by = self._row = None

    def keep_logits(self, room: Logits | None = None) -> Logits | None:
        """Copy the target's row, which the next evaluation overwrites: cheaper than the softmax.

        The copy goes into `room`, if given, and is returned; if the value is known already, or
        the row was copied before, `room` comes back.
        """
        decided_by = self._decided_by
        if decided_by is None:
            return room
        row = decided_by.logits_of(self._index)
        copied = np.empty_like(row) if room is None else room
        copied[:] = row
        # In place of the view, which raises once the next evaluation has begun.
        self._row, self._decided_by = copied, None
        return copied

    def __repr__(self) -> str:
        what = f"text={self.text!r}, token_id={self.token_id}"
        return f"TokenEvent({what}, origin={self.origin!r}, round={self.round})"


class LogprobKeeper:
    """Keeps `TokenEvent.logprob` readable when the rows are gone, at the price of the used ones.

    A softmax over the vocabulary for every token would be the largest part of a round's overhead.
    Only events that somebody still holds when the next round starts need anything: the last one,
    which a `for` loop always holds, gets a copy of its row; others, which are being collected, get
    their value.
    """

    def __init__(self) -> None:
        # Those of the current round: weak, or no event would ever be dropped and each would cost
        # its softmax. Who makes an event notes it here.
        self.current: list[weakref.ref[TokenEvent]] = []
        self._copied: weakref.ref[TokenEvent] | None = None
        # One row of memory for all copies in turn: the last one's reader gets its value first.
        self._room: Logits | None = None

    def before_evaluation(self) -> None:
        """Save the rows that are still held, because they are about to be overwritten."""
        current, copied = self.current, self._copied
        if copied is not None:
            if (earlier := copied()) is not None:
                earlier.settle()
            self._copied = None
        if len(current) > 1:
            for reference in current[:-1]:
                if (event := reference()) is not None:
                    event.settle()
        if current and (last := current[-1]()) is not None:
            self._room = last.keep_logits(self._room)
            self._copied = current[-1]
        current.clear()

    def finish(self) -> None:
        """Save the values that are still held as numbers: no reader of a copy is to come."""
        for reference in (*self.current, self._copied):
            event = reference() if reference is not None else None
            if event is not None:
                event.settle()
        self.current.clear()
        self._copied = self._room = None


@dataclass(frozen=True, slots=True)
class SpecStats:
    """Statistics of one answer: seconds, tokens per second; None if nothing was counted.

    `drafted` counts candidate nodes, `accepted` the kept ones, `mean_accepted_length` is tokens per
    target evaluation, with the target's own token; `acceptance_by_position[i]` is the share of
    rounds that drafted at depth i + 1 and kept a token there. `acceptance_given_prefix[i]` is the
    share of the `tested_by_position[i]` rounds that kept i drafted tokens and had drafts below them
    that kept one more: for chains EAGLE's n-alpha. `overhead_s` is wall time outside native
    evaluation. `tokens_per_second` leaves out the time until the first token's round began (the
    prompt). `drafting` is the drafter's own report: the choices of `auto`, the inner rounds
    of `cascade`, the parts of combinators. `non_candidates` are nodes that were evaluated beside
    the drafted ones and could not be kept (lookahead's window). `width` is how many tokens every
    evaluation of the target had (`--shape`), None if that was free. Under rules that are not
    exact, `total_variation` is the mean distance of the distribution that decided a token from the
    target's, and `changed_share` the share of tokens that the target alone would not have drawn
    from the same noise. `rebuilt` rounds had another shape than the evaluation before, so that
    llama.cpp built its graph anew; None if other conversations are evaluated with this one. Of
    the drafted tokens `forced` are those that a grammar left no choice, `forced_accepted` of which
    were kept: the target may spell the same text by other tokens.
    """

    drafter: str
    rule: str
    exact: bool
    rounds: int
    drafted: int
    accepted: int
    acceptance_rate: float | None
    mean_accepted_length: float | None
    acceptance_by_position: tuple[float, ...]
    tokens_per_second: float | None
    prompt_tokens_per_second: float | None
    time_to_first_token_s: float | None
    target_s: float
    drafter_s: float
    overhead_s: float
    wall_s: float
    drafting: Mapping[str, Any] = field(default_factory=dict)
    non_candidates: int = 0
    acceptance_given_prefix: tuple[float, ...] = ()
    tested_by_position: tuple[int, ...] = ()
    width: int | None = None
    total_variation: float | None = None
    changed_share: float | None = None
    rebuilt: int | None = None
    forced: int = 0
    forced_accepted: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the statistics as a mapping, ready for JSON."""
        return dataclasses.asdict(self)


RoundKind = tuple[int, int, int, int, int, int]
"""Of a round its candidates, their depth, accepted, tokens, others, tested: see `count`."""


class RoundCounter:
    """Adds up rounds: how often there was one of each of `kinds` is all that it keeps.

    So a round is counted in one assignment, as a whole or not at all, wherever Ctrl-C may come.
    """

    def __init__(self) -> None:
        self.kinds = defaultdict[RoundKind, int](int)  # how many rounds of each
        self.spoken = 0

    def count(
        self,
        n_candidates: int,
        depth: int,
        n_accepted: int,
        n_tokens: int,
        n_others: int = 0,
        n_tested: int | None = None,
    ) -> None:
        """Count a round that drafted `n_candidates` nodes down to `depth` and produced `n_tokens`.

        `n_others` are the nodes that were evaluated but could not be accepted. `n_tested` is at how
        many depths there were drafts to accept below the kept ones: those that were, and one more
        if all were rejected; as for a chain if it is left out.
        """
        # A chain tests one token more than it keeps, unless it is kept whole.
        tested = min(depth, n_accepted + 1) if n_tested is None else n_tested
        self.kinds[n_candidates, depth, n_accepted, n_tokens, n_others, tested] += 1

    def count_spoken(self, n_tokens: int) -> None:
        """Count tokens that a small model chose without a round: drafted, accepted, not tested."""
        self.spoken += n_tokens

    def _total(self, index: int) -> int:
        # A copy: an engine's statistics are read in other threads.
        return sum(kind[index] * times for kind, times in [*self.kinds.items()])

    def _reached(self, *indices: int) -> list[int]:
        """Return how many rounds came to each depth, by the least of the counts at `indices`."""
        reached = [0] * max((kind[1] for kind in self.kinds), default=0)
        for kind, times in self.kinds.items():
            for position in range(min(kind[index] for index in indices)):
                reached[position] += times
        return reached

    @property
    def rounds(self) -> int:
        """How many rounds there were."""
        return sum(self.kinds.values())

    @property
    def tokens(self) -> int:
        """How many tokens they produced."""
        return self._total(3) + self.spoken

    @property
    def drafted(self) -> int:
        """How many nodes could have been accepted."""
        return self._total(0) + self.spoken

    @property
    def accepted(self) -> int:
        """How many nodes were accepted."""
        return self._total(2) + self.spoken

    @property
    def non_candidates(self) -> int:
        """How many nodes were evaluated and could not be accepted."""
        return self._total(4)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def mean_accepted_length(self) -> float | None:
        """Tokens per target evaluation, with the target's own."""
        return self.tokens / self.rounds if self.rounds else None

    @property
    def acceptance_by_position(self) -> Sequence[float]:
        """The share of rounds that kept a token at each depth they drafted."""
        pairs = zip(self._reached(1, 2), self._reached(1), strict=True)
        return tuple(accepted / drafted for accepted, drafted in pairs)

    @property
    def acceptance_given_prefix(self) -> Sequence[float]:
        """The share of tests at each depth that kept a token, down to the last tested depth."""
        # Depths that were never tested have no rate.
        pairs = zip(self._reached(1, 2), self.tested_by_position, strict=False)
        return tuple(accepted / tested for accepted, tested in pairs)

    @property
    def tested_by_position(self) -> Sequence[int]:
        """In how many rounds each depth was tested: all depths above had kept a token."""
        # A depth is tested only after those above it: the zeros stand at the end.
        return tuple(tested for tested in self._reached(5) if tested)


class Departures:
    """Adds up the distance of a rule that is not exact from the target's own choices.

    A round is counted in one assignment, as a whole or not at all, wherever Ctrl-C may come.
    """

    def __init__(self) -> None:
        # Tokens, their distances' sum, and how many of them the target would not have drawn.
        self._counted: tuple[int, float, int] = (0, 0.0, 0)

    def count(
        self,
        laws: Sequence[tuple[Law, Law]],
        tokens: Sequence[int],
        noise: NoiseSource,
        start: int,
    ) -> None:
        """Count a round's tokens, the first at position `start`.

        `laws` are, for each of them, the distribution that decided it and the target's. The target
        alone would have chosen by the first choice at the token's position: plain decoding's own.
        """
        count, distance, changed = self._counted
        for position, (token, (law, target)) in enumerate(zip(tokens, laws, strict=False), start):
            count += 1
            distance += total_variation(target, law)
            noise.seek(position)
            changed += noise.choose(target) != token
        self._counted = count, distance, changed

    @property
    def total_variation(self) -> float | None:
        """The mean total variation between the distribution of a token and the target's."""
        count, distance, _ = self._counted
        return distance / count if count else None

    @property
    def changed_share(self) -> float | None:
        """The share of tokens that the target alone would not have drawn from the same noise."""
        count, _, changed = self._counted
        return changed / count if count else None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts: of the prompt, of those the cache already held, and of the answer."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    def to_dict(self) -> dict[str, int]:
        """Return the counts as a mapping."""
        return dataclasses.asdict(self)


_SHOWN = 60  # characters of a text in the representation of a result


@dataclass(frozen=True, slots=True, repr=False)
class GenerationResult:
    """A finished answer. `token_ids` include a token that ended it; `text` does not.

    `seed` is the one that was given, or the random one that took its place.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    usage: Usage
    stats: SpecStats
    seed: int

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= _SHOWN else f"{self.text[:_SHOWN]}..."
        how = f"{len(self.token_ids)} tokens in {self.stats.rounds} rounds, {self.finish_reason}"
        return f"<{type(self).__name__} {text!r}: {how}>"

    def to_dict(self) -> dict[str, Any]:
        """Return the result as a mapping, ready for JSON."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True, repr=False)
class ChatResult(GenerationResult):
    """A finished answer to a chat: `text` is of the answer alone.

    `reasoning` is the text of the model's thoughts, `tool_calls` are calls of tools that were
    offered, and `raw_text` is the model's text, without control tokens.
    """

    reasoning: str
    tool_calls: list[ToolCall]
    raw_text: str

    @property
    def message(self) -> dict[str, Any]:
        """The answer as the assistant's message, for the next turn of the conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.message for call in self.tool_calls]
        return message
