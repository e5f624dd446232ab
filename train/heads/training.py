"""Trains one head of any kind from data to files: reads, estimates, computes states, trains,
writes.

The folder of a run holds the head (config.json, weights, README.md) and `training/` with the
checkpoint, the curves, and, while it runs, the cache of the target's states.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from specrun.convert.checkpoint import open_checkpoint
from specrun.train.data.target_tokens import TargetTokenizer
from specrun.train.data.token_corpus import TokenCorpus
from specrun.train.heads.folder import (
    CardFacts,
    check_output,
    open_output,
    training_card,
    write_head,
)
from specrun.train.heads.recipe import HeadRecipe
from specrun.train.heads.run import HeadReport, HeadRun, head_identity, head_report, read_corpus
from specrun.train.heads.states import (
    CACHED,
    may_cache,
    opened_states,
    remove_private_states,
    states_place,
    wants_cache,
)
from specrun.train.target.features import TargetMatrices
from specrun.train.target.hf_model import read_config
from specrun.train.target.target_shape import TargetShape, target_shape
from specrun.train.target.teacher import check_teacher
from specrun.train.trainer.learner import Learner
from specrun.train.trainer.listener import NobodyListens, RunListener, TrainingResult
from specrun.train.trainer.memory import MemoryNeed, free_memory, require_memory, trained_bytes
from specrun.train.trainer.precision import usable_device, usable_precision
from specrun.train.trainer.run_checkpoint import check_same_run, earlier_run
from specrun.train.trainer.settings import TrainerSettings
from specrun.train.trainer.trainer import train_learner


def train_head(recipe: HeadRecipe, run: HeadRun, listener: RunListener | None = None) -> HeadReport:
    """Train a head and write its folder.

    Raises OptionError, FileMissingError and MalformedFileError for what was given; PairError for a
    teacher that is another model; OutOfMemoryError with an estimate before anything is loaded;
    SpecrunError where the disk is too small for the cache, or the loss is not a number.
    """
    listener = listener or NobodyListens()
    check_output(run, holds=recipe.files_name, reads=(run.target,))
    if run.n_threads:
        torch.set_num_threads(run.n_threads)
    shape, tokenizer = target_shape(run.target), TargetTokenizer(run.target)
    vocab_size = int(read_config(run.target).get("vocab_size", 0))
    if run.teacher is not None:
        check_teacher(run.teacher, tokenizer, vocab_size, shape)
    device, earlier = usable_device(run.device), earlier_run(run.state_path, resume=run.resume)
    precision = usable_precision(run.precision, device, earlier.precision)

    def settings_for(texts: TokenCorpus) -> TrainerSettings:
        return run.trainer_settings(recipe.defaults(shape), texts, precision)

    def need_for(
        texts: TokenCorpus, settings: TrainerSettings, cached: bool
    ) -> tuple[MemoryNeed, bool]:
        return _fitting(
            functools.partial(_need, recipe, run, shape, vocab_size, texts, settings, cached),
            device,
        )

    def check_before_answers(texts: TokenCorpus) -> None:
        settings = settings_for(texts)
        # For how much disk there must be room nobody knows yet.
        need, _ = need_for(texts, settings, may_cache(run, settings, texts))
        listener.note(f"memory: about {need}, with answers as long as they may be")
        require_memory(need, device)

    corpus = read_corpus(run, tokenizer, recipe.files_name, listener, check_before_answers)
    settings = settings_for(corpus)
    place = states_place(run, corpus, recipe.taps(shape), precision)
    cached = wants_cache(run, settings, shape, place, earlier, listener)
    identity = {**head_identity(recipe.kind, recipe, run, corpus), CACHED: cached}
    check_same_run(run.state_path, earlier, {**settings.identity, **identity})
    need, recompute = need_for(corpus, settings, cached)
    listener.note(f"memory: about {need}")
    require_memory(need, device)
    open_output(run, holds=recipe.files_name)
    torch.manual_seed(run.seed)
    with opened_states(run, place, device, precision, cached, listener) as (matrices, source):
        torch.manual_seed(run.seed)
        learner = recipe.learner(shape, matrices, source, corpus)
        learner.recompute = recompute
        result = train_learner(
            learner,
            corpus,
            settings,
            run.state_path,
            resume=run.resume,
            identity=identity,
            report=listener.status,
        )
    report = _finish(recipe, run, shape, matrices, learner, corpus, settings, result)
    remove_private_states(run, source)
    return report


def _fitting(need: Callable[..., MemoryNeed], device: torch.device) -> tuple[MemoryNeed, bool]:
    """Return what a run will take, and whether it computes again what it cannot keep; `need` takes
    `recompute`."""
    ample = need(recompute=False)
    if ample.total <= free_memory(device) / 2:  # others may want some too
        return ample, False
    return need(recompute=True), True


def _need(
    recipe: HeadRecipe,
    run: HeadRun,
    shape: TargetShape,
    vocab_size: int,
    corpus: TokenCorpus,
    settings: TrainerSettings,
    cached: bool,
    *,
    recompute: bool,
) -> MemoryNeed:
    """Return what the run will take at its largest, from shapes alone: nothing is loaded."""
    meta = torch.device("meta")
    matrix = torch.empty(vocab_size, shape.hidden, device=meta)
    with meta:
        head = recipe.learner(
            shape, TargetMatrices(matrix, matrix, None), _NoFeatures(recipe.taps(shape)), corpus
        )
    size = 2 if settings.precision == torch.bfloat16 else 4
    target = 0
    if run.teacher is None:
        tensors = open_checkpoint(run.target).tensors.values()
        target = size * sum(math.prod(tensor.shape) for tensor in tensors)
    tokens = min(max(settings.tokens_per_batch, corpus.longest), corpus.n_tokens)
    training = {
        "target's matrices" if cached else "target": size * 2 * matrix.numel()
        if cached
        else target,
        "head": trained_bytes(head.module),
        "a step": recipe.activation_bytes(
            shape, vocab_size, tokens, corpus.longest, recompute=recompute
        ),
    }
    remedies = {
        "target": "use a --teacher (a quantized GGUF file of the target) or a smaller target",
        "target's matrices": "use a smaller target",
        "head": recipe.smaller,
        "a step": "lower --batch-tokens or --max-length",
    }
    alone = MemoryNeed({"target": target}, remedies)
    return max(MemoryNeed(training, remedies), alone, key=lambda need: need.total)


class _NoFeatures:
    """Stands for states where only shapes matter."""

    def __init__(self, taps: tuple[int, ...]) -> None:
        self.taps = taps

    def features(self, batch: Any) -> Any:  # noqa: ANN401 - never called
        raise NotImplementedError


def _finish(
    recipe: HeadRecipe,
    run: HeadRun,
    shape: TargetShape,
    matrices: TargetMatrices,
    learner: Learner,
    corpus: TokenCorpus,
    settings: TrainerSettings,
    result: TrainingResult,
) -> HeadReport:
    report = head_report(run, learner, corpus, settings, result)
    shown = {
        **dataclasses.asdict(recipe),
        "learning rate": settings.learning_rate,
        "tokens per batch": settings.tokens_per_batch,
        "precision": report.precision,
        "seed": settings.seed,
    }
    facts = CardFacts(
        recipe.kind,
        run.target.resolve(),
        run.teacher,
        run.data,
        report.device,
        shown,
        report.n_trained,
    )
    files = recipe.files(learner, shape, matrices.output.shape[0])
    base = {"base_model_name_or_path": run.target.resolve().name}
    files = dataclasses.replace(files, config={**files.config, **base})
    write_head(run.output, files, recipe.files_name, training_card(facts, corpus, result))
    return report
