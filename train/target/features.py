"""The target's hidden states, which heads read while they train, and what they come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specrun.train.data.token_corpus import TokenBatch
from specrun.train.target.hf_model import HFModel


@dataclass(frozen=True, slots=True)
class Features:
    """Final normed states [B, T, h], and the tapped layers' inputs side by side [B, T, taps h]."""

    final: Tensor
    taps: Tensor | None


@dataclass(frozen=True, slots=True)
class TextStates:
    """A text's tokens, and its states: final ones [T, h], tapped ones [T, taps h] or None."""

    ids: NDArray[np.int32]
    final: Tensor
    taps: Tensor | None


class FeatureSource(Protocol):
    """Gives the target's states for a batch; those of padding mean nothing."""

    taps: tuple[int, ...]

    def features(self, batch: TokenBatch) -> Features:
        """Return the states of a batch, on the batch's device, without gradients."""


class ModelFeatures:
    """Computes states anew for every batch."""

    def __init__(self, model: HFModel, taps: tuple[int, ...] = ()) -> None:
        self.taps = taps
        self._model = model

    @torch.no_grad()
    def features(self, batch: TokenBatch) -> Features:
        """Return the states of a batch."""
        final, taps = self._model.hidden_states(batch.ids, self.taps)
        return Features(final.float(), None if taps is None else taps.float())


class AnswerStates:
    """Final states, and inputs of the layers `taps`, of prompts that are answered at once.

    Who answers has computed what heads learn from: noted then, it takes a disk's time, where a
    second evaluation takes half as long as the answers did. These have up to `n_longest` tokens.
    """

    def __init__(
        self, prompts: Sequence[Sequence[int]], n_longest: int, taps: tuple[int, ...]
    ) -> None:
        self.taps = taps
        self._prompts = prompts
        self._longest = max(map(len, prompts), default=0) + n_longest
        self._n_noted = torch.zeros(len(prompts), dtype=torch.long)
        self._states: Tensor | None = None

    def note(self, rows: Sequence[int], states: Tensor) -> None:
        """Hear the states [len(rows), T, (1 + taps) h] of the rows' next tokens.

        The first are those of all prompts, padded on the left; then each row has one more token.
        """
        if self._states is None:
            self._states = states.new_empty(len(self._prompts), self._longest, states.shape[-1])
            for row, prompt in enumerate(self._prompts):
                self._states[row, : len(prompt)] = states[row, states.shape[1] - len(prompt) :]
                self._n_noted[row] = len(prompt)
            return
        index = torch.tensor(rows, dtype=torch.long)
        self._states[index, self._n_noted[index]] = states[:, 0]
        self._n_noted[index] += 1

    def has(self, row: int, answer: Sequence[int]) -> bool:
        """Return whether all tokens of an answer were evaluated: the last one comes late."""
        return len(self._prompts[row]) + len(answer) <= int(self._n_noted[row])

    def of(self, row: int, answer: Sequence[int], hidden: int) -> TextStates:
        """Return the states of width `hidden` of a prompt and its whole answer."""
        assert self._states is not None
        ids = [*self._prompts[row], *answer]
        final, taps = self._states[row, : len(ids)].tensor_split([hidden], -1)
        return TextStates(np.array(ids, np.int32), final, taps if self.taps else None)
