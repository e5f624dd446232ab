"""Distils a drafter: what is read, compared, asked of the target, learnt, measured and written, in this order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from specrun.bindings.errors import OptionError
from specrun.train.data_file import read_documents
from specrun.train.distillation.acceptance import AcceptanceGain, acceptance_gain
from specrun.train.distillation.answers import AnswerSettings, end_words
from specrun.train.distillation.coverage import ExistingDrafters
from specrun.train.distillation.drafter_folder import check_output, write_drafter_folder
from specrun.train.distillation.learner import Comparison, DistillationLearner, DistillationLoss
from specrun.train.distillation.memory_need import drafter_memory
from specrun.train.distillation.target_answers import AnswersProgress, answered_by_target
from specrun.train.distillation.vocabularies import Words, check_same_words, folder_words
from specrun.train.hf_model import HFModel, load_hf_model
from specrun.train.memory import MemoryNeed, require_memory
from specrun.train.target_words import TargetWords
from specrun.train.token_corpus import TokenBatch, TokenCorpus, encode_corpus
from specrun.train.trainer import TrainerSettings, TrainingResult, TrainingStatus, train_learner

__all__ = ["ANSWER_SOURCES", "DrafterResult", "DrafterRun", "train_drafter"]

ANSWER_SOURCES = ("given", "target")
"""Who may have written answers before training: the data, or the target, which samples them."""

STATE_NAME = "checkpoint.pt"


@dataclass(frozen=True, slots=True)
class DrafterRun:
    """A drafter to distil.

    `target` and `draft` are Hugging Face folders, `data` files of text or JSON Lines, `output` the folder to write.
    Training learns on `answers`, of which the drafter writes a share of its own (`loss.on_policy`); alpha is measured
    on `measured_on`, at temperature `measured_at`. Texts have at most `max_length` words, sampled answers `n_longest`.
    A share `held_out` of the texts, at most `most_held_out`, is only measured on.
    """

    target: Path
    draft: Path
    data: tuple[Path, ...]
    output: Path
    trainer: TrainerSettings
    loss: DistillationLoss = field(default_factory=DistillationLoss)
    answers: str = "given"
    measured_on: str = "target"
    measured_at: float = 1.0
    not_covered_by: tuple[Path, ...] = ()
    n_longest: int = 128
    max_length: int = 512
    held_out: float = 0.05
    most_held_out: int = 200
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - immutable
    target_dtype: torch.dtype = torch.float32
    n_threads: int = 0
    resume: bool = False

    def __post_init__(self) -> None:
        for name in ("answers", "measured_on"):
            if getattr(self, name) not in ANSWER_SOURCES:
                raise OptionError(f"{name} is {getattr(self, name)!r}: use one of {', '.join(ANSWER_SOURCES)}")
        if not 0.0 <= self.measured_at <= 100.0:
            raise OptionError(f"alpha cannot be measured at temperature {self.measured_at:g}: give 0 or more")
        if self.n_longest < 1:
            raise OptionError(f"answers of {self.n_longest} words: give at least 1")
        if not 0.0 <= self.held_out < 1.0:
            raise OptionError(f"{self.held_out:g} of the texts held out: give a share, 0 to below 1")

    @property
    def identity(self) -> dict[str, Any]:
        """What a resumed run must have in common with the one it goes on with, beside the trainer's settings."""
        return {
            "target": str(self.target.resolve()),
            "drafter": str(self.draft.resolve()),
            "covered_by": [str(path.resolve()) for path in self.not_covered_by],
            "answers": self.answers,
            "longest_answer": self.n_longest,
            "longest_text": self.max_length,
            **{f"loss_{name}": value for name, value in dataclasses.asdict(self.loss).items()},
        }


@dataclass(frozen=True, slots=True)
class DrafterResult:
    """What came of a run: `acceptance` is alpha before and after on the same `n_held_out` texts.

    `before` and `after` also hold the shares of equal likeliest words, and of what other drafters know. With
    `measured_on_training` there were too few texts to hold any out.
    """

    acceptance: AcceptanceGain
    before: Comparison
    after: Comparison
    training: TrainingResult
    n_held_out: int
    measured_on_training: bool


