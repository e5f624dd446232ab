"""The recipe of a kind of head: settings, learner, files and memory, so that one run serves all.

Below it the losses of heads, over rows [n, vocab] or [n, width]; each is the mean over rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from specrun.train.data.token_corpus import TokenCorpus
from specrun.train.target.features import FeatureSource
from specrun.train.target.hf_model import TargetMatrices
from specrun.train.target.target_shape import ModelShape
from specrun.train.trainer.learner import Learner
from specrun.train.trainer.settings import TrainingDefaults


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """A trained head as upstream's tools read it: what config.json says, and tensors by name."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class HeadRecipe(ABC):
    """A kind of head and its settings: the fields of a recipe are what resumed runs must share."""

    kind: ClassVar[str]
    files_name: ClassVar[str] = "model.safetensors"
    """The file of weights that a finished run leaves."""

    def taps(self, shape: ModelShape) -> tuple[int, ...]:
        """Return the layers whose inputs the head reads, none by default."""
        return ()

    @abstractmethod
    def defaults(self, shape: ModelShape) -> TrainingDefaults:
        """Return how such heads are trained."""

    @abstractmethod
    def learner(
        self, shape: ModelShape, target: TargetMatrices, source: FeatureSource, corpus: TokenCorpus
    ) -> Learner:
        """Return a new head to train."""

    def activation_bytes(
        self, shape: ModelShape, tokens: int, longest: int, *, recompute: bool
    ) -> int:
        """Return roughly the bytes that a step of `tokens` tokens keeps for its gradients.

        Sequences have at most `longest` tokens; `recompute` as of Learner. By default: logits,
        their softmax, the target's law and two gradients for every token, and a layer's states.
        """
        return 4 * tokens * (5 * shape.vocab_size + 24 * shape.hidden + 6 * shape.feed_forward)

    @property
    def smaller(self) -> str:
        """What makes the head itself smaller, for users whose memory is too small for it."""
        return "use a smaller target"

    @abstractmethod
    def files(self, learner: Learner, shape: ModelShape) -> HeadFiles:
        """Return the trained head's files."""


def token_cross_entropy(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean of -log q(token)."""
    return F.cross_entropy(logits.float(), tokens)


def law_cross_entropy(logits: Tensor, law: Tensor) -> Tensor:
    """Return the mean of -sum p log q, for laws p [n, vocab]."""
    found: Tensor = -(law * logits.float().log_softmax(-1)).sum(-1).mean()
    return found


def divergence_from_law(logits: Tensor, law: Tensor) -> Tensor:
    """Return the mean Kullback-Leibler divergence of q from p, sum p log(p / q); 0 log 0 is 0."""
    # KL = H(p, q) - H(p): the gradient is the cross-entropy's, but the value is 0 where q = p.
    entropy: Tensor = torch.special.entr(law).sum(-1).mean()
    return law_cross_entropy(logits, law) - entropy
