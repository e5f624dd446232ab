"""Where heads get the target's hidden states from while they train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specrun.train.data.token_corpus import TokenBatch
from specrun.train.target.hf_model import HFModel


@dataclass(frozen=True, slots=True)
class Features:
    """Final normed states [B, T, h], and the inputs of the tapped layers side by side
    [B, T, taps h], if any."""

    final: Tensor
    taps: Tensor | None


class FeatureSource(Protocol):
    """Gives the target's states for a batch; those of padding mean nothing."""

    taps: tuple[int, ...]

    def features(self, batch: TokenBatch) -> Features:
        """Return the states of a batch, on the batch's device, without gradients."""


@dataclass(frozen=True, slots=True)
class TargetMatrices:
    """The target's token embedding and output matrix, both [vocab, h]; `softcap` bounds its logits,
    if it does.

    They are frozen, and shared by all that reads them.
    """

    embedding: Tensor
    output: Tensor
    softcap: float | None

    def logits(self, states: Tensor) -> Tensor:
        """Return the target's logits [..., vocab] in float32 after final states."""
        raw = torch.nn.functional.linear(states.to(self.output.dtype), self.output).float()
        return raw if self.softcap is None else self.softcap * torch.tanh(raw / self.softcap)

    def law(self, states: Tensor) -> Tensor:
        """Return the target's own law [..., vocab] after final states, at temperature 1."""
        return self.logits(states).softmax(-1)


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
