"""Trains Medusa's heads together with their model: Medusa-2 (Cai et al. 2024, section 2.2.2).

The loss is L_LM + lambda_0 sum_k lambda^k L_k (equation 2): the model goes on learning its own next
token while it learns to be read by heads. Heads are large and new, so they learn alone first (the
model's rate is 0 while they warm up) and then faster than the model, at rates of their own. With
`from_law` nothing is learnt but what the model itself said before: L_LM becomes KL(p_before ||
p_now), and heads learn the law before too (self-distillation, section 2.3).

The model changes, so what verification keeps is the tokens of the new one.

A run of Medusa-2 from data to files: the folder is a whole model again, with `medusa_head.*` among
its tensors.
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
from specrun.train.data.target_tokens import TargetTokenizer
from specrun.train.data.token_corpus import TokenBatch, TokenCorpus, draft_marks
from specrun.train.heads.folder import (
    CardFacts,
    check_output,
    copy_tokenizer,
    open_output,
    training_card,
    write_head,
)
from specrun.train.heads.medusa import MedusaLearner, MedusaRecipe
from specrun.train.heads.recipe import HeadFiles, divergence_from_law, token_cross_entropy
from specrun.train.heads.run import HeadReport, HeadRun, head_identity, head_report, read_corpus
from specrun.train.heads.states import remove_private_states, room_for_states, states_place
from specrun.train.target.feature_cache import CachedFeatures, CachePlace, fill_cache
from specrun.train.target.features import FeatureSource, ModelFeatures, TargetMatrices
from specrun.train.target.hf_model import HFModel, load_hf_model, read_config
from specrun.train.target.target_shape import TargetShape, target_shape
from specrun.train.trainer.learner import Learner, LossPart, ParameterGroup
from specrun.train.trainer.listener import NobodyListens, RunListener
from specrun.train.trainer.memory import MemoryNeed, require_memory
from specrun.train.trainer.precision import usable_device, usable_precision
from specrun.train.trainer.run import TrainingDefaults
from specrun.train.trainer.run_checkpoint import check_same_run, earlier_run
from specrun.train.trainer.trainer import train_learner


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
    """A model and its heads. `before` gives the states it had, and `matrices` its matrices then,
    where they teach."""

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
        live = TargetMatrices(
            model.embedding.detach(), model.output.detach(), model.softcap
        )  # these share memory
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
                list(self._model.module.parameters()),
                rate=self.recipe.model_rate,
                starts_at=self.first_joint_step,
            ),
        ]

    def learning(self, on: bool) -> None:
        """Leave the model in evaluation mode: dropout, where its configuration has some, would not
        resume exactly."""
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
        """Return how well heads guess what the model says now, and the loss of its own next
        tokens."""
        found = self._inner.measure(batches)
        losses, count = 0.0, 0
        for batch in batches:
            states, _ = self._model.hidden_states(batch.ids)
            marks = batch.learnt[:, 1:]
            number = int(marks.sum())
            if number:
                logits = self._model.logits(states[:, :-1][marks])
                losses += number * token_cross_entropy(logits, batch.ids[:, 1:][marks]).item()
                count += number
        return {**found, "model loss": losses / max(1, count)}

    @property
    def heads(self) -> nn.Module:
        """The heads."""
        return self._inner.heads


class _LawBefore:
    """What is learnt at a batch's positions: the text's tokens, or the law that the model had there
    before."""

    def __init__(
        self, batch: TokenBatch, before: FeatureSource | None, matrices: TargetMatrices | None
    ) -> None:
        self._batch, self._matrices = batch, matrices
        self._states = None if before is None else before.features(batch).final

    def loss(self, logits: Tensor, marks: Tensor, ahead: int) -> Tensor:
        """Return the mean loss of `logits` at the marked positions t for the tokens at t + 1 +
        ahead."""
        length = marks.shape[1]
        if self._states is None or self._matrices is None:
            return token_cross_entropy(
                logits, self._batch.ids[:, 1 + ahead : 1 + ahead + length][marks]
            )
        return divergence_from_law(
            logits, self._matrices.law(self._states[:, ahead : ahead + length][marks])
        )


def medusa2_config(config: dict[str, Any], recipe: MedusaRecipe) -> dict[str, Any]:
    """Return the model's config with what says that heads lie beside it."""
    return {**config, "medusa_num_heads": recipe.heads, "medusa_num_layers": recipe.layers}


WEIGHTS = "model.safetensors"


