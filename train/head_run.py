"""A training run of heads: what is given, what comes out, and the texts and steps that follow from it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from specrun.bindings.errors import OptionError
from specrun.train.data_file import read_documents
from specrun.train.head_folder import open_output
from specrun.train.head_recipe import TrainingDefaults
from specrun.train.own_answers import AnswerSettings, answer_prompts, runnable_target
from specrun.train.run_listener import RunListener
from specrun.train.target_words import TargetWords
from specrun.train.token_corpus import TokenCorpus, corpus_of, encode_corpus
from specrun.train.trainer_settings import TrainerSettings
from specrun.train.training_progress import TrainingResult

__all__ = ["HeadReport", "HeadRun", "read_corpus", "trainer_settings"]

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


def read_corpus(run: HeadRun, words: TargetWords, holds: str, listener: RunListener) -> TokenCorpus:
    """Return the data's texts, or, for self-distillation, the data's prompts with the target's own answers.

    `holds` is the file that a finished run leaves, as of `open_output`.
    """
    corpus = _read_texts(run, words, holds, listener)
    aside = f"{len(corpus.held_out):,} held out"
    if corpus.measured_on_training:
        aside = "none held out: measures are of the training texts"
    listener.note(f"{len(corpus.training):,} sequences of {corpus.n_tokens:,} tokens to train on, {aside}")
    return corpus


def _read_texts(run: HeadRun, words: TargetWords, holds: str, listener: RunListener) -> TokenCorpus:
    documents = read_documents(run.data, need_answers=not run.own_answers)
    if run.own_answers is None:
        return encode_corpus(documents, words, max_length=run.max_length, held_out=run.held_out, seed=run.seed)
    open_output(run.output, resume=run.resume, force=run.force, holds=holds)
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


def trainer_settings(
    usual: TrainingDefaults, run: HeadRun, corpus: TokenCorpus, precision: torch.dtype
) -> TrainerSettings:
    """Return how a run is made whose kind of head is usually trained so."""
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
