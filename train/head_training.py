"""Trains one head of any kind from data to files: reads, estimates, computes states, trains, writes.

The folder of a run holds the head (config.json, weights, README.md) and `training/` with the checkpoint, the curves,
and, while it runs, the cache of the target's states.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from specrun.bindings.errors import OptionError
from specrun.bindings.model import Model
from specrun.convert.checkpoint import open_checkpoint
from specrun.runtime.planning.offload import resolve_gpu_layers
from specrun.train.data_file import read_documents
from specrun.train.feature_cache import CachedFeatures, cache_bytes, check_cache_space, fill_cache
from specrun.train.features import FeatureSource, ModelFeatures, TargetMatrices
from specrun.train.head_folder import open_output, write_head
from specrun.train.head_recipe import HeadRecipe
from specrun.train.hf_model import load_hf_model, read_config
from specrun.train.learner import Learner
from specrun.train.memory import MemoryNeed, require_memory, trained_bytes
from specrun.train.own_answers import AnswerSettings, answer_prompts, runnable_target
from specrun.train.precision import usable_device, usable_precision
from specrun.train.run_listener import NobodyListens, RunListener
from specrun.train.source_identity import source_identity
from specrun.train.target_shape import TargetShape, target_shape
from specrun.train.target_words import TargetWords
from specrun.train.teacher import TeacherFeatures, check_same_words, teacher_matrices
from specrun.train.token_corpus import TokenCorpus, corpus_of, encode_corpus
from specrun.train.trainer import TrainerSettings, TrainingResult, check_checkpoint, train_learner
from specrun.train.training_card import CardFacts, training_card

__all__ = ["HeadReport", "HeadRun", "train_head"]

CachePolicy = Literal["auto", "yes", "no"]
_STATE = "state.pt"


@dataclass(frozen=True, slots=True)
class HeadRun:
    """What to train on, for how long, and where to write it.

    `target` is a Hugging Face folder. With `teacher`, a GGUF file of the same model, states and laws are llama.cpp's.
    `steps` overrules `epochs`; `learning_rate` None is the kind's own. `warmup` is a share of the steps, `measures` how
    often held-out data are measured. `cache` says whether the target's states are kept on disk, in `features` or, where
    that is None, in the run's own folder until it ends. `own_answers` lets the target answer the data's prompts itself.
    """

    target: Path
    data: tuple[Path, ...]
    output: Path
    teacher: Path | None = None
    epochs: int = 1
    steps: int | None = None
    tokens_per_batch: int = 4096
    max_length: int = 2048
    held_out: float = 0.05
    learning_rate: float | None = None
    warmup: float = 0.03
    measures: int = 10
    own_answers: AnswerSettings | None = None
    seed: int = 0
    device: str = "auto"
    precision: str = "auto"
    cache: CachePolicy = "auto"
    features: Path | None = None
    save_seconds: float = 180.0
    n_threads: int = 0
    resume: bool = False
    force: bool = False

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise OptionError(f"{self.epochs} epochs: give at least 1")
        if not 0 <= self.held_out < 1:
            raise OptionError(f"a held-out share of {self.held_out:g}: give 0 to below 1")
        if not 0 <= self.warmup < 1:
            raise OptionError(f"a warm-up of {self.warmup:g} of the steps: give 0 to below 1")
        if self.teacher is not None and self.cache == "no":
            raise OptionError("--teacher computes states once, before training: it needs the cache (--cache auto)")

        if self.features is not None and self.cache == "no":
            raise OptionError("--features names a place for states, and --cache no keeps none: leave one of them out")

    @property
    def state_path(self) -> Path:
        """The checkpoint."""
        return self.output / "training" / _STATE


@dataclass(frozen=True, slots=True)
class HeadReport:
    """What was made: the folder, how the run went, and how much was trained on what."""

    output: Path
    result: TrainingResult
    n_trained: int
    n_sequences: int
    n_held_out: int
    precision: str
    device: str


def train_head(recipe: HeadRecipe, run: HeadRun, listener: RunListener | None = None) -> HeadReport:
    """Train a head and write its folder.

    Raises OptionError, FileMissingError and MalformedFileError for what was given; PairError for a teacher that is
    another model; OutOfMemoryError with an estimate before anything is loaded; SpecrunError where the disk is too
    small for the cache, or the loss is not a number.
    """
    listener = listener or NobodyListens()
    if run.n_threads:
        torch.set_num_threads(run.n_threads)
    shape, words = target_shape(run.target), TargetWords(run.target)
    n_words = int(read_config(run.target).get("vocab_size", 0))
    taps = recipe.taps(shape)
    device = usable_device(run.device)
    corpus = _read_corpus(run, words, recipe, listener)
    _tell_corpus(corpus, listener)
    settings = _settings(recipe, run, shape, corpus, usable_precision(run.precision, device))
    cached = _wants_cache(run, settings, corpus, shape, len(taps), listener)
    require_memory(_need(recipe, run, shape, n_words, corpus, settings, cached), device)
    open_output(run.output, resume=run.resume, force=run.force, holds=recipe.files_name)
    if run.force and not run.resume:
        run.state_path.unlink(missing_ok=True)
    check_checkpoint(run.state_path, resume=run.resume)
    torch.manual_seed(run.seed)
    with _opened(run, words, n_words, corpus, taps, device, settings.precision, cached, listener) as (matrices, source):
        torch.manual_seed(run.seed)
        learner = recipe.learner(shape, matrices, source, corpus)
        result = train_learner(
            learner,
            corpus,
            settings,
            run.state_path,
            resume=run.resume,
            identity=_identity(recipe, run, corpus, cached),
            report=listener.status,
        )
    report = _finish(recipe, run, shape, matrices, learner, corpus, settings, result)
    if cached and run.features is None and isinstance(source, CachedFeatures):
        source.remove()
    return report


def _read_corpus(run: HeadRun, words: TargetWords, recipe: HeadRecipe, listener: RunListener) -> TokenCorpus:
    """Return the data's texts, or, for self-distillation, the data's prompts with the target's own answers."""
    documents = read_documents(run.data, need_answers=not run.own_answers)
    if run.own_answers is None:
        return encode_corpus(documents, words, max_length=run.max_length, held_out=run.held_out, seed=run.seed)
    open_output(run.output, resume=run.resume, force=run.force, holds=recipe.files_name)
    folder = run.state_path.parent
    folder.mkdir(exist_ok=True)
    with runnable_target(run.target, run.teacher, folder, listener.note) as target:
        answered = answer_prompts(
            target,
            words,
            documents,
            folder / "answers.jsonl",
            run.own_answers,
            max_length=run.max_length,
            n_threads=run.n_threads,
            progress=lambda done, total: listener.stage("the target answers", done, total),
        )
    return corpus_of(answered, held_out=run.held_out, seed=run.seed)


