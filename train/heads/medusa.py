"""Medusa's heads (Cai et al. 2024): Medusa-1 on a frozen target, Medusa-2 with its model.

From the final state at position t, head k = 1..K predicts the token at t + k + 1. The loss is sum_k
lambda^k CE_k (equation 1, lambda = 0.8): the cross-entropy with the text's tokens, or, for heads
that learn from the model's own distribution on answers it wrote itself (section 2.3), the
divergence from the distribution the target has there.

Named as FasterDecoding/Medusa's medusa_lm_head: head i is `[ResBlock] * layers + [Linear]`, with
keys `{i}.{j}.linear.weight`, `{i}.{j}.linear.bias`, `{i}.{layers}.weight`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specrun.bindings.errors import OptionError
from specrun.train.data.corpus import TokenBatch, TokenCorpus, draft_marks
from specrun.train.heads.layers import output_layer
from specrun.train.heads.learner import (
    FormerModel,
    HeadLearner,
    Lesson,
    best_tokens,
    rows_at,
    text_loss,
)
from specrun.train.heads.run import HeadFiles, HeadRecipe, HeadRun, ModelRecipe
from specrun.train.target.hf_model import HFModel, TargetMatrices
from specrun.train.target.shape import ModelShape, checkpoint_size
from specrun.train.target.states import Features, FeatureSource, ModelFeatures
from specrun.train.trainer.learner import Learner, LossPart, ParameterGroup
from specrun.train.trainer.memory import MemoryNeed
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
    that an untrained head predicts the target's own next token. Without it, heads return
    states for the target's own matrix.
    """

    def __init__(self, hidden: int, count: int, layers: int, output: Tensor | None) -> None:
        heads = []
        for _ in range(count):
            blocks: list[nn.Module] = [ResidualBlock(hidden) for _ in range(layers)]
            if output is not None:
                blocks.append(output_layer(output))
            heads.append(nn.Sequential(*blocks))
        super().__init__(heads)
        self.owns_output = output is not None


@dataclass(frozen=True, slots=True)
class MedusaRecipe(HeadRecipe):
    """`heads` heads of `layers` residual blocks; the loss of head k weighs `decay` ** k.

    `own_output` gives each head an output matrix of its own, as upstream's have; without, heads are
    small and use the target's, which only specrun runs. `from_law` learns from the target's
    distribution instead of the text's tokens.
    """

    heads: int = 5
    layers: int = 1
    decay: float = 0.8
    own_output: bool = True
    from_law: bool = False

    kind = "medusa"
    files_name = "medusa_lm_head.safetensors"
    usual = TrainingDefaults(learning_rate=1e-3, betas=(0.9, 0.999), clip_norm=1.0)  # the paper's

    def __post_init__(self) -> None:
        if not 1 <= self.heads <= 32:
            raise OptionError(f"{self.heads} heads: give 1 to 32")
        if not 1 <= self.layers <= 16:
            raise OptionError(f"{self.layers} residual blocks a head: give 1 to 16")
        if not 0 < self.decay <= 1:
            raise OptionError(f"a decay of {self.decay:g}: give a number above 0, at most 1")

    def learner(
        self, shape: ModelShape, target: TargetMatrices, source: FeatureSource, corpus: TokenCorpus
    ) -> HeadLearner:
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


# == Medusa-2 (section 2.2.2) ======================================================================
#
# The heads are trained together with their model. The loss is L_LM + lambda_0 sum_k lambda^k L_k
# (equation 2): the model goes on learning its own next token while it learns to be read by heads.
# Heads are large and new, so they learn alone first (the model's rate is 0 while they warm up) and
# then faster than the model, at rates of their own. With `from_law` nothing is learnt but the
# distributions of the model before: L_LM becomes KL(p_before || p_now), and heads learn the
# distribution before too (self-distillation, section 2.3).
#
# The model changes, so verification keeps the tokens of the new one. The folder of a run is a whole
# model again, with `medusa_head.*` among its tensors.