def train_medusa2(
    recipe: Medusa2Recipe, run: HeadRun, listener: RunListener | None = None
) -> HeadReport:
    """Train a model with its heads and write both into one folder; the target's own folder stays as
    it is.

    Raises as `train_head` does, and OptionError for a teacher: the model itself is trained, in
    torch.
    """
    if run.teacher is not None:
        raise OptionError("Medusa-2 trains the target itself: leave out --teacher")
    listener = listener or NobodyListens()
    check_output(run, holds=WEIGHTS, reads=(run.target,))
    if run.n_threads:
        torch.set_num_threads(run.n_threads)
    shape, tokenizer, device = (
        target_shape(run.target),
        TargetTokenizer(run.target),
        usable_device(run.device),
    )
    earlier = earlier_run(run.state_path, resume=run.resume)
    chosen = usable_precision(run.precision, device, earlier.precision)

    def check_before_answers(texts: TokenCorpus) -> None:
        need = _need(recipe, run, shape, texts)
        listener.note(f"memory: about {need}, with answers as long as they may be")
        require_memory(need, device)

    corpus = read_corpus(run, tokenizer, WEIGHTS, listener, check_before_answers)
    settings = run.trainer_settings(recipe.defaults(), corpus, chosen)
    identity = head_identity("medusa-2", recipe, run, corpus)
    check_same_run(run.state_path, earlier, {**settings.identity, **identity})
    place = states_place(
        run, corpus, (), torch.float32
    )  # what the model computes in before it is trained
    if recipe.heads.from_law:
        kept = room_for_states(place, shape)
        listener.note(f"the model's states are kept on disk as they were: {kept}")
    need = _need(recipe, run, shape, corpus)
    listener.note(f"memory: about {need}")
    require_memory(need, device)
    open_output(run, holds=WEIGHTS)
    model = load_hf_model(run.target, device)
    before = _states_before(place, model, device, listener) if recipe.heads.from_law else ()
    torch.manual_seed(run.seed)
    learner = Medusa2Learner(recipe, shape, model, settings.steps, *before)
    result = train_learner(
        learner,
        corpus,
        settings,
        run.state_path,
        resume=run.resume,
        identity=identity,
        report=listener.status,
    )
    report = head_report(run, learner, corpus, settings, result)
    shown = {
        **dataclasses.asdict(recipe.heads),
        **dataclasses.asdict(recipe),
        "learning rate": settings.learning_rate,
    }
    del shown["heads"]
    shown |= {"heads": recipe.heads.heads, "precision": report.precision, "seed": run.seed}
    facts = CardFacts(
        "medusa-2", run.target.resolve(), None, run.data, report.device, shown, report.n_trained
    )
    _write_folder(run, recipe, learner, model, training_card(facts, corpus, result))
    remove_private_states(run, before[0] if before else None)
    return report


def _states_before(
    place: CachePlace, model: HFModel, device: torch.device, listener: RunListener
) -> tuple[CachedFeatures, TargetMatrices]:
    """Return the states and matrices of the model as it was, which are what is learnt; states are
    kept on disk."""
    states = fill_cache(
        place,
        ModelFeatures(model),
        device,
        lambda done, total: listener.stage("computing the target's states", done, total),
    )
    embedding = model.embedding.detach()  # never read here: only the output matrix makes laws
    return states, TargetMatrices(embedding, model.output.detach().clone(), model.softcap)


def _need(
    recipe: Medusa2Recipe, run: HeadRun, shape: TargetShape, corpus: TokenCorpus
) -> MemoryNeed:
    tensors = open_checkpoint(run.target).tensors.values()
    vocab_size = int(read_config(run.target).get("vocab_size", 0))
    head = shape.hidden * (vocab_size + recipe.heads.layers * (shape.hidden + 1))
    tokens = min(max(run.tokens_per_batch, corpus.longest), corpus.n_tokens)
    layer = 4 * tokens * (24 * shape.hidden + 6 * shape.feed_forward)
    return MemoryNeed(
        {
            "target": 16 * sum(math.prod(tensor.shape) for tensor in tensors),
            "heads": 16 * recipe.heads.heads * head,
            "a step": shape.n_layers * layer
            + 4 * tokens * 3 * vocab_size * (1 + recipe.heads.heads),
        },
        {
            "target": "use a smaller target, or leave out --joint",
            "heads": "use fewer --heads",
            "a step": "lower --batch-tokens or --max-length",
        },
    )


def _write_folder(
    run: HeadRun, recipe: Medusa2Recipe, learner: Medusa2Learner, model: HFModel, card: str
) -> None:
    """Write the model with its heads; the weights come last, so that a folder with them is
    whole."""
    copy_tokenizer(run.target, run.output)
    config = json.loads((run.target / "config.json").read_text(encoding="utf-8"))
    config = {
        **medusa2_config(config, recipe.heads),
        "base_model_name_or_path": run.target.resolve().name,
    }
    write_head(run.output, HeadFiles(config, _tensors(run.target, learner, model)), WEIGHTS, card)


def _tensors(target: Path, learner: Medusa2Learner, model: HFModel) -> dict[str, Tensor]:
    """Return the model's tensors under the names its own files have, and the heads'."""
    stored = set(open_checkpoint(target).tensors)
    named: dict[str, Any] = dict(model.module.state_dict())
    if not stored <= named.keys():  # files of another generation of transformers
        stored = {name for name in named if not _is_tied_copy(name, named)}
    found = {name: named[name] for name in stored}
    found |= {f"medusa_head.{name}": tensor for name, tensor in learner.heads.state_dict().items()}
    return found


def _is_tied_copy(name: str, named: dict[str, Any]) -> bool:
    pointer = named[name].data_ptr()
    return name == "lm_head.weight" and any(
        other != name and array.data_ptr() == pointer for other, array in named.items()
    )
