"""Medusa-2: Medusa's heads trained together with their model (Cai et al. 2024, section 2.2.2).

The loss is L_LM + lambda_0 sum_k lambda^k L_k (equation 2): the model goes on learning its own next
token while it learns to be read by heads. Heads are large and new, so they learn alone first (the
model's rate is 0 while they warm up) and then faster than the model, at rates of their own. With
`from_law` nothing is learnt but what the model itself said before: L_LM becomes KL(p_before ||
p_now), and heads learn the law before too (self-distillation, section 2.3).

The model changes, so what verification keeps is the tokens of the new one. The folder of a run is a
whole model again, with `medusa_head.*` among its tensors.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specrun.bindings.errors import OptionError
from specrun.convert.checkpoint import open_checkpoint
from specrun.train.data.corpus import TokenBatch, TokenCorpus
from specrun.train.heads.learner import HeadFiles, Lesson, rows_at, token_cross_entropy
from specrun.train.heads.medusa import MedusaLearner, MedusaRecipe
from specrun.train.heads.run import (
    HeadRun,
    StartedHeadRun,
    filled_cache,
    head_card,
    head_identity,
    read_corpus,
    remove_private_states,
    room_for_states,
    states_place,
    write_head,
)
from specrun.train.target.hf_model import HFModel, TargetMatrices, load_hf_model
from specrun.train.target.shape import ModelShape
from specrun.train.target.states import FeatureSource, ModelFeatures
from specrun.train.trainer.learner import Learner, LossPart, ParameterGroup, RunListener
from specrun.train.trainer.memory import MemoryNeed
from specrun.train.trainer.model_folder import copy_tokenizer
from specrun.train.trainer.run import TrainingReport
from specrun.train.trainer.settings import TrainingDefaults

WEIGHTS = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Medusa2Recipe:
    """`heads` are Medusa-1's settings; `head_weight` is lambda_0.

    Heads learn at the run's rate, the model at `model_rate` times it, from the share `heads_alone`
    of the steps on.
    """

    heads: MedusaRecipe
    head_weight: float = 0.2
    model_rate: float = 0.25
    heads_alone: float = 0.1

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

    def defaults(self) -> TrainingDefaults:
        """Return rates that change a trained model gently; the paper's are of adapters."""
        return TrainingDefaults(learning_rate=2e-4, betas=(0.9, 0.999), clip_norm=1.0)


class Medusa2Learner(Learner):
    """A model and its heads. `before` gives the states it had, and `matrices` its matrices then."""

    def __init__(
        self,
        recipe: Medusa2Recipe,
        shape: ModelShape,
        model: HFModel,
        steps: int,
        before: FeatureSource | None = None,
        matrices: TargetMatrices | None = None,
    ) -> None:
        self.recipe = recipe
        self.device = model.device
        self._model = model
        # The matrices share the model's memory: heads are measured against what it says now.
        self._inner = MedusaLearner(recipe.heads, shape, model.matrices, ModelFeatures(model))
        self._before, self._matrices = before, matrices
        self.first_joint_step = round(recipe.heads_alone * steps)
        model.module.requires_grad_(True)
        self.module = nn.ModuleDict({"model": model.module, "medusa_head": self._inner.heads})

    def groups(self) -> list[ParameterGroup]:
        """Return the heads, and the model, which learns more slowly and begins later."""
        heads, model = (list(each.parameters()) for each in (self.heads, self._model.module))
        rate, start = self.recipe.model_rate, self.first_joint_step
        return [ParameterGroup(heads), ParameterGroup(model, rate=rate, starts_at=start)]

    def learning(self, on: bool) -> None:
        """Leave the model in evaluation mode: its own dropout would not resume exactly."""
        self.module.eval()

    def losses(self, batch: TokenBatch, noise: torch.Generator, step: int) -> Iterator[LossPart]:
        """Yield the loss of model and heads together: they share the model's states."""
        joint = step >= self.first_joint_step
        # While heads warm up the model's rate is 0: no activations are kept for it.
        with torch.set_grad_enabled(joint):
            states, _ = self._model.hidden_states(batch.ids)
        before = None if self._before is None else self._before.features(batch).final
        lesson = Lesson(batch, before, self._matrices)
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
        # Position t is learnt from where token t + 1 is.
        marks = batch.learnt[:, 1:]
        # The token right after t, so `ahead` is 0: L_LM, or the KL from the law before.
        own = lesson.loss(self._model.logits(rows_at(states, marks)), marks, 0)
        yield LossPart("model and heads", own + weighed, own.item())

    def measure(self, batches: Sequence[TokenBatch]) -> dict[str, float]:
        """Return how well heads guess what the model says now, and its own tokens' loss."""
        found = self._inner.measure(batches)
        losses, count = 0.0, 0
        for batch in batches:
            states, _ = self._model.hidden_states(batch.ids)
            marks = batch.learnt[:, 1:]
            number = int(marks.sum())
            if number:
                logits = self._model.logits(rows_at(states, marks))
                losses += number * token_cross_entropy(logits, rows_at(batch.ids, marks, 1)).item()
                count += number
        return {**found, "model loss": losses / max(1, count)}

    @property
    def heads(self) -> nn.Module:
        """The heads."""
        return self._inner.heads


