"""A training run of heads, from data to files."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from specrun.bindings.errors import OptionError, SpecrunError
from specrun.convert.heads.target_facts import target_facts
from specrun.runtime.language import method_of_head
from specrun.train.data.answers import AnswerSettings, answer_prompts
from specrun.train.data.corpus import TokenCorpus, corpus_of, encode_corpus
from specrun.train.data.documents import Document, PlainText, read_documents
from specrun.train.data.prompts import own_prompts, read_prompts, usual_prompts
from specrun.train.data.tokens import TargetTokens, TokenSequence
from specrun.train.heads.chains import ChainLearner, ChainRecipe
from specrun.train.heads.earlier_head import EarlierHead, read_earlier_head
from specrun.train.heads.learner import HeadFiles, HeadRecipe
from specrun.train.target.head_target import HeadTarget, is_file_target, open_head_target
from specrun.train.target.hf_model import TargetMatrices
from specrun.train.target.shape import ModelShape, source_digest, source_identity
from specrun.train.target.states import (
    CachedFeatures,
    CachePlace,
    FeatureCache,
    FeatureSource,
    cache_bytes,
    check_cache_space,
    fill_cache,
    opened_cache,
    remove_caches,
)
from specrun.train.trainer.learner import RunListener
from specrun.train.trainer.memory import MemoryNeed, free_memory, trained_bytes
from specrun.train.trainer.model_folder import (
    model_card,
    table_lines,
    training_lines,
    write_json,
    write_text,
    write_weights,
)
from specrun.train.trainer.run import StartedRun, TrainingReport, TrainingRun
from specrun.train.trainer.settings import TrainerSettings

# == The run and its texts =========================================================================
#
# Texts are the data's, or for self-distillation the data's prompts with the target's own answers.


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


# == A run's states of its target: from torch, from a GGUF teacher, or from a cache on disk ========


CACHED = "cached states"
"""Of a run's identity: states from disk are float16, so that losses of other runs differ."""


def states_place(
    started: StartedHeadRun, taps: tuple[int, ...], precision: torch.dtype
) -> CachePlace:
    """Return where a run keeps states: a torch target computes them in `precision`."""
    run = started.run
    root = run.features or _private_folder(run)
    computed_in = started.target.computed_in(precision)
    identity = source_identity(run.source)
    return CachePlace.of(root, taps, precision=computed_in, identity=identity)


def _private_folder(run: HeadRun) -> Path:
    return run.state_path.parent / "features"


def remove_private_states(run: HeadRun, source: FeatureSource | None) -> None:
    """Delete the states that a run or its earlier attempts kept; a named folder stays."""
    if run.features is not None:
        return
    if isinstance(source, CachedFeatures):
        source.close()
    remove_caches(_private_folder(run))


def room_for_states(place: CachePlace, corpus: TokenCorpus, shape: ModelShape) -> str:
    """Return how much is kept, as a text; raise SpecrunError unless what is missing has room."""
    size = cache_bytes(corpus, shape.hidden, len(place.taps))
    missing = place.missing_bytes(corpus, shape.hidden)
    # Before hours of evaluation, not when the disk is full.
    check_cache_space(place.folder, missing)
    there = "" if missing == size else f", of which {(size - missing) / 2**20:,.1f} are there"
    return f"{size / 2**20:,.1f} MiB in {place.root}{there}"


def may_cache(run: HeadRun, settings: TrainerSettings, corpus: TokenCorpus) -> bool:
    """Return whether states are kept where there is room: must be, or are read more than once."""
    read = settings.steps * settings.tokens_per_batch / max(1, corpus.n_tokens)
    # llama.cpp would have to be asked again by every measure, and stay in memory beside torch.
    pays = read > 1.5 or run.source.is_file()
    return _must_cache(run) or (run.cache != "no" and pays)


def _must_cache(run: HeadRun) -> bool:
    return run.cache == "yes" or run.features is not None


def wants_cache(
    started: StartedHeadRun, settings: TrainerSettings, place: CachePlace, corpus: TokenCorpus
) -> bool:
    """Return whether states are kept on disk, as asked for or needed, or as `may_cache` finds.

    A resumed run that is left the choice does as before, whatever the disk has room for now.
    """
    run, shape = started.run, started.shape
    if not _may_keep(started, settings, corpus):
        return False
    must = _must_cache(run) or started.earlier.identity.get(CACHED) is True
    try:
        kept = room_for_states(place, corpus, shape)
    except SpecrunError:
        if must:
            raise
        size = cache_bytes(corpus, shape.hidden, len(place.taps))
        much = f"{size / 2**30:.2f} GiB on disk, too much"
        started.listener.note(f"the target's states would take {much}: computed at each step")
        return False
    started.listener.note(f"the target's states are computed once and kept on disk: {kept}")
    return True


def _may_keep(started: StartedHeadRun, settings: TrainerSettings, corpus: TokenCorpus) -> bool:
    """Return whether states are kept, as far as that does not depend on the disk."""
    # States from disk are rounded to float16: a run that changed over would not go on exactly.
    before = started.earlier.identity.get(CACHED)
    if started.run.cache == "no" or (before is False and not _must_cache(started.run)):
        return False
    return before is True or may_cache(started.run, settings, corpus)


def kept_while_answering(
    started: StartedHeadRun, settings: TrainerSettings, place: CachePlace, longest: TokenCorpus
) -> FeatureCache | None:
    """Return where the target leaves the states of what it says, None where it leaves none.

    There must be room for texts as long as the `longest`.
    """
    if not started.target.leaves_states or not _may_keep(started, settings, longest):
        return None
    try:
        check_cache_space(place.folder, cache_bytes(longest, started.shape.hidden, len(place.taps)))
    except SpecrunError:
        return None
    return opened_cache(place)


def filled_cache(
    started: StartedHeadRun,
    place: CachePlace,
    corpus: TokenCorpus,
    source: FeatureSource,
    device: torch.device,
) -> CachedFeatures:
    """Compute the states that are missing on disk and tell the listener how far that is."""

    def tell(done: int, total: int) -> None:
        started.listener.stage("computing the target's states", done, total)

    return fill_cache(place, corpus, source, device, tell)


@contextmanager
def opened_states(
    started: StartedHeadRun, place: CachePlace, corpus: TokenCorpus, cached: bool
) -> Iterator[tuple[TargetMatrices, FeatureSource]]:
    """Yield the target's matrices and the source of its states, computed before where `cached`."""
    target, device, precision = started.target, started.device, started.precision
    kept = None
    with target.states(place.taps, corpus.longest, device, precision) as source:
        if cached:
            kept = filled_cache(started, place, corpus, source, device)
        else:
            yield target.matrices(device, precision), source
        del source
    if kept is not None:  # what computed the states is out of memory now
        yield target.matrices(device, precision), kept


# == Training ======================================================================================
#
# The folder of a run holds the head (config.json, weights, README.md) and `training/` with the
# checkpoint, the curves, and, while it runs, the cache of the target's states.


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
