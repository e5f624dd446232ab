"""Look-ahead positions: PaSS (Monea et al. 2023) and SPACE (Yi et al. 2024)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from specrun.bindings.errors import OptionError
from specrun.train.data.corpus import TokenBatch, TokenCorpus, draft_marks
from specrun.train.heads.learner import (
    FormerModel,
    HeadLearner,
    Lesson,
    best_tokens,
    rows_at,
    text_loss,
)
from specrun.train.heads.run import HeadFiles, HeadRun, ModelRecipe
from specrun.train.target.hf_model import HFModel
from specrun.train.target.shape import ModelShape, checkpoint_size
from specrun.train.target.states import Features, ModelFeatures
from specrun.train.trainer.learner import Learner, LossPart, ParameterGroup
from specrun.train.trainer.memory import MemoryNeed
from specrun.train.trainer.settings import TrainingDefaults

# == Look-ahead positions in torch =================================================================
#
# A group of L embeddings follows position t of a text: they have the positions t + 1 to t + L,
# attend to the text up to t and to one another as a chain, and nothing attends to them. So at the
# row of the j-th (from 1) the target would predict the token t + 1 + j, without the j tokens before
# it. That is how they are evaluated when they draft
# (`runtime/drafters/lookahead_positions.py`).
#
# The text is computed first, its keys and values are kept, and all groups of a batch then attend to
# them at once: a text of T tokens with G groups costs T + G L positions, not G texts.


_NEVER = torch.finfo(torch.float32).min


class LookaheadEmbeddings(nn.Module):
    """`count` embeddings [count, h], one a look-ahead position; or one for all, SPACE's mask token.

    They begin as an average token of the target, `spread` apart, so that the layers read them as
    tokens from the first step on.
    """

    def __init__(self, embedding: Tensor, count: int, *, shared: bool) -> None:
        super().__init__()
        rows, spread = 1 if shared else count, embedding.float().std(0)
        self.count = count
        drawn = torch.randn(rows, embedding.shape[1], device=embedding.device)
        self.weight = nn.Parameter(embedding.float().mean(0) + 0.5 * spread * drawn)

    def rows(self) -> Tensor:
        """Return the embeddings of one group, [count, h]."""
        return self.weight.expand(self.count, -1)


def text_states(model: HFModel, ids: Tensor) -> tuple[Tensor, Any]:
    """Return the final states [B, T, h] of texts padded on the right, and their keys and values."""
    from transformers import DynamicCache

    cache = DynamicCache()
    found = model.model.base_model(input_ids=ids, use_cache=True, past_key_values=cache)
    return found.last_hidden_state, found.past_key_values


def lookahead_states(
    model: HFModel,
    cache: Any,  # noqa: ANN401 - transformers' own
    n_text: int,
    places: Tensor,
    embeddings: Tensor,
) -> Tensor:
    """Return the final states [B, G, L, h] of groups of embeddings [L, h] behind texts.

    `places` [B, G] are the positions t that groups stand behind; `cache` holds the keys and values
    of the texts' `n_text` positions, and afterwards those of the groups too.
    """
    batch, n_groups = places.shape
    length, width = embeddings.shape
    dtype = model.embedding.dtype
    inputs = embeddings.to(dtype).repeat(n_groups, 1).expand(batch, -1, width)
    steps = torch.arange(length, device=places.device)
    positions = (places[:, :, None] + 1 + steps).flatten(1)  # [B, G L]
    found = model.model.base_model(
        inputs_embeds=inputs,
        attention_mask=_mask(places, n_text, length).to(dtype),
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
    )
    states: Tensor = found.last_hidden_state.unflatten(1, (n_groups, length))
    return states


def _mask(places: Tensor, n_text: int, length: int) -> Tensor:
    """Return the additive mask [B, 1, G L, T + G L]: the text up to t, a chain in each group."""
    batch, n_groups = places.shape
    device = places.device
    text = torch.arange(n_text, device=device) <= places[:, :, None]  # [B, G, T]
    text = text.repeat_interleave(length, 1)  # [B, G L, T]
    chain = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    same = torch.eye(n_groups, dtype=torch.bool, device=device)
    own = torch.kron(same.int(), chain.int()).bool().expand(batch, -1, -1)
    seen = torch.cat((text, own), -1)[:, None]
    return torch.zeros(seen.shape, device=device).masked_fill(~seen, _NEVER)


# == Learners ======================================================================================
#
# Position j of a group behind position t learns to predict after t + j, without the j tokens in
# between: the text's own tokens, or with `from_law` the target's distribution there (KL
# divergence). PaSS learns the embeddings alone. SPACE's semi-autoregressive fine-tuning learns the
# model too: L_AR + lambda L_mask, every text read once in order and once masked; with `from_law`,
# L_AR is KL(p_before || p_now), and the masks learn the distribution of the model before.


EMBEDDINGS = "lookahead_embeddings.safetensors"
MASK = "space_mask."
_THROUGH_LAYERS = "is learnt through the target's layers, in torch"
_MEASURED_GROUPS = 64  # of a text, at most, while measuring


@dataclass(frozen=True, slots=True)
class LookaheadRecipe(ModelRecipe):
    """Look-ahead positions, whose rows come through the target's layers.

    `count` positions a group, whose j-th weighs `decay` to the power of j - 1; `groups` of them
    behind each text in a step. If the model learns too, all have one embedding.
    """

    count: int = 3
    groups: int = 48
    decay: float = 0.8
    from_law: bool = False

    def __post_init__(self) -> None:
        if self.count < 1 or self.groups < 1:
            raise OptionError(
                f"{self.groups} groups of {self.count} look-ahead positions: give at least 1 of 1"
            )
        if not 0 < self.decay <= 1:
            raise OptionError(f"a decay of {self.decay:g}: give a number above 0, at most 1")

    @property
    def learns_earlier_law(self) -> bool:
        """Whether the distribution that the model had before is learnt, and the model changes."""
        return self.from_law and self.changes_model

    def need(self, run: HeadRun, shape: ModelShape, corpus: TokenCorpus) -> MemoryNeed:
        """Return the memory: the model, 16 bytes for a trained number, and a step's numbers."""
        text = corpus.widest(run.tokens_per_batch)
        n_texts = max(1, text * len(corpus.sequences) // max(1, corpus.n_tokens))
        ahead = self.count * min(text, self.groups * n_texts)
        kept = ahead + (text if self.changes_model else 0)
        layers = shape.n_layers * shape.layer_numbers
        return MemoryNeed(
            {
                "target": (16 if self.changes_model else 4) * checkpoint_size(run.target),
                "a step": 4 * (kept * (layers + 3 * shape.vocab_size) + text * shape.vocab_size),
            },
            {
                "target": "use a smaller target",
                "a step": "lower --batch-tokens, --max-length or --groups",
            },
        )

    def files(self, learner: Learner, shape: ModelShape) -> HeadFiles:
        """Return the embeddings, under SPACE's name if a model lies beside them."""
        assert isinstance(learner, LookaheadLearner)
        config = {
            "lookahead_kind": self.kind,
            "lookahead_positions": self.count,
            "hidden_size": shape.hidden,
            "vocab_size": shape.vocab_size,
        }
        prefix = MASK if self.changes_model else ""
        tensors = learner.embeddings.state_dict().items()
        return HeadFiles(config, {f"{prefix}{name}": each for name, each in tensors})


@dataclass(frozen=True, slots=True)
class PassRecipe(LookaheadRecipe):
    """PaSS: an embedding for every position; the target stays as it is.

    The folder of a run holds `lookahead_embeddings.safetensors` (`weight` [L, h]) and a config.
    """

    kind = "pass"
    files_name = EMBEDDINGS
    changes_model = False
    through_layers = f"pass {_THROUGH_LAYERS}"
    # The paper's rate for embeddings.
    usual = TrainingDefaults(learning_rate=1e-2, betas=(0.9, 0.999), clip_norm=1.0)

    def learner(
        self, shape: ModelShape, model: HFModel, steps: int, former: FormerModel | None
    ) -> LookaheadLearner:
        """Return new embeddings over the frozen model."""
        return LookaheadLearner(self, model)


@dataclass(frozen=True, slots=True)
class SpaceRecipe(LookaheadRecipe):
    """SPACE: one mask token for all positions; the target learns too and becomes another one.

    `mask_weight` is the weight of the masks' loss in addition to the model's own; the embedding of
    the mask learns `mask_rate` times as fast as the model. The folder of a run is a whole model
    again, another one than the target, with the mask token as `space_mask.weight` [1, h].
    """

    kind = "space"
    through_layers = f"space {_THROUGH_LAYERS}"
    usual = TrainingDefaults(learning_rate=2e-4, betas=(0.9, 0.999), clip_norm=1.0)  # gently

    mask_weight: float = 1.0
    mask_rate: float = 20.0

    def __post_init__(self) -> None:
        LookaheadRecipe.__post_init__(self)  # super() does not work in a class with slots
        if self.mask_weight <= 0 or self.mask_rate <= 0:
            raise OptionError("the weight and the rate of masks: give numbers above 0")

    def learner(
        self, shape: ModelShape, model: HFModel, steps: int, former: FormerModel | None
    ) -> SpaceLearner:
        """Return the model with a new mask token."""
        return SpaceLearner(self, model, former)


class LookaheadLearner(HeadLearner):
    """Trains the embeddings of look-ahead positions over a frozen model."""

    label = "position"

    def __init__(self, recipe: LookaheadRecipe, model: HFModel) -> None:
        self.recipe, self._model = recipe, model
        self.embeddings = LookaheadEmbeddings(
            model.embedding.detach(), recipe.count, shared=recipe.changes_model
        )
        module: nn.Module = self.embeddings
        if recipe.changes_model:
            module = nn.ModuleDict({"model": model.module, "mask": module})
        super().__init__(module, model.matrices, ModelFeatures(model), recipe.count)

    def losses(self, batch: TokenBatch, noise: torch.Generator, step: int) -> Iterator[LossPart]:
        """Yield the loss of all positions together: they share the layers' activations."""
        with torch.no_grad():
            states, cache = text_states(self._model, batch.ids)
        law = states if self.recipe.from_law else None
        found = self._positions_loss(batch, cache, Lesson(batch, law, self._target), noise)
        if found is not None:
            yield LossPart("positions", found, float(found.detach()))

    def _positions_loss(
        self, batch: TokenBatch, cache: object, lesson: Lesson, noise: torch.Generator
    ) -> Tensor | None:
        """Return the weighted loss of groups behind drawn positions; None: nothing is learnt."""
        marks = draft_marks(batch.learnt, 0)
        places, chosen = _drawn_places(marks, self.recipe.groups, noise)
        if not chosen.any():
            return None
        states = lookahead_states(
            self._model, cache, batch.ids.shape[1], places, self.embeddings.rows()
        )
        losses: list[Tensor] = []
        for index in range(self.recipe.count):
            # All tokens in between are the text's, too: those of the last places reach less far.
            deep = draft_marks(batch.learnt, index)
            inside = places < deep.shape[1]
            there = inside.clone()
            there[inside] = deep[inside.nonzero()[:, 0], places[inside]]
            there &= chosen
            if there.any():
                logits = self._target.logits(states[:, :, index][there])
                weight = self.recipe.decay**index
                # Text by text and place by place, as the logits come.
                rows = there.nonzero()[:, 0]
                loss = lesson.loss_at(logits, rows, places[there] + index + 1)
                losses.append(weight * loss)
        return sum(losses[1:], losses[0])

    def drafts(self, batch: TokenBatch, found: Features, start: Tensor) -> Iterable[Tensor]:
        """Yield each position's best tokens, of groups behind the marks `start`."""
        states = self._states_at(batch, start)
        for index in range(self.recipe.count):
            yield best_tokens(self._target.logits(states[:, index]))

    def _states_at(self, batch: TokenBatch, start: Tensor) -> Tensor:
        """Return the states [P, L, h] of groups behind the P marks [B, n]."""
        n_text, found = batch.ids.shape[1], []
        _, cache = text_states(self._model, batch.ids)
        rows = self.embeddings.rows()
        for first in range(0, start.shape[1], _MEASURED_GROUPS):
            piece = start[:, first : first + _MEASURED_GROUPS]
            places = torch.arange(first, first + piece.shape[1], device=start.device)
            places = places.expand(start.shape[0], -1)
            found.append(lookahead_states(self._model, cache, n_text, places, rows))
            cache.crop(-piece.shape[1] * self.recipe.count)  # the next groups do not see these
        return torch.cat(found, 1)[start]


class SpaceLearner(LookaheadLearner):
    """Trains a model and the mask token, by the `former` model's distributions or by the texts."""

    def __init__(
        self, recipe: SpaceRecipe, model: HFModel, former: FormerModel | None = None
    ) -> None:
        model.module.requires_grad_(True)
        super().__init__(recipe, model)
        self._target = replace(self._target, output=model.output)  # with its gradients
        self._space, self._former = recipe, former

    def groups(self) -> list[ParameterGroup]:
        """Return the model and the mask, which is new and learns faster."""
        model, mask = self._model.module, self.embeddings
        rate = self._space.mask_rate
        return [
            ParameterGroup([*model.parameters()]),
            ParameterGroup([*mask.parameters()], rate=rate),
        ]

    def losses(self, batch: TokenBatch, noise: torch.Generator, step: int) -> Iterator[LossPart]:
        """Yield L_AR + lambda L_mask as one part: masks attend to the text's keys and values."""
        states, cache = text_states(self._model, batch.ids)
        lesson = Lesson(batch) if self._former is None else self._former.lesson(batch)
        # The state at t predicts the token at t + 1.
        marks = batch.learnt[:, 1:]
        own = lesson.loss(self._target.logits(rows_at(states, marks)), marks, 0)
        masks = self._positions_loss(batch, cache, lesson, noise)
        whole = own if masks is None else own + self._space.mask_weight * masks
        yield LossPart("model and masks", whole, own.item())

    def measure(self, batches: Sequence[TokenBatch]) -> dict[str, float]:
        """Return how well masks predict the model as it is now, and its own tokens' loss."""
        return {**super().measure(batches), "model loss": text_loss(self._model, batches)}


def _drawn_places(marks: Tensor, most: int, noise: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return up to `most` of each row's marks [B, n] as places [B, G], and which of them are some.

    Rows with fewer marks are filled with places that are none.
    """
    score = torch.rand(marks.shape, generator=noise).to(marks.device)
    score = score.masked_fill(~marks, -1.0)
    n_groups = max(1, min(most, int(marks.sum(1).max()))) if marks.numel() else 0
    if not n_groups:
        empty = torch.zeros(marks.shape[0], 0, device=marks.device)
        return empty.long(), empty.bool()
    best = score.topk(n_groups, 1)
    return best.indices, best.values >= 0
