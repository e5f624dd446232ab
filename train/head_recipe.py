"""What a kind of head must say of itself, so that one trainer serves all kinds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from specrun.train.features import FeatureSource, TargetMatrices
from specrun.train.learner import Learner
from specrun.train.target_shape import TargetShape
from specrun.train.token_corpus import TokenCorpus
from specrun.train.training_run import TrainingDefaults

__all__ = ["HeadFiles", "HeadRecipe"]


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

    def taps(self, shape: TargetShape) -> tuple[int, ...]:
        """Return the layers whose inputs the head reads, none by default."""
        return ()

    @abstractmethod
    def defaults(self, shape: TargetShape) -> TrainingDefaults:
        """Return how such heads are trained."""

    @abstractmethod
    def learner(
        self, shape: TargetShape, target: TargetMatrices, source: FeatureSource, corpus: TokenCorpus
    ) -> Learner:
        """Return a new head to train."""

    def activation_bytes(self, shape: TargetShape, n_words: int, tokens: int, longest: int, *, recompute: bool) -> int:
        """Return roughly what one step keeps for its gradients, for `tokens` tokens in sequences of `longest`.

        `recompute` as of Learner. By default: logits, their softmax, the target's law and two gradients for every word,
        and a layer's states.
        """
        return 4 * tokens * (5 * n_words + 24 * shape.hidden + 6 * shape.feed_forward)

    @property
    def smaller(self) -> str:
        """What makes the head itself smaller, for users whose memory is too small for it."""
        return "use a smaller target"

    @abstractmethod
    def files(self, learner: Learner, shape: TargetShape, n_words: int) -> HeadFiles:
        """Return the trained head's files."""
