"""Trains a head of any kind from data to files: reads, estimates, computes states, trains, writes.

The folder of a run holds the head (config.json, weights, README.md) and `training/` with the
checkpoint, the curves, and, while it runs, the cache of the target's states.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from specrun.bindings.errors import OptionError
from specrun.convert.heads.target_facts import target_facts
from specrun.train.data.token_corpus import TokenCorpus
from specrun.train.heads.earlier_head import EarlierHead, read_earlier_head
from specrun.train.heads.recipe import HeadFiles, HeadRecipe
from specrun.train.heads.run import HeadRun, StartedHeadRun, head_card, head_identity, read_corpus
from specrun.train.heads.states import (
    CACHED,
    kept_while_answering,
    may_cache,
    opened_states,
    remove_private_states,
    states_place,
    wants_cache,
)
from specrun.train.heads.unrolled import ChainLearner, ChainRecipe
from specrun.train.target.feature_cache import FeatureCache
from specrun.train.target.head_target import HeadTarget
from specrun.train.target.hf_model import TargetMatrices
from specrun.train.target.target_shape import ModelShape
from specrun.train.trainer.listener import RunListener
from specrun.train.trainer.memory import MemoryNeed, free_memory, trained_bytes
from specrun.train.trainer.model_folder import write_json, write_text, write_weights
from specrun.train.trainer.run import TrainingReport
from specrun.train.trainer.settings import TrainerSettings


def train_head(
    recipe: HeadRecipe, run: HeadRun, listener: RunListener | None = None
) -> TrainingReport:
    """Train a head and write its folder.

    Raises OptionError, FileMissingError and MalformedFileError for what was given; PairError for a
    teacher that is another model; OutOfMemoryError with an estimate before anything is loaded;
    SpecrunError where the disk is too small for the cache, or the loss is not a number.
    """
    started = StartedHeadRun(run, recipe.files_name, listener)
    shape = started.shape
    recipe, earlier = _begun(recipe, run, shape)
    started.target.check_taps(recipe.taps(shape))

    def settings_for(texts: TokenCorpus) -> TrainerSettings:
        return started.settings(recipe.defaults(shape), texts)

    def need_of_answers(texts: TokenCorpus) -> MemoryNeed:
        settings = settings_for(texts)
        # For how much disk there must be room nobody knows yet.
        cached = may_cache(run, settings, texts)
        return _fitting(recipe, started, texts, settings, cached)[0]

    place = states_place(started, recipe.taps(shape), started.precision)

    def kept(texts: TokenCorpus) -> FeatureCache | None:
        return kept_while_answering(started, settings_for(texts), place, texts)

    corpus = read_corpus(started, need_of_answers, kept)
    settings = settings_for(corpus)
    # Before memory is estimated: with cached states only the target's matrices are in it.
    cached = wants_cache(started, settings, place, corpus)
    identity = {**head_identity(recipe.kind, recipe, run, corpus), CACHED: cached}
    started.check_same(settings, identity)
    need, recompute = _fitting(recipe, started, corpus, settings, cached)
    started.require_memory(need)
    started.open_output()
    torch.manual_seed(run.seed)
    with opened_states(started, place, corpus, cached) as (matrices, source):
        torch.manual_seed(run.seed)  # heads start alike, whatever computing states has drawn
        learner = recipe.learner(shape, matrices, source, corpus)
        learner.recompute = recompute
        if earlier is not None:  # a resumed run has its draft tokens from there, too
            assert isinstance(learner, ChainLearner)
            learner.go_on_from(earlier)
        elif not run.resume:
            learner.start(corpus)
        report = started.train(learner, corpus, settings, identity)
    shape = dataclasses.replace(shape, vocab_size=matrices.output.shape[0])
    settled, by = dataclasses.asdict(recipe), started.target.computed_by
    card = head_card(recipe.kind, run, corpus, report, settings, settled, by)
    write_head(run, recipe.files(learner, shape), recipe.files_name, card)
    remove_private_states(run, source)
    return report


def _begun(
    recipe: HeadRecipe, run: HeadRun, shape: ModelShape
) -> tuple[HeadRecipe, EarlierHead | None]:
    """Return the recipe and the head that is learnt on from, which settles some of it."""
    if run.earlier is None:
        return recipe, None
    if not isinstance(recipe, ChainRecipe):
        kind = f"{recipe.kind} heads begin anew"
        raise OptionError(f"{kind}: only those of EAGLE learn on from another")
    earlier = read_earlier_head(run.earlier, recipe.kind, shape, target_facts(run.source))
    return recipe.going_on(earlier), earlier


def write_head(run: HeadRun, files: HeadFiles, weights_name: str, card: str) -> None:
    """Write all files of a head, the weights last."""
    base = run.target.resolve().name
    write_json(run.output / "config.json", {**files.config, "base_model_name_or_path": base})
    write_text(run.output / "README.md", card)
    # Last, so that a folder with weights is a whole one.
    write_weights(run.output / weights_name, files.tensors)


def _fitting(
    recipe: HeadRecipe,
    started: StartedHeadRun,
    corpus: TokenCorpus,
    settings: TrainerSettings,
    cached: bool,
) -> tuple[MemoryNeed, bool]:
    """Return what a run takes, and whether it computes again what it cannot keep."""
    need = functools.partial(_need, recipe, started.target, started.shape, corpus, settings, cached)
    ample = need(recompute=False)
    if ample.total <= free_memory(started.device) / 2:  # others may want some too
        return ample, False
    return need(recompute=True), True


def _need(
    recipe: HeadRecipe,
    source: HeadTarget,
    shape: ModelShape,
    corpus: TokenCorpus,
    settings: TrainerSettings,
    cached: bool,
    *,
    recompute: bool,
) -> MemoryNeed:
    """Return what the run will take at its largest, from shapes alone: nothing is loaded."""
    meta = torch.device("meta")
    matrix = torch.empty(shape.vocab_size, shape.hidden, device=meta)
    with meta:
        matrices, states = TargetMatrices(matrix, matrix, None), _NoFeatures(recipe.taps(shape))
        head = recipe.learner(shape, matrices, states, corpus)
    size = 2 if settings.precision == torch.bfloat16 else 4
    target = source.weight_bytes(size)
    tokens = min(max(settings.tokens_per_batch, corpus.longest), corpus.n_tokens)
    read = {"target's matrices": size * 2 * matrix.numel()}
    frozen = read if cached else {"target": target}
    step = recipe.activation_bytes(shape, tokens, corpus.longest, recompute=recompute)
    remedies = {
        "target": "use a --teacher (a quantized GGUF file of the target) or a smaller target",
        "target's matrices": "use a smaller target",
        "head": recipe.smaller,
        "a step": "lower --batch-tokens or --max-length",
    }
    training = {**frozen, "head": trained_bytes(head.module), "a step": step}
    # Cached states were computed by the whole target, which was alone in memory then.
    needs = (MemoryNeed(training, remedies), MemoryNeed({"target": target}, remedies))
    return max(needs, key=lambda need: need.total)


class _NoFeatures:
    """Stands for states where only shapes matter."""

    def __init__(self, taps: tuple[int, ...]) -> None:
        self.taps = taps

    def features(self, batch: Any) -> Any:  # noqa: ANN401 - never called
        raise NotImplementedError