def _settings(
    recipe: HeadRecipe, run: HeadRun, shape: TargetShape, corpus: TokenCorpus, precision: torch.dtype
) -> TrainerSettings:
    usual = recipe.defaults(shape)
    per_epoch = len(corpus.training_batches(0, run.seed, run.tokens_per_batch))
    steps = run.steps if run.steps is not None else run.epochs * per_epoch
    return TrainerSettings(
        steps=steps,
        learning_rate=usual.learning_rate if run.learning_rate is None else run.learning_rate,
        tokens_per_batch=run.tokens_per_batch,
        warmup_steps=round(run.warmup * steps),
        betas=usual.betas,
        weight_decay=usual.weight_decay,
        clip_norm=usual.clip_norm,
        measure_every=max(1, math.ceil(steps / run.measures)) if run.measures else 0,
        seed=run.seed,
        save_seconds=run.save_seconds,
        precision=precision,
    )


def _tell_corpus(corpus: TokenCorpus, listener: RunListener) -> None:
    aside = "none held out: measures are of the training texts" if corpus.measured_on_training else (
        f"{len(corpus.held_out):,} held out"
    )  # fmt: skip
    listener.note(f"{len(corpus.training):,} sequences of {corpus.n_tokens:,} tokens to train on, {aside}")


def _wants_cache(
    run: HeadRun,
    settings: TrainerSettings,
    corpus: TokenCorpus,
    shape: TargetShape,
    n_taps: int,
    listener: RunListener,
) -> bool:
    """Return whether states are kept on disk: where asked for or needed, and where each is read more than once."""
    size = cache_bytes(corpus, shape.hidden, n_taps)
    folder = run.features or run.output / "training" / "features"
    read = settings.steps * settings.tokens_per_batch / max(1, corpus.n_tokens)
    must = run.teacher is not None or run.cache == "yes" or run.features is not None
    if run.cache == "no" or (not must and read <= 1.5):
        return False
    try:
        check_cache_space(folder, size)
    except Exception:
        if must:
            raise
        listener.note(f"the target's states would take {size / 2**30:.2f} GiB on disk, too much: computed at each step")
        return False
    listener.note(f"the target's states are computed once and kept on disk: {size / 2**20:,.1f} MiB in {folder}")
    return True


