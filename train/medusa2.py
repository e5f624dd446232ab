"""Trains Medusa's heads together with their model: Medusa-2 (Cai et al. 2024, section 2.2.2).

The loss is L_LM + lambda_0 sum_k lambda^k L_k (equation 2): the model goes on learning its own next word while it
learns to be read by heads. Heads are large and new, so they learn alone first (the model's rate is 0 while they warm
up) and then faster than the model, at rates of their own. With `from_law` nothing is learnt but what the model itself
said before: L_LM becomes KL(p_before || p_now), and heads learn the law before too (self-distillation, section 2.3).

The model changes, so what verification keeps is the words of the new one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specrun.bindings.errors import OptionError
from specrun.train.draft_marks import draft_marks
from specrun.train.features import FeatureSource, ModelFeatures, TargetMatrices
from specrun.train.hf_model import HFModel
from specrun.train.learner import Learner, LossPart, ParameterGroup
from specrun.train.losses import divergence_from_law, word_cross_entropy
from specrun.train.medusa import MedusaLearner, MedusaRecipe
from specrun.train.target_shape import TargetShape
from specrun.train.token_corpus import TokenBatch
from specrun.train.training_run import TrainingDefaults

__all__ = ["Medusa2Learner", "Medusa2Recipe"]


@dataclass(frozen=True, slots=True)
class Medusa2Recipe:
    """`heads` are Medusa-1's settings; `head_weight` is lambda_0.

    Heads learn at the run's rate, the model at `model_rate` times it, from the share `heads_alone` of the steps on.
    """

    heads: MedusaRecipe
    head_weight: float = 0.2
    model_rate: float = 0.25
    heads_alone: float = 0.1

    def __post_init__(self) -> None:
        if not self.heads.own_output:
            raise OptionError("Medusa-2's heads have output matrices of their own: leave out --shared-output")
        if self.head_weight <= 0 or self.model_rate <= 0:
            raise OptionError("the weight of the heads and the model's rate: give numbers above 0")
        if not 0 <= self.heads_alone < 1:
            raise OptionError(f"heads alone for {self.heads_alone:g} of the steps: give 0 to below 1")

    def defaults(self) -> TrainingDefaults:
        """Return rates that change a trained model gently; the paper's are of adapters."""
        return TrainingDefaults(learning_rate=2e-4, betas=(0.9, 0.999), clip_norm=1.0)


class Medusa2Learner(Learner):
    """A model and its heads. `before` gives the states it had, and `matrices` its matrices then, where they teach."""

    def __init__(
        self,
        recipe: Medusa2Recipe,
        shape: TargetShape,
        model: HFModel,
        steps: int,
        before: FeatureSource | None = None,
        matrices: TargetMatrices | None = None,
    ) -> None:
        self.recipe = recipe
        self.device = model.device
        self._model = model
        live = TargetMatrices(model.embedding.detach(), model.output.detach(), model.softcap)  # these share memory
        self._inner = MedusaLearner(recipe.heads, shape, live, ModelFeatures(model))
        self._before, self._matrices = before, matrices
        self.first_joint_step = round(recipe.heads_alone * steps)
        model.module.requires_grad_(True)
        self.module = nn.ModuleDict({"model": model.module, "medusa_head": self._inner.heads})

    def groups(self) -> list[ParameterGroup]:
        """Return the heads, and the model, which learns more slowly and begins later."""
        return [
            ParameterGroup(list(self._inner.heads.parameters())),
            ParameterGroup(
                list(self._model.module.parameters()), rate=self.recipe.model_rate, starts_at=self.first_joint_step
            ),
        ]

    def learning(self, on: bool) -> None:
        """Leave the model in evaluation mode: dropout, where its configuration has some, would not resume exactly."""
        self.module.eval()

    def losses(self, batch: TokenBatch, noise: torch.Generator, step: int) -> Iterator[LossPart]:
        """Yield the loss of model and heads together: they share the model's states."""
        joint = step >= self.first_joint_step
        with torch.set_grad_enabled(joint):
            states, _ = self._model.hidden_states(batch.ids)
        law = _LawBefore(batch, self._before, self._matrices)
        heads = self._head_loss(batch, states, law)
        if heads is None:
            return
        weighed = self.recipe.head_weight * heads
        if not joint:
            yield LossPart("heads", weighed, heads.item())
            return
        own = self._model_loss(batch, states, law)
        yield LossPart("model and heads", own + weighed, own.item())

    def _head_loss(self, batch: TokenBatch, states: Tensor, law: _LawBefore) -> Tensor | None:
        total: Tensor | None = None
        for head in range(self.recipe.heads.heads):
            marks = draft_marks(batch.learnt, head)
            if not marks.any():
                continue
            logits = self._inner.logits(head, states[:, : marks.shape[1]][marks])
            loss = law.loss(logits, marks, head + 1)
            weighed = self.recipe.heads.decay ** (head + 1) * loss
            total = weighed if total is None else total + weighed
        return total

    def _model_loss(self, batch: TokenBatch, states: Tensor, law: _LawBefore) -> Tensor:
        marks = batch.learnt[:, 1:]
        return law.loss(self._model.logits(states[:, :-1][marks]), marks, 0)

    def measure(self, batches: Sequence[TokenBatch]) -> dict[str, float]:
        """Return how well heads guess what the model says now, and the loss of its own next words."""
        found = self._inner.measure(batches)
        losses, count = 0.0, 0
        for batch in batches:
            states, _ = self._model.hidden_states(batch.ids)
            marks = batch.learnt[:, 1:]
            number = int(marks.sum())
            if number:
                logits = self._model.logits(states[:, :-1][marks])
                losses += number * word_cross_entropy(logits, batch.ids[:, 1:][marks]).item()
                count += number
        return {**found, "model loss": losses / max(1, count)}

    @property
    def heads(self) -> nn.Module:
        """The heads."""
        return self._inner.heads


class _LawBefore:
    """What is learnt at a batch's positions: the text's words, or the law that the model had there before."""

    def __init__(self, batch: TokenBatch, before: FeatureSource | None, matrices: TargetMatrices | None) -> None:
        self._batch, self._matrices = batch, matrices
        self._states = None if before is None else before.features(batch).final

    def loss(self, logits: Tensor, marks: Tensor, ahead: int) -> Tensor:
        """Return the mean loss of `logits` at the marked positions t for the words at t + 1 + ahead."""
        length = marks.shape[1]
        if self._states is None or self._matrices is None:
            return word_cross_entropy(logits, self._batch.ids[:, 1 + ahead : 1 + ahead + length][marks])
        return divergence_from_law(logits, self._matrices.law(self._states[:, ahead : ahead + length][marks]))


def medusa2_config(config: dict[str, Any], recipe: MedusaRecipe) -> dict[str, Any]:
    """Return the model's config with what says that heads lie beside it."""
    return {**config, "medusa_num_heads": recipe.heads, "medusa_num_layers": recipe.layers}
