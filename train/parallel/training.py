"""Training runs of PaSS and SPACE: texts, the model in memory, and what a finished run leaves.

PaSS leaves a folder with `lookahead_embeddings.safetensors` (`weight` [L, h]) and a config. SPACE
trains the model too, so its folder is a whole model again, another one than the target, with the
mask token beside it as `space_mask.weight` [1, h].
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specrun.convert.checkpoint import open_checkpoint
from specrun.train.data.token_corpus import TokenCorpus
from specrun.train.heads.medusa2 import WEIGHTS, stored_tensors
from specrun.train.heads.recipe import HeadFiles
from specrun.train.heads.run import HeadRun, StartedHeadRun, head_card, head_identity, read_corpus
from specrun.train.heads.states import (
    filled_cache,
    remove_private_states,
    room_for_states,
    states_place,
)
from specrun.train.heads.training import write_head
from specrun.train.parallel.learner import (
    ParallelLearner,
    ParallelRecipe,
    PassRecipe,
    SpaceLearner,
    SpaceRecipe,
)
from specrun.train.target.features import ModelFeatures
from specrun.train.target.hf_model import load_hf_model
from specrun.train.target.target_shape import ModelShape
from specrun.train.trainer.listener import RunListener
from specrun.train.trainer.memory import MemoryNeed
from specrun.train.trainer.model_folder import copy_tokenizer
from specrun.train.trainer.run import TrainingReport

EMBEDDINGS = "lookahead_embeddings.safetensors"
MASK = "space_mask."


def train_pass(
    recipe: PassRecipe, run: HeadRun, listener: RunListener | None = None
) -> TrainingReport:
    """Train look-ahead embeddings for a target, which stays as it is, and write their folder.

    Raises as `train_head`, and OptionError for a teacher: gradients go through the layers.
    """
    started = _started(recipe, run, EMBEDDINGS, listener)
    shape = started.shape
    corpus = read_corpus(started, lambda texts: _need(recipe, run, shape, texts))
    settings = started.settings(recipe.defaults(), corpus)
    identity = head_identity(recipe.kind, recipe, run, corpus)
    started.check_same(settings, identity)
    started.require_memory(_need(recipe, run, shape, corpus))
    started.open_output()
    model = load_hf_model(run.target, started.device)
    torch.manual_seed(run.seed)
    learner = ParallelLearner(recipe, model)
    report = started.train(learner, corpus, settings, identity)
    card = head_card(recipe.kind, run, corpus, report, settings, dataclasses.asdict(recipe))
    tensors = dict(learner.embeddings.state_dict())
    write_head(run, HeadFiles(_config(recipe, shape), tensors), EMBEDDINGS, card)
    return report


def train_space(
    recipe: SpaceRecipe, run: HeadRun, listener: RunListener | None = None
) -> TrainingReport:
    """Train a model with its mask token and write both into one folder; the target's own stays.

    Raises as `train_pass`.
    """
    started = _started(recipe, run, WEIGHTS, listener)
    shape = started.shape
    corpus = read_corpus(started, lambda texts: _need(recipe, run, shape, texts))
    settings = started.settings(recipe.defaults(), corpus)
    identity = head_identity(recipe.kind, recipe, run, corpus)
    started.check_same(settings, identity)
    place = states_place(started, (), torch.float32)  # as the untrained model computes
    if recipe.from_law:
        kept = room_for_states(place, corpus, shape)
        started.listener.note(f"the model's states are kept on disk as they were: {kept}")
    started.require_memory(_need(recipe, run, shape, corpus))
    started.open_output()
    model = load_hf_model(run.target, started.device)
    states = matrices = None
    if recipe.from_law:
        states = filled_cache(started, place, corpus, ModelFeatures(model), started.device)
        # A copy of the output matrix as it was; the embedding makes no laws and is never read.
        matrices = dataclasses.replace(model.matrices, output=model.output.detach().clone())
    torch.manual_seed(run.seed)
    learner = SpaceLearner(recipe, model, states, matrices)
    report = started.train(learner, corpus, settings, identity)
    card = head_card(recipe.kind, run, corpus, report, settings, dataclasses.asdict(recipe))
    copy_tokenizer(run.target, run.output)
    config = json.loads((run.target / "config.json").read_text(encoding="utf-8"))
    mask = {f"{MASK}{name}": each for name, each in learner.embeddings.state_dict().items()}
    tensors: Mapping[str, Tensor] = {**stored_tensors(run.target, model), **mask}
    write_head(run, HeadFiles({**config, **_config(recipe, shape)}, tensors), WEIGHTS, card)
    remove_private_states(run, states)
    return report


def _started(
    recipe: ParallelRecipe, run: HeadRun, weights: str, listener: RunListener | None
) -> StartedHeadRun:
    run.require_folder(f"{recipe.kind} is learnt through the target's layers, in torch")
    return StartedHeadRun(run, weights, listener)


def _config(recipe: ParallelRecipe, shape: ModelShape) -> dict[str, Any]:
    """Return what the folder's config says of its look-ahead positions."""
    sizes = {"hidden_size": shape.hidden, "vocab_size": shape.vocab_size}
    return {"lookahead_kind": recipe.kind, "lookahead_positions": recipe.count, **sizes}


def _need(
    recipe: ParallelRecipe, run: HeadRun, shape: ModelShape, corpus: TokenCorpus
) -> MemoryNeed:
    """Return what is needed: the model, 16 bytes for a trained number, and what a step keeps."""
    tensors = open_checkpoint(run.target).tensors.values()
    trains_model = isinstance(recipe, SpaceRecipe)
    text = min(max(run.tokens_per_batch, corpus.longest), corpus.n_tokens)
    n_texts = max(1, text * len(corpus.sequences) // max(1, corpus.n_tokens))
    ahead = recipe.count * min(text, recipe.groups * n_texts)
    kept = ahead + (text if trains_model else 0)
    layers = shape.n_layers * (24 * shape.hidden + 6 * shape.feed_forward)
    return MemoryNeed(
        {
            "target": (16 if trains_model else 4) * sum(math.prod(each.shape) for each in tensors),
            "a step": 4 * (kept * (layers + 3 * shape.vocab_size) + text * shape.vocab_size),
        },
        {
            "target": "use a smaller target",
            "a step": "lower --batch-tokens, --max-length or --groups",
        },
    )