def _need(
    recipe: HeadRecipe,
    run: HeadRun,
    shape: TargetShape,
    n_words: int,
    corpus: TokenCorpus,
    settings: TrainerSettings,
    cached: bool,
) -> MemoryNeed:
    """Return what the run will take at its largest, from shapes alone: nothing is loaded."""
    meta = torch.device("meta")
    matrix = torch.empty(n_words, shape.hidden, device=meta)
    with meta:
        head = recipe.learner(shape, TargetMatrices(matrix, matrix, None), _NoFeatures(recipe.taps(shape)), corpus)
    size = 2 if settings.precision == torch.bfloat16 else 4
    target = 0
    if run.teacher is None:
        tensors = open_checkpoint(run.target).tensors.values()
        target = size * sum(math.prod(tensor.shape) for tensor in tensors)
    tokens = min(max(settings.tokens_per_batch, corpus.longest), corpus.n_tokens)
    training = {
        "target's matrices" if cached else "target": size * 2 * matrix.numel() if cached else target,
        "head": trained_bytes(head.module),
        "a step": recipe.activation_bytes(shape, n_words, tokens, corpus.longest),
    }
    return max(MemoryNeed(training), MemoryNeed({"target": target}), key=lambda need: need.total)


class _NoFeatures:
    """Stands for states where only shapes matter."""

    def __init__(self, taps: tuple[int, ...]) -> None:
        self.taps = taps

    def features(self, batch: Any) -> Any:  # noqa: ANN401 - never called
        raise NotImplementedError


@contextmanager
def _opened(
    run: HeadRun,
    words: TargetWords,
    n_words: int,
    corpus: TokenCorpus,
    taps: tuple[int, ...],
    device: torch.device,
    precision: torch.dtype,
    cached: bool,
    listener: RunListener,
) -> Iterator[tuple[TargetMatrices, FeatureSource]]:
    """Yield the target's matrices and where its states come from; a teacher is closed before training begins."""
    folder = run.features or run.output / "training" / "features"

    def told(done: int, total: int) -> None:
        listener.stage("computing the target's states", done, total)

    if run.teacher is not None:
        layers = resolve_gpu_layers("auto", run.teacher)
        with Model(run.teacher, n_gpu_layers=layers) as model:
            check_same_words(model, words, n_words)
            with TeacherFeatures(model, corpus.longest, taps, n_threads=run.n_threads) as teacher:
                cpu = torch.device("cpu")
                source: FeatureSource = fill_cache(folder, corpus, teacher, cpu, source_identity(run.teacher), told)
        yield teacher_matrices(run.teacher, device, precision), source
        return
    model_ = load_hf_model(run.target, device, precision)
    matrices = TargetMatrices(model_.embedding.detach(), model_.output.detach(), model_.softcap)
    source = ModelFeatures(model_, taps)
    if cached:
        source = fill_cache(folder, corpus, source, device, source_identity(run.target), told)
        del model_  # only its matrices are still needed
    yield matrices, source


def _identity(recipe: HeadRecipe, run: HeadRun, corpus: TokenCorpus, cached: bool) -> dict[str, Any]:
    fields = json.loads(json.dumps(dataclasses.asdict(recipe)))
    made_from = source_identity(run.teacher or run.target)["source"]
    return {
        "kind": recipe.kind,
        **{f"{recipe.kind} {name}": value for name, value in fields.items()},
        "data": corpus.digest[:16],
        "target": hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:16],
        "cached states": cached,
    }


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
    n_trained = sum(one.numel() for one in learner.module.parameters() if one.requires_grad)
    precision = str(settings.precision).removeprefix("torch.")
    device = torch.cuda.get_device_name() if learner.device.type == "cuda" else "CPU"
    shown = {
        **dataclasses.asdict(recipe),
        "learning rate": settings.learning_rate,
        "tokens per batch": settings.tokens_per_batch,
        "precision": precision,
        "seed": settings.seed,
    }
    facts = CardFacts(recipe.kind, run.target.resolve(), run.teacher, run.data, device, shown, n_trained)
    files = recipe.files(learner, shape, matrices.output.shape[0])
    base = {"base_model_name_or_path": run.target.resolve().name}
    files = dataclasses.replace(files, config={**files.config, **base})
    write_head(run.output, files, recipe.files_name, training_card(facts, corpus, result))
    held_out = 0 if corpus.measured_on_training else len(corpus.held_out)
    return HeadReport(run.output, result, n_trained, len(corpus.training), held_out, precision, device)
