"""A run of Medusa-2 from data to files: the folder is a whole model again, with `medusa_head.*` among its tensors."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specrun.bindings.errors import OptionError
from specrun.convert.checkpoint import open_checkpoint
from specrun.train.feature_cache import CachedFeatures, CachePlace, fill_cache
from specrun.train.features import ModelFeatures, TargetMatrices
from specrun.train.head_folder import check_output, copy_tokenizer, open_output, write_head
from specrun.train.head_recipe import HeadFiles
from specrun.train.head_run import HeadReport, HeadRun, head_identity, head_report, read_corpus
from specrun.train.head_states import remove_private_states, room_for_states, states_place
from specrun.train.hf_model import HFModel, load_hf_model, read_config
from specrun.train.medusa2 import Medusa2Learner, Medusa2Recipe, medusa2_config
from specrun.train.memory import MemoryNeed, require_memory
from specrun.train.precision import usable_device, usable_precision
from specrun.train.run_checkpoint import check_same_run, earlier_run
from specrun.train.run_listener import NobodyListens, RunListener
from specrun.train.target_shape import TargetShape, target_shape
from specrun.train.target_words import TargetWords
from specrun.train.token_corpus import TokenCorpus
from specrun.train.trainer import train_learner
from specrun.train.training_card import CardFacts, training_card

__all__ = ["WEIGHTS", "train_medusa2"]

WEIGHTS = "model.safetensors"


def train_medusa2(recipe: Medusa2Recipe, run: HeadRun, listener: RunListener | None = None) -> HeadReport:
    """Train a model with its heads and write both into one folder; the target's own folder stays as it is.

    Raises as `train_head` does, and OptionError for a teacher: the model itself is trained, in torch.
    """
    if run.teacher is not None:
        raise OptionError("Medusa-2 trains the target itself: leave out --teacher")
    listener = listener or NobodyListens()
    check_output(run, holds=WEIGHTS, reads=(run.target,))
    if run.n_threads:
        torch.set_num_threads(run.n_threads)
    shape, words, device = target_shape(run.target), TargetWords(run.target), usable_device(run.device)
    earlier = earlier_run(run.state_path, resume=run.resume)
    chosen = usable_precision(run.precision, device, earlier.precision)

    def check_before_answers(texts: TokenCorpus) -> None:
        need = _need(recipe, run, shape, texts)
        listener.note(f"memory: about {need}, with answers as long as they may be")
        require_memory(need, device)

    corpus = read_corpus(run, words, WEIGHTS, listener, check_before_answers)
    settings = run.trainer_settings(recipe.defaults(), corpus, chosen)
    identity = head_identity("medusa-2", recipe, run, corpus)
    check_same_run(run.state_path, earlier, {**settings.identity, **identity})
    place = states_place(run, corpus, (), torch.float32)  # what the model computes in before it is trained
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
        learner, corpus, settings, run.state_path, resume=run.resume, identity=identity, report=listener.status
    )
    report = head_report(run, learner, corpus, settings, result)
    shown = {**dataclasses.asdict(recipe.heads), **dataclasses.asdict(recipe), "learning rate": settings.learning_rate}
    del shown["heads"]
    shown |= {"heads": recipe.heads.heads, "precision": report.precision, "seed": run.seed}
    facts = CardFacts("medusa-2", run.target.resolve(), None, run.data, report.device, shown, report.n_trained)
    _write_folder(run, recipe, learner, model, training_card(facts, corpus, result))
    remove_private_states(run, before[0] if before else None)
    return report


def _states_before(
    place: CachePlace, model: HFModel, device: torch.device, listener: RunListener
) -> tuple[CachedFeatures, TargetMatrices]:
    """Return the states and matrices of the model as it was, which are what is learnt; states are kept on disk."""
    states = fill_cache(
        place,
        ModelFeatures(model),
        device,
        lambda done, total: listener.stage("computing the target's states", done, total),
    )
    embedding = model.embedding.detach()  # never read here: only the output matrix makes laws
    return states, TargetMatrices(embedding, model.output.detach().clone(), model.softcap)


def _need(recipe: Medusa2Recipe, run: HeadRun, shape: TargetShape, corpus: TokenCorpus) -> MemoryNeed:
    tensors = open_checkpoint(run.target).tensors.values()
    n_words = int(read_config(run.target).get("vocab_size", 0))
    head = shape.hidden * (n_words + recipe.heads.layers * (shape.hidden + 1))
    tokens = min(max(run.tokens_per_batch, corpus.longest), corpus.n_tokens)
    layer = 4 * tokens * (24 * shape.hidden + 6 * shape.feed_forward)
    return MemoryNeed(
        {
            "target": 16 * sum(math.prod(tensor.shape) for tensor in tensors),
            "heads": 16 * recipe.heads.heads * head,
            "a step": shape.n_layers * layer + 4 * tokens * 3 * n_words * (1 + recipe.heads.heads),
        },
        {
            "target": "use a smaller target, or leave out --joint",
            "heads": "use fewer --heads",
            "a step": "lower --batch-tokens or --max-length",
        },
    )


def _write_folder(run: HeadRun, recipe: Medusa2Recipe, learner: Medusa2Learner, model: HFModel, card: str) -> None:
    """Write the model with its heads; the weights come last, so that a folder with them is whole."""
    copy_tokenizer(run.target, run.output)
    config = json.loads((run.target / "config.json").read_text(encoding="utf-8"))
    config = {**medusa2_config(config, recipe.heads), "base_model_name_or_path": run.target.resolve().name}
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
    return name == "lm_head.weight" and any(other != name and one.data_ptr() == pointer for other, one in named.items())