@dataclass(frozen=True, slots=True)
class Medusa2Recipe(ModelRecipe):
    """`heads` are Medusa-1's settings; `head_weight` is lambda_0.

    Heads learn at the run's rate, the model at `model_rate` times it, from the share `heads_alone`
    of the steps on.
    """

    heads: MedusaRecipe
    head_weight: float = 0.2
    model_rate: float = 0.25
    heads_alone: float = 0.1

    kind = "medusa-2"
    # A rate that changes a trained model gently; the paper's are of adapters.
    usual = TrainingDefaults(learning_rate=2e-4, betas=(0.9, 0.999), clip_norm=1.0)
    through_layers = "Medusa-2 trains the target itself"

    def __post_init__(self) -> None:
        if not self.heads.own_output:
            raise OptionError(
                "Medusa-2's heads have output matrices of their own: leave out --shared-output"
            )
        if self.head_weight <= 0 or self.model_rate <= 0:
            raise OptionError("the weight of the heads and the model's rate: give numbers above 0")
        if not 0 <= self.heads_alone < 1:
            raise OptionError(
                f"heads alone for {self.heads_alone:g} of the steps: give 0 to below 1"
            )

    @property
    def learns_earlier_law(self) -> bool:
        """Whether the distribution that the model had before is learnt."""
        return self.heads.from_law

    def learner(
        self, shape: ModelShape, model: HFModel, steps: int, former: FormerModel | None
    ) -> Medusa2Learner:
        """Return the model with new heads."""
        return Medusa2Learner(self, shape, model, steps, former)

    def need(self, run: HeadRun, shape: ModelShape, corpus: TokenCorpus) -> MemoryNeed:
        """Return the memory: 16 bytes for a trained number, and the numbers kept by a step."""
        vocab_size, n_heads = shape.vocab_size, self.heads.heads
        head = shape.hidden * (vocab_size + self.heads.layers * (shape.hidden + 1))
        tokens = corpus.widest(run.tokens_per_batch)
        layers = shape.n_layers * shape.layer_numbers
        return MemoryNeed(
            {
                "target": 16 * checkpoint_size(run.target),
                "heads": 16 * n_heads * head,
                "a step": 4 * tokens * (layers + 3 * vocab_size * (1 + n_heads)),
            },
            {
                "target": "use a smaller target, or leave out --joint",
                "heads": "use fewer --heads",
                "a step": "lower --batch-tokens or --max-length",
            },
        )

    def files(self, learner: Learner, shape: ModelShape) -> HeadFiles:
        """Return the heads as they lie in the model's own folder."""
        assert isinstance(learner, Medusa2Learner)
        sizes = {"medusa_num_heads": self.heads.heads, "medusa_num_layers": self.heads.layers}
        tensors = learner.heads.state_dict().items()
        return HeadFiles(sizes, {f"medusa_head.{name}": each for name, each in tensors})

    def shown(self) -> dict[str, Any]:
        """Return the settings as the model card names them."""
        own = dataclasses.asdict(self)
        return {**dataclasses.asdict(self.heads), **own, "heads": self.heads.heads}


class Medusa2Learner(Learner):
    """A model and its heads, which learn the `former` model's distributions, or else the texts."""

    def __init__(
        self,
        recipe: Medusa2Recipe,
        shape: ModelShape,
        model: HFModel,
        steps: int,
        former: FormerModel | None = None,
    ) -> None:
        self.recipe = recipe
        self.device = model.device
        self._model = model
        # The matrices share the model's memory: heads are measured against its present choices.
        self._inner = MedusaLearner(recipe.heads, shape, model.matrices, ModelFeatures(model))
        self._former, self.heads = former, self._inner.heads
        self.first_joint_step = round(recipe.heads_alone * steps)
        model.module.requires_grad_(True)
        self.module = nn.ModuleDict({"model": model.module, "medusa_head": self.heads})

    def groups(self) -> list[ParameterGroup]:
        """Return the heads, and the model, which learns more slowly and begins later."""
        heads, model = (list(each.parameters()) for each in (self.heads, self._model.module))
        rate, start = self.recipe.model_rate, self.first_joint_step
        return [ParameterGroup(heads), ParameterGroup(model, rate=rate, starts_at=start)]

    def losses(self, batch: TokenBatch, noise: torch.Generator, step: int) -> Iterator[LossPart]:
        """Yield the loss of model and heads together: they share the model's states."""
        joint = step >= self.first_joint_step
        # While heads warm up the model's rate is 0: no activations are kept for it.
        with torch.set_grad_enabled(joint):
            states, _ = self._model.hidden_states(batch.ids)
        lesson = Lesson(batch) if self._former is None else self._former.lesson(batch)
        parts = [
            self.recipe.heads.decay ** (head + 1) * loss
            for head, loss in self._inner.head_losses(states, lesson)
        ]
        if not parts:
            return
        heads = sum(parts[1:], parts[0])
        weighed = self.recipe.head_weight * heads
        if not joint:
            yield LossPart("heads", weighed, heads.item())
            return
        # The state at t predicts the token at t + 1.
        marks = batch.learnt[:, 1:]
        # The token right after t, so `ahead` is 0: L_LM, or the KL from the distribution before.
        own = lesson.loss(self._model.logits(rows_at(states, marks)), marks, 0)
        yield LossPart("model and heads", own + weighed, own.item())

    def measure(self, batches: Sequence[TokenBatch]) -> dict[str, float]:
        """Return how well heads predict the model as it is now, and its own tokens' loss."""
        found = self._inner.measure(batches)
        return {**found, "model loss": text_loss(self._model, batches)}
