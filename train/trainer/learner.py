"""The learner that a trainer trains, and the listeners that follow its progress."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from specrun.train.data.corpus import TokenBatch, TokenCorpus

# == The learner ===================================================================================


@dataclass(frozen=True, slots=True)
class LossPart:
    """A weighted summand of the loss; curves show its `plain` value, unweighted, as `name`."""

    name: str
    value: Tensor
    plain: float


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Parameters that share a learning rate.

    `rate` multiplies the run's learning rate; `starts_at` is the step at which these begin to
    learn. `hidden_matrices` are 2-D weights between hidden states, which the run's
    `matrix_optimizer` trains.
    """

    parameters: Sequence[nn.Parameter]
    rate: float = 1.0
    starts_at: int = 0
    hidden_matrices: bool = False


class Learner(ABC):
    """Something to train on batches of token sequences."""

    module: nn.Module
    """Checkpoints hold its parameters and buffers."""

    device: torch.device

    recompute: bool = True
    """Whether activations are computed again for gradients, not kept: same numbers."""

    n_updates: int = 0
    """The number of updates of the training, set by its trainer."""

    def groups(self) -> list[ParameterGroup]:
        """Return the trained parameters: by default all of `module` that require gradients."""
        return [ParameterGroup([each for each in self.module.parameters() if each.requires_grad])]

    @property
    def n_trained(self) -> int:
        """How many parameters are trained."""
        return sum(each.numel() for each in self.module.parameters() if each.requires_grad)

    has_dropout: ClassVar[bool] = False
    """Whether the module has dropout, and sets its draws from torch's own source. All
    others stay in evaluation mode: the dropout of a model would not resume exactly."""

    def learning(self, on: bool) -> None:
        """Switch to learning, or to being measured."""
        self.module.train(on and self.has_dropout)

    def start(self, corpus: TokenCorpus) -> None:  # noqa: B027 - most learners are made ready
        """Begin with better numbers than those it was made with, found in the texts to be learnt.

        Called once, before the first step of a run; a resumed run has its checkpoint.
        """

    @abstractmethod
    def losses(self, batch: TokenBatch, noise: torch.Generator, step: int) -> Iterator[LossPart]:
        """Yield the summands of the loss.

        The gradient of each is taken before the next is requested, so that logits of several heads
        need not be in memory together: parts must not share numbers that only one of them computed.
        All randomness comes from `noise`, which depends on seed and step alone.
        """

    @abstractmethod
    def measure(self, batches: Sequence[TokenBatch]) -> dict[str, float]:
        """Return measures of held-out batches by name, such as {"head 1 top-1": 0.71}."""


# == Listeners of a training run, its status and its result ========================================


@dataclass(slots=True)
class Curves:
    """Curves of a run: losses of all steps, parts by name, and (step, measures)."""

    losses: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=dict)
    measures: list[tuple[int, dict[str, float]]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TrainingStatus:
    """The progress of a run; `loss` is smoothed, `measures` are the latest, times in seconds."""

    step: int
    steps: int
    loss: float
    measures: dict[str, float]
    tokens_per_second: float
    seconds_left: float


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """A finished run: all curves, earlier parts too, and its tokens and seconds."""

    curves: Curves
    tokens: int
    seconds: float
    resumed_at: int


class RunListener(Protocol):
    """A listener of a run: any class that has these methods, which show nothing here."""

    def note(self, text: str) -> None:
        """Receive a fact in a sentence."""
        return

    def stage(self, what: str, done: int, total: int) -> None:
        """Receive the progress of work before the training."""
        return

    def status(self, status: TrainingStatus) -> None:
        """Receive the progress of the training."""
        return


class SilentListener(RunListener):
    """A listener that shows nothing; subclasses override the methods that they need."""
