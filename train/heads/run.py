"""A training run of heads: what is given, what comes out, and the texts and steps that follow from
it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from specrun.bindings.errors import OptionError
from specrun.train.data.data_file import Document, PlainText, read_documents
from specrun.train.data.own_answers import AnswerSettings, answer_prompts, runnable_target
from specrun.train.data.target_tokens import TargetTokenizer, TokenSequence
from specrun.train.data.token_corpus import TokenCorpus, corpus_of, encode_corpus
from specrun.train.heads.folder import open_output
from specrun.train.target.target_shape import source_digest, source_identity
from specrun.train.trainer.learner import Learner
from specrun.train.trainer.listener import RunListener, TrainingResult
from specrun.train.trainer.precision import device_name
from specrun.train.trainer.run import TrainingRun
from specrun.train.trainer.settings import TrainerSettings

CachePolicy = Literal["auto", "yes", "no"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRun(TrainingRun):
    """A run that trains heads.

    With `teacher`, a GGUF file of the target, states and laws are llama.cpp's. `cache` says whether
    the target's states are kept on disk, in `features` or, where that is None, in the run's own
    folder until it ends. `own_answers` lets the target answer the data's prompts itself.
    """

    teacher: Path | None = None
    own_answers: AnswerSettings | None = None
    cache: CachePolicy = "auto"
    features: Path | None = None

    def __post_init__(self) -> None:
        TrainingRun.__post_init__(self)  # super() does not know a class with slots
        if self.teacher is not None and self.cache == "no":
            raise OptionError(
                "--teacher computes states once, before training: it needs the cache (--cache auto)"
            )
        if self.features is not None and self.cache == "no":
            raise OptionError(
                "--features names a place for states, and --cache no keeps none: leave one of "
                "them out"
            )


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


def head_identity(kind: str, recipe: Any, run: HeadRun, corpus: TokenCorpus) -> dict[str, Any]:  # noqa: ANN401
    """Return what resumed runs must share, `recipe` being a dataclass of plain values."""
    fields = json.loads(
        json.dumps(dataclasses.asdict(recipe))
    )  # tuples as lists, as in checkpoints
    return {
        "kind": kind,
        **{f"{kind} {name}": value for name, value in fields.items()},
        "data": corpus.digest[:16],
        "target": source_digest(run.teacher or run.target),
    }


def head_report(
    run: HeadRun,
    learner: Learner,
    corpus: TokenCorpus,
    settings: TrainerSettings,
    result: TrainingResult,
) -> HeadReport:
    """Return what was made of `learner`."""
    return HeadReport(
        run.output,
        result,
        n_trained=learner.n_trained,
        n_sequences=len(corpus.training),
        n_held_out=0 if corpus.measured_on_training else len(corpus.held_out),
        precision=settings.precision_name,
        device=device_name(learner.device),
    )


def read_corpus(
    run: HeadRun,
    tokenizer: TargetTokenizer,
    holds: str,
    listener: RunListener,
    check_before_answers: Callable[[TokenCorpus], None],
) -> TokenCorpus:
    """Return the data's texts, or, for self-distillation, the data's prompts with the target's own
    answers.

    `holds` is the file that a finished run leaves, as of `open_output`. As answers may take hours,
    `check_before_answers` sees texts first that are as long as theirs may become, and raises where
    they cannot be learnt.
    """
    documents = read_documents(run.data, need_answers=not run.own_answers)
    if run.own_answers is None:
        corpus = encode_corpus(
            documents, tokenizer, max_length=run.max_length, held_out=run.held_out, seed=run.seed
        )
    else:
        check_before_answers(_longest_texts(run, documents))
        open_output(run, holds=holds)
        corpus = _answered_corpus(run, run.own_answers, tokenizer, documents, listener)
    aside = f"{len(corpus.held_out):,} held out"
    if corpus.measured_on_training:
        aside = "none held out: measures are of the training texts"
    listener.note(
        f"{len(corpus.training):,} sequences of {corpus.n_tokens:,} tokens to train on, {aside}"
    )
    return corpus


def _longest_texts(run: HeadRun, documents: Sequence[Document]) -> TokenCorpus:
    """Return a corpus of as many texts as ask something, each as long as texts may be."""
    asking = sum(not isinstance(document, PlainText) for document in documents)
    longest = TokenSequence(np.zeros(run.max_length, np.int32), np.ones(run.max_length, np.bool_))
    return corpus_of([longest] * max(1, asking), held_out=run.held_out, seed=run.seed)


def _answered_corpus(
    run: HeadRun,
    settings: AnswerSettings,
    tokenizer: TargetTokenizer,
    documents: Sequence[Document],
    listener: RunListener,
) -> TokenCorpus:
    """Let the target answer the documents' prompts."""
    folder = run.state_path.parent
    folder.mkdir(exist_ok=True)
    answered = answer_prompts(
        runnable_target(run.target, run.teacher, folder, listener.note),
        tokenizer,
        documents,
        folder / "answers.jsonl",
        settings,
        identity=source_identity(run.teacher or run.target),
        max_length=run.max_length,
        n_threads=run.n_threads,
        progress=lambda done, total: listener.stage("the target answers", done, total),
    )
    return corpus_of(answered, held_out=run.held_out, seed=run.seed)
