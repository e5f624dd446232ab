"""A training run of heads: what is given, its texts, and what a resumed run must share.

Texts are the data's, or for self-distillation the data's prompts with the target's own answers.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from specrun.bindings.errors import OptionError
from specrun.runtime.language import method_of_head
from specrun.train.data.data_file import Document, PlainText, read_documents
from specrun.train.data.own_answers import AnswerSettings, answer_prompts
from specrun.train.data.own_prompts import own_prompts
from specrun.train.data.prompts import read_prompts, usual_prompts
from specrun.train.data.target_tokens import TargetTokens, TokenSequence
from specrun.train.data.token_corpus import TokenCorpus, corpus_of, encode_corpus
from specrun.train.target.feature_cache import FeatureCache
from specrun.train.target.head_target import is_file_target, open_head_target
from specrun.train.target.target_shape import source_digest, source_identity
from specrun.train.trainer.listener import RunListener
from specrun.train.trainer.memory import MemoryNeed
from specrun.train.trainer.model_folder import model_card, table_lines, training_lines
from specrun.train.trainer.run import StartedRun, TrainingReport, TrainingRun
from specrun.train.trainer.settings import TrainerSettings

CachePolicy = Literal["auto", "yes", "no"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRun(TrainingRun):
    """A run that trains heads for a `target`, a Hugging Face folder or a GGUF file.

    With `teacher`, a folder's GGUF file, states and laws are llama.cpp's. `cache` says whether
    the target's states are kept on disk, in `features` or, where that is None, in the run's own
    folder until it ends. `own_answers` lets the target answer prompts itself: those of the data,
    of a file of `prompts`, or where there is neither, `n_prompts` of the built-in ones; and those
    that it writes itself in `n_own_prompts` tries. `earlier` is the GGUF file of a head that is
    learnt on from.
    """

    teacher: Path | None = None
    own_answers: AnswerSettings | None = None
    prompts: Path | None = None
    n_prompts: int = 1000
    n_own_prompts: int = 0
    cache: CachePolicy = "auto"
    features: Path | None = None
    earlier: Path | None = None

    def __post_init__(self) -> None:
        TrainingRun.__post_init__(self)  # super() does not know a class with slots
        if self.prompts is not None and self.data:
            raise OptionError("both data and a file of prompts are given: leave one of them out")
        if self.own_answers is None and not self.data:
            raise OptionError("no data are given, and the target is not to answer any prompts")
        if self.n_own_prompts and self.own_answers is None:
            raise OptionError("prompts of the target's own are asked for, and it answers none")
        if self.features is not None and self.cache == "no":
            both = "--features names a place for states, and --cache no keeps none"
            raise OptionError(f"{both}: leave one of them out")

    @property
    def source(self) -> Path:
        """The weights that states and laws come from: the teacher's or the target's."""
        return self.teacher or self.target

    def require_folder(self, why: str) -> None:
        """Raise OptionError, beginning with `why`, unless torch computes the target."""
        if self.teacher is not None:
            raise OptionError(f"{why}: leave out --teacher")
        if is_file_target(self.target):
            raise OptionError(
                f"{why}: give the Hugging Face folder of {self.target.name} as --target"
            )


class StartedHeadRun(StartedRun):
    """A started run of heads: its target is known, and a teacher fits the target."""

    def __init__(self, run: HeadRun, weights_name: str, listener: RunListener | None) -> None:
        super().__init__(run, weights_name, listener, (run.target,))
        self.run = run
        self.target = open_head_target(
            run.target, run.teacher, device=self.device, n_threads=run.n_threads
        )
        self.shape, self.tokenizer = self.target.shape, self.target.tokens
        if self.target.caution:
            self.listener.note(self.target.caution)


# What most runs leave alone is left out, as in the checkpoints of versions that did not know it.
_UNSAID = {
    "eagle inputs": "both",
    "eagle law_tokens": 0,
    "eagle draft_tokens": 0,
    "eagle start": "random",
    "eagle late_steps": 0,
    "eagle3 late_steps": 0,
    "eagle3 optimizer": "adamw",
    "eagle3 law_tokens": 0,
    "hydra noise": 0.0,
}


def head_identity(kind: str, recipe: Any, run: HeadRun, corpus: TokenCorpus) -> dict[str, Any]:  # noqa: ANN401
    """Return what resumed runs must share, `recipe` being a dataclass of plain values."""
    fields = json.loads(json.dumps(dataclasses.asdict(recipe)))  # lists for tuples, as stored
    named = {f"{kind} {name}": value for name, value in fields.items()}
    named = {name: value for name, value in named.items() if _UNSAID.get(name) != value}
    data, target = corpus.digest[:16], source_digest(run.source)
    begun = {} if run.earlier is None else {"from": source_digest(run.earlier)}
    return {"kind": kind, **named, "data": data, "target": target, **begun}


def read_corpus(
    started: StartedHeadRun,
    need: Callable[[TokenCorpus], MemoryNeed],
    kept: Callable[[TokenCorpus], FeatureCache | None] = lambda _texts: None,
) -> TokenCorpus:
    """Return the data's texts, or the data's prompts with the target's own answers.

    As answers may take hours, it is first required that there is the memory that texts as long as
    theirs may become `need`. `kept` says where states of such texts stay as they are answered.
    """
    run = started.run
    documents = _documents(run, started.tokenizer)
    if run.own_answers is None:
        corpus = encode_corpus(
            documents,
            started.tokenizer,
            max_length=run.max_length,
            held_out=run.held_out,
            seed=run.seed,
        )
    else:
        longest = _longest_texts(run, documents)
        started.require_memory(need(longest), ", with answers as long as they may be")
        started.open_output()
        corpus = _answered_corpus(started, run.own_answers, documents, kept(longest))
    started.note_texts(corpus)
    return corpus


def _documents(run: HeadRun, tokens: TargetTokens) -> list[Document]:
    """Return the data, or the prompts that the target is to answer."""
    if run.data:
        return read_documents(run.data, need_answers=not run.own_answers)
    if run.prompts is not None:
        return read_prompts(run.prompts)
    return usual_prompts(run.n_prompts, tokens)


def _longest_texts(run: HeadRun, documents: Sequence[Document]) -> TokenCorpus:
    """Return a corpus of as many texts as ask something, each as long as texts may be."""
    # Plain texts ask nothing, so that the target answers none of them.
    asking = sum(not isinstance(document, PlainText) for document in documents)
    asking += run.n_own_prompts
    longest = TokenSequence(np.zeros(run.max_length, np.int32), np.ones(run.max_length, np.bool_))
    return corpus_of([longest] * max(1, asking), held_out=run.held_out, seed=run.seed)


def _answered_corpus(
    started: StartedHeadRun,
    settings: AnswerSettings,
    documents: Sequence[Document],
    kept: FeatureCache | None,
) -> TokenCorpus:
    """Let the target answer the documents' prompts, and those that it writes before."""
    run, listener = started.run, started.listener
    folder = run.state_path.parent
    folder.mkdir(exist_ok=True)
    # An interrupted run goes on with stored answers only if the same weights wrote them.
    identity = source_identity(run.source)
    if run.n_own_prompts:
        own = own_prompts(
            started.target.answerer(folder, started.precision, listener.note),
            started.tokenizer,
            run.n_own_prompts,
            folder / "prompts.jsonl",
            identity=identity,
            seed=settings.seed,
            parallel=settings.parallel,
            n_threads=run.n_threads,
            progress=lambda done, total: listener.stage("the target asks", done, total),
        )
        listener.note(f"{len(own):,} prompts of the target's own")
        documents = [*documents, *own]
    answered = answer_prompts(
        started.target.answerer(folder, started.precision, listener.note, kept),
        started.tokenizer,
        documents,
        folder / "answers.jsonl",
        settings,
        identity=identity,
        max_length=run.max_length,
        n_threads=run.n_threads,
        progress=lambda done, total: listener.stage("the target answers", done, total),
    )
    return corpus_of(answered, held_out=run.held_out, seed=run.seed)


