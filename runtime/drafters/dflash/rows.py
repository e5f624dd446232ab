"""Distributions after the nodes of a block's tree, by its generation.

A block is evaluated once, before anything is drafted. Slot d predicts the token at depth d + 1, and
the distribution after a node is one of its slot and, but for DFlash, of the node's own token:

- DFlash: each slot's row, whatever was drafted before. Trees are products of these rows.
- DSpark: the slot's row plus a bias of the token before it, w2 w1[token]. llama.cpp's graph adds
  the bias of its own chain, each token the most likely one after that before. Rows along this chain
  are taken as they are, bit by bit; for another token the difference of two biases is added. If
  tokens are chosen, not drawn, that is worked out for the slot's best tokens alone.
- DSpark with a gate or a state (rnn): the bias is w2 of a latent, which the slot's state, the token
  before, and with a state all tokens since the text have made. It differs for each node.
- DFlash2: the slot's best k tokens alone, with scores for each pair of neighbouring slots' tokens.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, overload

import numpy as np
import numpy.typing as npt

from specrun.runtime.drafters.growing.source import HighestLogits, NodeRows
from specrun.runtime.heads import FloatRows
from specrun.runtime.laws.samplers import not_below_highest
from specrun.runtime.laws.transform import Logits

IdRows = npt.NDArray[np.int64]
Shifts = Callable[[Sequence[int], int, IdRows | None], FloatRows]
"""The Markov head: its biases after each of n tokens less those after another one, [n, drafted].

Of the drafted tokens with these numbers, or None: of all."""


class LatentHead(Protocol):
    """A Markov head whose biases are w2 of latents, of `drafted` tokens (None: of all)."""

    @property
    def drafted(self) -> IdRows | None:
        """The tokens of a draft vocabulary."""

    def shifts(self, tokens: Sequence[int], before: int, numbers: IdRows | None) -> FloatRows:
        """Return biases of tokens less those after another one, without a gate or a state."""

    def latents(
        self, tokens: Sequence[int], states: FloatRows, hidden: FloatRows
    ) -> tuple[FloatRows, FloatRows]:
        """Return the latents after n tokens, and the states then, both [n, rank]."""

    def biases(self, latents: FloatRows, before: int, numbers: IdRows | None) -> FloatRows:
        """Return the biases of latents less those after a token without a gate or a state."""


_LEAST_CHANCE = 1e-7
_CHOSEN_AMONG = 256
"""A slot's best tokens, among which its children are chosen: the bias moves others less far."""


@dataclass(frozen=True, slots=True)
class Confidences:
    """DSpark's confidence head: the chance that a slot's token is accepted if those before are.

    `chances` are those of the slots on llama.cpp's own chain. As a head reads the slot's state and
    the token before it, log-odds after another one differ by the difference of their `moves`.
    """

    chances: Sequence[float]
    moves: FloatRows

    def after(self, slot: int, tokens: Sequence[int], before: int) -> list[float]:
        """Return the chance of a slot after each token; `before` is the one on the chain."""
        chance = min(max(self.chances[slot], _LEAST_CHANCE), 1.0 - _LEAST_CHANCE)
        odds = math.log(chance / (1.0 - chance)) - float(self.moves[before])
        return [0.5 + 0.5 * math.tanh(0.5 * (odds + float(self.moves[each]))) for each in tokens]


class BlockRows(ABC):
    """The rows of one evaluated block, views that die with the next evaluation.

    `confidences` are the chances that tokens are accepted, by a head that was trained for that;
    None if there is none.
    """

    confidences: Confidences | None = None

    @abstractmethod
    def after(
        self,
        slot: int,
        tokens: Sequence[int],
        *,
        points: bool = False,
        parents: Sequence[int] | None = None,
    ) -> NodeRows:
        """Return the rows of a slot after nodes with these tokens; of slot 0 after the text.

        `points`: children are chosen, so that only the likeliest tokens of a row count. `parents`
        are the nodes' own, numbered in the order in which they came; None: the newest node.
        """

    def goes_on(self, slot: int, token: int) -> bool:
        """Return whether a slot's rows are known after this token, as those of any draft are."""
        return True


class MarginalRows(BlockRows):
    """DFlash's rows: a slot's own, after any token."""

    def __init__(self, logits: Sequence[Logits]) -> None:
        self._logits = logits

    def after(
        self,
        slot: int,
        tokens: Sequence[int],
        *,
        points: bool = False,
        parents: Sequence[int] | None = None,
    ) -> NodeRows:
        """Return the slot's row for each node."""
        return NodeRows([self._logits[slot]] * len(tokens))


