"""Medusa's heads and their training on a frozen target: Medusa-1 (Cai et al. 2024, section 2.2.1).

From the final state at position t, head k = 1..K predicts the token at t + k + 1. The loss is sum_k
lambda^k CE_k (equation 1, lambda = 0.8): the cross-entropy with the text's tokens, or, for heads
that learn from the model's own law on answers it wrote itself (section 2.3), the divergence from
the law the target has there.

Named as FasterDecoding/Medusa's medusa_lm_head: head i is `[ResBlock] * layers + [Linear]`, with
keys `{i}.{j}.linear.weight`, `{i}.{j}.linear.bias`, `{i}.{layers}.weight`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specrun.bindings.errors import OptionError
from specrun.train.data.corpus import TokenBatch, TokenCorpus, draft_marks
from specrun.train.heads.learner import (
    HeadFiles,
    HeadLearner,
    HeadRecipe,
    Lesson,
    best_tokens,
    rows_at,
)
from specrun.train.target.hf_model import TargetMatrices
from specrun.train.target.shape import ModelShape
from specrun.train.target.states import Features, FeatureSource
from specrun.train.trainer.learner import Learner, LossPart
from specrun.train.trainer.settings import TrainingDefaults


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b); starts as the identity."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)
        # SiLU(0) = 0: nothing is added at first.
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, states: Tensor) -> Tensor:
        """[..., hidden] to the same shape."""
        return states + F.silu(self.linear(states))


class MedusaHeads(nn.ModuleList):
    """`count` heads over final states; head i predicts the token i + 2 after the state's own.

    With `output` [vocab, hidden], each head owns an output matrix that starts as a copy of it, so
    that an untrained head predicts what the target itself would say next. Without it, heads return
    states for the target's own matrix.
    """

    def __init__(self, hidden: int, count: int, layers: int, output: Tensor | None) -> None:
        heads = []
        for _ in range(count):
            blocks: list[nn.Module] = [ResidualBlock(hidden) for _ in range(layers)]
            if output is not None:
                linear = nn.Linear(hidden, output.shape[0], bias=False)
                # In float32 whatever the target's numbers: small updates would be rounded away.
                linear.weight.data.copy_(output.detach().float())
                blocks.append(linear)
            heads.append(nn.Sequential(*blocks))
        super().__init__(heads)
        self.owns_output = output is not None


@dataclass(frozen=True, slots=True)
class MedusaRecipe(HeadRecipe):
    """`heads` heads of `layers` residual blocks; the loss of head k weighs `decay` ** k.

    `own_output` gives each head an output matrix of its own, as upstream's have; without, heads are
    small and use the target's, which only specrun runs. `from_law` learns from the target's law
    instead of the text's tokens.
    """

    heads: int = 5
    layers: int = 1
    decay: float = 0.8
    own_output: bool = True
    from_law: bool = False

    kind = "medusa"
    files_name = "medusa_lm_head.safetensors"

    def __post_init__(self) -> None:
        if not 1 <= self.heads <= 32:
            raise OptionError(f"{self.heads} heads: give 1 to 32")
        if not 1 <= self.layers <= 16:
            raise OptionError(f"{self.layers} residual blocks a head: give 1 to 16")
        if not 0 < self.decay <= 1:
            raise OptionError(f"a decay of {self.decay:g}: give a number above 0, at most 1")

    def defaults(self, shape: ModelShape) -> TrainingDefaults:
        """Return the paper's rate."""
        return TrainingDefaults(learning_rate=1e-3, betas=(0.9, 0.999), clip_norm=1.0)

    def learner(
        self, shape: ModelShape, target: TargetMatrices, source: FeatureSource, corpus: TokenCorpus
    ) -> Learner:
        """Return heads that start as the target's own output."""
        return MedusaLearner(self, shape, target, source)

    @property
    def smaller(self) -> str:
        """Without an output matrix of its own a head is a hundredth; else only fewer of them."""
        shared = "use --shared-output or fewer --heads"
        return shared if self.own_output else "use fewer --heads or --layers"

    def files(self, learner: Learner, shape: ModelShape) -> HeadFiles:
        """Return upstream's layout: medusa_lm_head and a config."""
        config: dict[str, Any] = {
            "medusa_num_heads": self.heads,
            "medusa_num_layers": self.layers,
            "hidden_size": shape.hidden,
            "vocab_size": shape.vocab_size,
            "version": "2",
        }
        return HeadFiles(config, dict(learner.module.state_dict()))


class MedusaLearner(HeadLearner):
    """Trains Medusa heads on given states."""

    def __init__(
        self, recipe: MedusaRecipe, shape: ModelShape, target: TargetMatrices, source: FeatureSource
    ) -> None:
        self.recipe = recipe
        output = target.output if recipe.own_output else None
        self.heads = MedusaHeads(shape.hidden, recipe.heads, recipe.layers, output)
        super().__init__(self.heads, target, source, recipe.heads)

    def losses(self, batch: TokenBatch, noise: torch.Generator, step: int) -> Iterator[LossPart]:
        """Yield each head's loss."""
        states = self._source.features(batch).final
        lesson = Lesson(batch, states if self.recipe.from_law else None, self._target)
        # One part a head: its logits are gone before those of the next are made.
        for head, loss in self.head_losses(states, lesson):
            # lambda^k of equation 1, with k = head + 1.
            weight = self.recipe.decay ** (head + 1)
            yield LossPart(f"head {head + 1}", weight * loss, float(loss.detach()))

    def head_losses(self, states: Tensor, lesson: Lesson) -> Iterator[tuple[int, Tensor]]:
        """Yield the heads, from 0, that have something to learn after `states` [B, T, h]."""
        for head in range(self.recipe.heads):
            marks = draft_marks(lesson.batch.learnt, head)
            # In a short text no token is that far ahead: a mean over nothing would be NaN.
            if marks.any():
                logits = self.logits(head, rows_at(states, marks))
                yield head, lesson.loss(logits, marks, head + 1)

    def drafts(self, batch: TokenBatch, found: Features, start: Tensor) -> Iterator[Tensor]:
        """Yield each head's best tokens."""
        rows = rows_at(found.final, start)
        for head in range(self.recipe.heads):
            yield best_tokens(self.logits(head, rows))

    def logits(self, head: int, rows: Tensor) -> Tensor:
        """Return a head's logits [n, vocab] after states [n, h]."""
        found: Tensor = self.heads[head](rows)
        return found if self.heads.owns_output else self._target.logits(found)