def _data_text(run: HeadRun) -> str:
    """Return what a card says of where the texts come from."""
    if run.data:
        given = ", ".join(path.name for path in run.data)
    else:
        given = run.prompts.name if run.prompts else f"{run.n_prompts:,} of specrun's own prompts"
    if run.n_own_prompts:
        given += f", and what the target asked in {run.n_own_prompts:,} tries of its own"
    return given if run.own_answers is None else f"{given}, answered by the target"


def head_card(
    kind: str,
    run: HeadRun,
    corpus: TokenCorpus,
    report: TrainingReport,
    settings: TrainerSettings,
    recipe: dict[str, Any],
    computed_by: str = "torch",
) -> str:
    """Return the model card of heads of a kind that were trained by `recipe`.

    `computed_by` names the library that computed the target's states.
    """
    target, curves = run.target.resolve().name, report.result.curves
    learnt = sum(int(corpus.sequences[number].learnt.sum()) for number in corpus.training)
    shown = {
        **recipe,
        "learning rate": settings.learning_rate,
        "tokens per batch": settings.tokens_per_batch,
        "precision": report.precision,
        "seed": settings.seed,
    }
    if run.earlier is not None:
        shown["learnt on from"] = run.earlier.name
    losses = f"the loss fell from {curves.losses[0]:.4f} to {curves.losses[-1]:.4f}."
    training = training_lines(report, losses, shown)
    if run.source.is_file():
        name = run.source.name
        states = f"Hidden states and laws are those of {name}, computed by {computed_by}."
        training.insert(1, states)
    texts = "held-out texts"
    if corpus.measured_on_training:
        texts = "the training texts, too few to hold any out"
    measures = curves.measures[-1][1] if curves.measures else {}
    return model_card(
        f"{kind} for {target}",
        tags=kind,
        base_model=target,
        made=f"Made by `specrun train {kind}`; {report.n_trained:,} trained parameters. It drafts "
        "for this target only, and verification keeps the target's own tokens or distribution "
        "whatever it drafts.",
        sections={
            "Data": [
                f"{_data_text(run)}: {report.n_sequences:,} sequences, "
                f"{corpus.n_tokens:,} tokens, {learnt:,} of them learnt; {report.n_held_out:,} "
                "sequences held out. The licences of the data and of the target apply."
            ],
            "Training": training,
            "What it can do": [
                f"Agreement with the target's own first choice, on {texts}; `tokens a round` "
                "counts those of a drafted chain and the target's own.",
                "",
                *table_lines("| | |", {name: f"{v:.3f}" for name, v in measures.items()}),
            ],
        },
        commands=_card_commands(kind),
    )


def _card_commands(kind: str) -> list[str]:
    """Return how heads of a kind are converted and used, nothing for what is no head."""
    if (method := method_of_head(kind)) is None:
        return []
    return [
        "specrun convert FOLDER --target TARGET.gguf -o head.gguf",
        f'specrun chat -m TARGET.gguf --drafter "{method.name}(head.gguf)"',
    ]