class MarkovRows(BlockRows):
    """DSpark's rows: `logits` hold the biases of the chain of most likely tokens after `last`.

    `drafted` are the tokens of a draft vocabulary, None for all; others have no bias.
    """

    def __init__(
        self,
        logits: Sequence[Logits],
        last: int,
        shifts: Shifts,
        drafted: IdRows | None = None,
        confidences: Confidences | None = None,
    ) -> None:
        self.confidences = confidences
        self._logits, self._shifts, self._drafted = logits, shifts, drafted
        # The token before each slot on llama.cpp's own chain, as far as it was requested.
        self._chain = [last]

    def after(
        self,
        slot: int,
        tokens: Sequence[int],
        *,
        points: bool = False,
        parents: Sequence[int] | None = None,
    ) -> NodeRows:
        """Return the slot's row for each node, with the bias of its token."""
        row, before, sure = self._logits[slot], self._before(slot), self.confidences
        certainties = None if sure is None else sure.after(slot, tokens, before)
        others = [*dict.fromkeys(token for token in tokens if token != before)]
        if others and points:
            best = self._best(row, lambda numbers: self._shifts(tokens, before, numbers))
            return NodeRows(highest=best, certainties=certainties)
        known = {before: row}
        if others:
            shifts = self._shifts(others, before, None)
            known |= zip(others, (self._plus(row, shift) for shift in shifts), strict=True)
        return NodeRows([known[token] for token in tokens], certainties=certainties)

    def _best(self, row: Logits, shifts: Callable[[IdRows], FloatRows]) -> HighestLogits:
        """Return the logits of the row's best tokens after each of these, by their biases."""
        drafted = row if self._drafted is None else row[self._drafted]
        numbers = _highest(drafted, min(_CHOSEN_AMONG, len(drafted)))
        logits = drafted[numbers] + shifts(numbers)
        names = numbers if self._drafted is None else self._drafted[numbers]
        order = names.argsort()  # a map need not ascend
        ids = np.ascontiguousarray(np.broadcast_to(names[order].astype(np.int32), logits.shape))
        return HighestLogits(ids, np.ascontiguousarray(logits[:, order]))

    def _before(self, slot: int) -> int:
        while len(self._chain) <= slot:
            self._chain.append(int(self._logits[len(self._chain) - 1].argmax()))
        return self._chain[slot]

    def _plus(self, row: Logits, shift: FloatRows) -> Logits:
        if self._drafted is None:
            return row + shift
        biased = row.copy()
        biased[self._drafted] += shift
        return biased


class LatentRows(MarkovRows):
    """DSpark's rows with a gated or a recurrent Markov head; `hidden` [slots, width] are states.

    `head` makes latents of these, and biases of latents. llama.cpp's graph has only a head without
    either, whose biases along its chain are taken off again.
    """

    def __init__(
        self,
        logits: Sequence[Logits],
        last: int,
        head: LatentHead,
        hidden: FloatRows,
        *,
        state: FloatRows,
        confidences: Confidences | None = None,
    ) -> None:
        super().__init__(logits, last, head.shifts, head.drafted, confidences)
        self._head, self._hidden = head, hidden
        self._start = state
        # Of the text and then of each node, the state after its token.
        self._states = [state]

    def after(
        self,
        slot: int,
        tokens: Sequence[int],
        *,
        points: bool = False,
        parents: Sequence[int] | None = None,
    ) -> NodeRows:
        """Return a row of its own for each node."""
        row, before, sure = self._logits[slot], self._before(slot), self.confidences
        if slot:
            above = [len(self._states) - 2] * len(tokens) if parents is None else parents
            states = np.stack([self._states[1 + node] for node in above])
        else:
            states = self._start[np.newaxis]
        latents, made = self._head.latents(tokens, states, self._hidden[slot])
        self._states = [*self._states, *made] if slot else [made[0]]
        certainties = None if sure is None else sure.after(slot, tokens, before)
        if points:
            best = self._best(row, lambda numbers: self._head.biases(latents, before, numbers))
            return NodeRows(highest=best, certainties=certainties)
        shifts = self._head.biases(latents, before, None)
        return NodeRows([self._plus(row, shift) for shift in shifts], certainties=certainties)


def _highest(row: Logits, count: int) -> IdRows:
    """Return the places of the `count` highest logits, ascending."""
    near = not_below_highest(row, count)  # few more, found faster than by a partition
    places = np.arange(len(row)) if near is None else near
    kept = np.argpartition(row[places], len(places) - count)[len(places) - count :]
    return np.sort(places[kept])


class LatticeRows(BlockRows):
    """DFlash2's rows: `candidates` [slots, k], and `scores` [slots, k, k] of each after each.

    scores[d, i, j] is of candidate j of slot d after candidate i of the slot before; those of slot
    0 are all of the text's last token.
    """

    def __init__(
        self, candidates: npt.NDArray[np.int32], scores: FloatRows, vocab_size: int
    ) -> None:
        self._candidates, self._scores, self._vocab_size = candidates, scores, vocab_size

    def after(
        self,
        slot: int,
        tokens: Sequence[int],
        *,
        points: bool = False,
        parents: Sequence[int] | None = None,
    ) -> NodeRows:
        """Return the scores of the slot's candidates after each node, by ascending tokens."""
        named = self._candidates[slot]
        order = named.argsort()
        if slot:
            above = self._candidates[slot - 1].tolist()
            places = [above.index(token) for token in tokens]
        else:
            places = [0] * len(tokens)
        scores = np.ascontiguousarray(self._scores[slot][np.ix_(places, order)])
        ids = np.ascontiguousarray(np.broadcast_to(named[order], scores.shape))
        whole = _ScatteredRows(ids, scores, self._vocab_size)
        return NodeRows(whole, highest=HighestLogits(ids, scores))

    def goes_on(self, slot: int, token: int) -> bool:
        """Return whether the token is a candidate of the slot before."""
        return slot == 0 or token in self._candidates[slot - 1]


class _ScatteredRows(Sequence[Logits]):
    """Scores of a few tokens as whole rows, each made when it is read."""

    def __init__(self, tokens: npt.NDArray[np.int32], scores: FloatRows, vocab_size: int) -> None:
        self._tokens, self._scores, self._size = tokens, scores, vocab_size

    def __len__(self) -> int:
        return len(self._tokens)

    @overload
    def __getitem__(self, index: int) -> Logits: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Logits]: ...
    def __getitem__(self, index: int | slice) -> Logits | Sequence[Logits]:
        if isinstance(index, slice):
            return [self[place] for place in range(len(self))[index]]
        row = np.full(self._size, -np.inf, np.float32)
        row[self._tokens[index]] = self._scores[index]
        return row
