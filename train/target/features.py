"""Sources of the target's hidden states, which heads read while they train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specrun.train.data.token_corpus import TokenBatch
from specrun.train.target.hf_model import HFModel


@dataclass(frozen=True, slots=True)
class Features:
    """Final normed states [B, T, h], and the tapped layers' inputs side by side [B, T, taps h]."""

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