@dataclass(frozen=True, slots=True)
class DrafterProgress:
    """What a run tells while it works; each may be None."""

    need: Callable[[MemoryNeed], None] | None = None
    answers: AnswersProgress | None = None
    before: Callable[[Comparison], None] | None = None
    training: Callable[[TrainingStatus], None] | None = None


def train_drafter(run: DrafterRun, progress: DrafterProgress | None = None) -> DrafterResult:
    """Distil a drafter and write its folder.

    Raises PairError if its words are not the target's, OutOfMemoryError before loading what will not fit, and as
    reading data, models and checkpoints does.
    """
    progress = progress or DrafterProgress()
    check_output(run.output, run.target, run.draft)
    target_words = folder_words(run.target)
    n_shared = check_same_words(target_words, folder_words(run.draft))
    words = TargetWords(run.target)
    corpus = _read_corpus(run, words)
    need = drafter_memory(
        run.target, run.draft, run.target_dtype, tokens_per_batch=max(run.trainer.tokens_per_batch, corpus.longest)
    )
    if progress.need is not None:
        progress.need(need)
    require_memory(need, run.device)
    target = load_hf_model(run.target, run.device, run.target_dtype)
    draft = load_hf_model(run.draft, run.device)
    answers = AnswerSettings(
        temperature=run.loss.temperature,
        n_longest=run.n_longest,
        max_length=run.max_length,
        end_ids=end_words(target, words.eos),
        n_words=n_shared,
    )
    run.output.mkdir(exist_ok=True)
    corpus = _ask_target(run, corpus, target, answers, progress)
    with _drafters(run, target_words) as drafters:
        learner = DistillationLearner(
            target,
            draft,
            run.loss,
            answers,
            n_shared=n_shared,
            measured_at=run.measured_at,
            drafters=drafters if run.not_covered_by else None,
        )
        held_out = _held_out(run, corpus)
        before = learner.compare(held_out)
        if progress.before is not None:
            progress.before(before)
        training = train_learner(
            learner,
            corpus,
            run.trainer,
            run.output / STATE_NAME,
            resume=run.resume,
            identity={**run.identity, "texts": corpus.digest},
            report=progress.training,
        )
        after = learner.compare(held_out)
    write_drafter_folder(draft, run.draft, run.output)
    gain = acceptance_gain(before.texts, after.texts)
    return DrafterResult(gain, before, after, training, len(before.texts), corpus.measured_on_training)


def _read_corpus(run: DrafterRun, words: TargetWords) -> TokenCorpus:
    """Return the data as tokens; prompts without answers will do where none of the given answers is read."""
    need_answers = not (run.measured_on == "target" and (run.answers == "target" or run.loss.on_policy == 1.0))
    documents = read_documents(run.data, need_answers=need_answers)
    share = min(run.held_out, run.most_held_out / len(documents))
    return encode_corpus(
        documents, words, max_length=run.max_length, held_out=share, seed=run.trainer.seed, need_answers=need_answers
    )


def _ask_target(
    run: DrafterRun, corpus: TokenCorpus, target: HFModel, answers: AnswerSettings, progress: DrafterProgress
) -> TokenCorpus:
    """Let the target write the answers that are to be its own: those learnt on, those measured on."""
    jobs: list[tuple[Sequence[int], AnswerSettings]] = []
    if run.measured_on == "target" and not corpus.measured_on_training:
        jobs.append((corpus.held_out, dataclasses.replace(answers, temperature=run.measured_at)))
    if run.answers == "target":
        jobs.append((corpus.training, answers))
    for numbers, settings in jobs:
        corpus = answered_by_target(
            corpus,
            target,
            numbers,
            settings,
            seed=run.trainer.seed,
            tokens_per_batch=run.trainer.tokens_per_batch,
            store=run.output / "answers",
            identity=f"{run.target.resolve()}",
            progress=progress.answers,
        )
    return corpus


def _drafters(run: DrafterRun, words: Words) -> ExistingDrafters:
    return ExistingDrafters(run.not_covered_by, words, n_ctx=run.max_length, n_threads=run.n_threads)


def _held_out(run: DrafterRun, corpus: TokenCorpus) -> list[TokenBatch]:
    batches = corpus.held_out_batches(run.trainer.tokens_per_batch)
    return [corpus.batch(numbers).to(run.device) for numbers in batches]