def train_medusa2(
    recipe: Medusa2Recipe, run: HeadRun, listener: RunListener | None = None
) -> TrainingReport:
    """Train a model with its heads and write both into one folder; the target's own folder stays.

    Raises as `train_head`, and OptionError for a teacher: the model itself is trained, in torch.
    """
    run.require_folder("Medusa-2 trains the target itself")
    started = StartedHeadRun(run, WEIGHTS, listener)
    shape, device = started.shape, started.device

    def need(texts: TokenCorpus) -> MemoryNeed:
        return _need(recipe, run, shape, texts)

    corpus = read_corpus(started, need)
    settings = started.settings(recipe.defaults(), corpus)
    identity = head_identity("medusa-2", recipe, run, corpus)
    started.check_same(settings, identity)
    place = states_place(started, (), torch.float32)  # as the untrained model computes
    if recipe.heads.from_law:
        kept = room_for_states(place, corpus, shape)
        started.listener.note(f"the model's states are kept on disk as they were: {kept}")
    started.require_memory(need(corpus))
    started.open_output()
    model = load_hf_model(run.target, device)
    states = matrices = None
    if recipe.heads.from_law:
        states = filled_cache(started, place, corpus, ModelFeatures(model), device)
        # A copy of the output matrix as it was; the embedding makes no laws and is never read.
        matrices = dataclasses.replace(model.matrices, output=model.output.detach().clone())
    torch.manual_seed(run.seed)
    learner = Medusa2Learner(recipe, shape, model, settings.steps, states, matrices)
    report = started.train(learner, corpus, settings, identity)
    shown = {**dataclasses.asdict(recipe.heads), **dataclasses.asdict(recipe)}
    shown["heads"] = recipe.heads.heads
    card = head_card("medusa-2", run, corpus, report, settings, shown)
    copy_tokenizer(run.target, run.output)
    config = json.loads((run.target / "config.json").read_text(encoding="utf-8"))
    config |= {"medusa_num_heads": recipe.heads.heads, "medusa_num_layers": recipe.heads.layers}
    heads = {f"medusa_head.{name}": each for name, each in learner.heads.state_dict().items()}
    tensors = {**stored_tensors(run.target, model), **heads}
    write_head(run, HeadFiles(config, tensors), WEIGHTS, card)
    remove_private_states(run, states)
    return report


def _need(
    recipe: Medusa2Recipe, run: HeadRun, shape: ModelShape, corpus: TokenCorpus
) -> MemoryNeed:
    """Return what is needed: 16 bytes for a trained number, and what a step keeps."""
    tensors = open_checkpoint(run.target).tensors.values()
    vocab_size, n_heads = shape.vocab_size, recipe.heads.heads
    head = shape.hidden * (vocab_size + recipe.heads.layers * (shape.hidden + 1))
    tokens = min(max(run.tokens_per_batch, corpus.longest), corpus.n_tokens)
    layers = shape.n_layers * (24 * shape.hidden + 6 * shape.feed_forward)
    return MemoryNeed(
        {
            "target": 16 * sum(math.prod(tensor.shape) for tensor in tensors),
            "heads": 16 * n_heads * head,
            "a step": 4 * tokens * (layers + 3 * vocab_size * (1 + n_heads)),
        },
        {
            "target": "use a smaller target, or leave out --joint",
            "heads": "use fewer --heads",
            "a step": "lower --batch-tokens or --max-length",
        },
    )


def stored_tensors(target: Path, model: HFModel) -> dict[str, Tensor]:
    """Return a trained model's tensors under the names that the files of `target` have."""
    stored = set(open_checkpoint(target).tensors)
    named: dict[str, Any] = dict(model.module.state_dict())
    if not stored <= named.keys():  # files of another generation of transformers
        stored = {name for name in named if not _is_tied_copy(name, named)}
    return {name: named[name] for name in stored}


def _is_tied_copy(name: str, named: dict[str, Any]) -> bool:
    # Tied weights share memory: they are stored once, as the embedding.
    pointer = named[name].data_ptr()
    return name == "lm_head.weight" and any(
        other != name and array.data_ptr() == pointer for other, array in named.items()
    )
