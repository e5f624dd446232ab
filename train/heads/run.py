"""Training of heads and models for a target, from data to files.

Texts are the data's, or for self-distillation the data's prompts with the target's own answers. A
recipe either reads the frozen target's states (Medusa, Hydra, EAGLE) or trains through the target's
layers in torch (Medusa-2, PaSS, SPACE).
"""

from __future__ import annotations

import dataclasses
import functools
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from specrun.bindings.errors import OptionError
from specrun.runtime.language import method_of_head
from specrun.train.data.answers import AnswerSettings, answer_prompts
from specrun.train.data.corpus import TokenCorpus, corpus_of, encode_corpus
from specrun.train.data.documents import Document, PlainText, read_documents
from specrun.train.data.prompts import own_prompts, read_prompts, usual_prompts
from specrun.train.data.tokens import TokenSequence
from specrun.train.heads.earlier_head import EarlierHead
from specrun.train.heads.learner import FormerModel, HeadLearner
from specrun.train.heads.states import CACHED, CachePolicy, RunStates
from specrun.train.target.head_target import HeadTarget, is_file_target, open_head_target
from specrun.train.target.hf_model import HFModel, TargetMatrices, load_hf_model, stored_tensors
from specrun.train.target.shape import ModelShape, source_digest, source_identity
from specrun.train.target.states import FeatureCache, FeatureSource, ModelFeatures
from specrun.train.trainer.learner import Learner, RunListener
from specrun.train.trainer.memory import MemoryNeed, free_memory, trained_bytes
from specrun.train.trainer.model_folder import (
    copy_tokenizer,
    model_card,
    table_lines,
    training_lines,
    write_json,
    write_text,
    write_weights,
)
from specrun.train.trainer.run import Training, TrainingReport, TrainingRun
from specrun.train.trainer.settings import TrainerSettings, TrainingDefaults


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRun(TrainingRun):
    """A run that trains heads for a `target`, a Hugging Face folder or a GGUF file.

    With `teacher`, a folder's GGUF file, states and distributions are llama.cpp's. With `cache` the
    target's states are kept on disk, in `features` or, if that is None, in the run's
    own folder until it ends. `own_answers` lets the target answer prompts itself: those of the
    data, of a file of `prompts`, or if there is neither, `n_prompts` of the built-in ones; and
    those that it writes itself in `n_own_prompts` tries. `earlier` is the GGUF file of a head that
    is learnt on from.
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
        TrainingRun.__post_init__(self)  # super() does not work in a class with slots
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
        """The weights that states and distributions come from: the teacher's or the target's."""
        return self.teacher or self.target


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """A trained head as upstream's tools read it: its config.json, and tensors by name."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class TargetRecipe(ABC):
    """A kind of head or model that is trained for a target.

    Resumed runs must share the fields of a recipe.
    """

    kind: ClassVar[str]
    files_name: ClassVar[str] = "model.safetensors"
    """The file of weights that a finished run leaves."""
    changes_model: ClassVar[bool] = False
    """Whether the model learns too: the folder of a run is then a whole model again."""

    usual: ClassVar[TrainingDefaults]
    """How such heads are trained, whatever their size and settings."""

    def defaults(self, shape: ModelShape) -> TrainingDefaults:
        """Return how such heads are trained for a target of this size."""
        return self.usual

    @abstractmethod
    def files(self, learner: Learner, shape: ModelShape) -> HeadFiles:
        """Return the trained head's files."""

    def shown(self) -> dict[str, Any]:
        """Return the settings as the model card names them."""
        return dataclasses.asdict(self)

    @abstractmethod
    def training(self, run: HeadRun, listener: RunListener | None) -> TargetTraining:
        """Return the training of a run, begun."""


@dataclass(frozen=True, slots=True)
class HeadRecipe(TargetRecipe):
    """A kind of head that reads the states of a frozen target."""

    def taps(self, shape: ModelShape) -> tuple[int, ...]:
        """Return the layers whose inputs the head reads, none by default."""
        return ()

    @abstractmethod
    def learner(
        self, shape: ModelShape, target: TargetMatrices, source: FeatureSource, corpus: TokenCorpus
    ) -> HeadLearner:
        """Return a new head to train."""

    def learning_on(
        self, path: Path, shape: ModelShape, source: Path
    ) -> tuple[HeadRecipe, EarlierHead]:
        """Return the head in a file to learn on from, and the recipe with the settings that follow.

        `source` are the target's weights. Raises OptionError for kinds that begin anew.
        """
        kind = f"{self.kind} heads begin anew"
        raise OptionError(f"{kind}: only those of EAGLE learn on from another")

    def activation_bytes(
        self, shape: ModelShape, tokens: int, longest: int, *, recompute: bool
    ) -> int:
        """Return roughly the bytes that a step of `tokens` tokens keeps for its gradients.

        Sequences have at most `longest` tokens; `recompute` as of Learner. By default: logits,
        their softmax, the target's distribution and two gradients for every token, and a layer's
        states.
        """
        return 4 * tokens * (5 * shape.vocab_size + shape.layer_numbers)

    @property
    def smaller(self) -> str:
        """Advice that makes the head itself smaller, for users whose memory is too small."""
        return "use a smaller target"

    def training(self, run: HeadRun, listener: RunListener | None) -> HeadTraining:
        """Return the training of a run, begun."""
        return HeadTraining(self, run, listener)


@dataclass(frozen=True, slots=True)
class ModelRecipe(TargetRecipe):
    """A recipe that trains through the target's own layers, in torch."""

    changes_model = True
    through_layers: ClassVar[str]
    """The reason for errors if torch does not compute the target."""

    @property
    @abstractmethod
    def learns_earlier_law(self) -> bool:
        """Whether the distribution that the model had before is learnt."""

    @abstractmethod
    def learner(
        self, shape: ModelShape, model: HFModel, steps: int, former: FormerModel | None
    ) -> Learner:
        """Return the learner for so many steps; it learns the distributions of `former`, if any."""

    @abstractmethod
    def need(self, run: HeadRun, shape: ModelShape, corpus: TokenCorpus) -> MemoryNeed:
        """Return the memory of the model and of a step."""

    def training(self, run: HeadRun, listener: RunListener | None) -> ModelTraining:
        """Return the training of a run, begun."""
        return ModelTraining(self, run, listener)


# Defaults are left out, as in the checkpoints of versions without these settings.
_UNSAID = {
    "eagle law_tokens": 0,
    "eagle draft_tokens": 0,
    "eagle start": "random",
    "eagle late_steps": 0,
    "eagle3 late_steps": 0,
    "eagle3 optimizer": "adamw",
    "eagle3 law_tokens": 0,
    "hydra noise": 0.0,
}


class TargetTraining(Training[TrainingReport]):
    """A run of heads, begun: its target is known, and a teacher fits the target."""

    run: HeadRun

    def __init__(self, recipe: TargetRecipe, run: HeadRun, listener: RunListener | None) -> None:
        super().__init__(run, listener, (run.target,), recipe.files_name)
        self.recipe = recipe
        self.target = open_head_target(
            run.target, run.teacher, device=self.device, n_threads=run.n_threads
        )
        self.target.precision = self.precision
        self.shape, self.tokenizer = self.target.shape, self.target.tokens
        if self.target.caution:
            self.listener.note(self.target.caution)

    def defaults(self) -> TrainingDefaults:
        """Return how such heads or models are trained."""
        return self.recipe.defaults(self.shape)

    @abstractmethod
    def need(self, corpus: TokenCorpus, settings: TrainerSettings) -> MemoryNeed:
        """Return the memory that is needed."""

    def texts(self) -> TokenCorpus:
        """Return the data's texts, or the data's prompts with the target's own answers.

        As answers may take hours, it is first required that there is memory for texts as long as
        theirs may become.
        """
        run, documents = self.run, self._documents()
        if run.own_answers is None:
            corpus = encode_corpus(
                documents,
                self.tokenizer,
                max_length=run.max_length,
                held_out=run.held_out,
                seed=run.seed,
            )
        else:
            longest = _longest_texts(run, documents)
            need = self.need(longest, self.settings(longest))
            self.require_memory(need, ", with answers as long as they may be")
            self.open_output()
            corpus = self._answered(run.own_answers, documents, self._states_kept(longest))
        self.note_texts(corpus)
        return corpus

    def _documents(self) -> list[Document]:
        """Return the data, or the prompts that the target is to answer."""
        run = self.run
        if run.data:
            return read_documents(run.data, need_answers=not run.own_answers)
        if run.prompts is not None:
            return read_prompts(run.prompts)
        return usual_prompts(run.n_prompts, self.tokenizer)

    def _states_kept(self, longest: TokenCorpus) -> FeatureCache | None:
        """Return the cache for states of such texts as they are answered, none by default."""
        return None

    def _answered(
        self, settings: AnswerSettings, documents: Sequence[Document], kept: FeatureCache | None
    ) -> TokenCorpus:
        """Let the target answer the documents' prompts, and those that it writes before."""
        run, listener = self.run, self.listener
        folder = run.state_path.parent
        folder.mkdir(exist_ok=True)
        # An interrupted run goes on with stored answers only if the same weights wrote them.
        identity = source_identity(run.source)
        if run.n_own_prompts:
            own = own_prompts(
                self.target.answerer(folder, listener.note),
                self.tokenizer,
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
            self.target.answerer(folder, listener.note, kept),
            self.tokenizer,
            documents,
            folder / "answers.jsonl",
            settings,
            identity=identity,
            max_length=run.max_length,
            n_threads=run.n_threads,
            progress=lambda done, total: listener.stage("the target answers", done, total),
        )
        return corpus_of(answered, held_out=run.held_out, seed=run.seed)

    def identity(self, corpus: TokenCorpus, settings: TrainerSettings) -> dict[str, Any]:
        """Return the facts that resumed runs must share: the recipe, data and weights."""
        recipe, kind = self.recipe, self.recipe.kind
        fields = json.loads(json.dumps(dataclasses.asdict(recipe)))  # lists for tuples, as stored
        named = {f"{kind} {name}": value for name, value in fields.items()}
        named = {name: value for name, value in named.items() if _UNSAID.get(name) != value}
        data, target = corpus.digest[:16], source_digest(self.run.source)
        begun = {} if self.run.earlier is None else {"from": source_digest(self.run.earlier)}
        return {"kind": kind, **named, "data": data, "target": target, **begun}

    def _states_of(self, taps: tuple[int, ...], precision: torch.dtype) -> RunStates:
        """Return the run's choice of states; a torch target computes them in `precision`."""
        run = self.run
        cache = FeatureCache(
            run.features or run.state_path.parent / "features",
            taps,
            self.shape.hidden,
            precision=self.target.computed_in(precision),
            identity=source_identity(run.source),
        )
        named, before = run.features is not None, self.earlier.identity.get(CACHED)
        return RunStates(cache, run.cache, named, run.source.is_file(), before, self.listener)

    def _write(self, files: HeadFiles, corpus: TokenCorpus, report: TrainingReport) -> None:
        """Write all files of a head, the weights last: a folder with weights is a whole one."""
        run, base = self.run, self.run.target.resolve().name
        write_json(run.output / "config.json", {**files.config, "base_model_name_or_path": base})
        write_text(run.output / "README.md", self._card(corpus, report))
        write_weights(run.output / self.recipe.files_name, files.tensors)

    def _card(self, corpus: TokenCorpus, report: TrainingReport) -> str:
        """Return the model card."""
        run, kind, settings = self.run, self.recipe.kind, self.settings(corpus)
        target, curves = run.target.resolve().name, report.result.curves
        learnt = sum(int(corpus.sequences[number].learnt.sum()) for number in corpus.training)
        shown = {
            **self.recipe.shown(),
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
            states = f"Hidden states and distributions are those of {run.source.name}"
            training.insert(1, f"{states}, computed by {self.target.computed_by}.")
        texts = "held-out texts"
        if corpus.measured_on_training:
            texts = "the training texts, too few to hold any out"
        measures = curves.measures[-1][1] if curves.measures else {}
        method, commands = method_of_head(kind), list[str]()
        if method is not None:  # a model has none
            commands += ["specrun convert FOLDER --target TARGET.gguf -o head.gguf"]
            commands += [f'specrun chat -m TARGET.gguf --drafter "{method.name}(head.gguf)"']
        return model_card(
            f"{kind} for {target}",
            tags=kind,
            base_model=target,
            made=f"Made by `specrun train {kind}`; {report.n_trained:,} trained parameters. It "
            "drafts for this target only, and verification keeps the target's own tokens or "
            "distribution whatever it drafts.",
            sections={
                "Data": [
                    f"{_data_text(run)}: {report.n_sequences:,} sequences, "
                    f"{corpus.n_tokens:,} tokens, {learnt:,} of them learnt; "
                    f"{report.n_held_out:,} sequences held out. The licences of the data and of "
                    "the target apply."
                ],
                "Training": training,
                "Accuracy": [
                    f"Agreement with the target's own first choice, on {texts}; `tokens a round` "
                    "counts those of a drafted chain and the target's own.",
                    "",
                    *table_lines("| | |", {name: f"{v:.3f}" for name, v in measures.items()}),
                ],
            },
            commands=commands,
        )


class HeadTraining(TargetTraining):
    """A run of heads that read a frozen target's states, begun."""

    recipe: HeadRecipe

    def __init__(self, recipe: HeadRecipe, run: HeadRun, listener: RunListener | None) -> None:
        super().__init__(recipe, run, listener)
        self._earlier_head = None
        if run.earlier is not None:
            begun = recipe.learning_on(run.earlier, self.shape, run.source)
            self.recipe, self._earlier_head = begun
        taps = self.recipe.taps(self.shape)
        self.target.check_taps(taps)
        self.states = self._states_of(taps, self.precision)
        self._cached: bool | None = None
        self._recompute = True

    def _states_kept(self, longest: TokenCorpus) -> FeatureCache | None:
        if not self.target.leaves_states:
            return None
        return self.states.while_answering(self.settings(longest), longest)

    def identity(self, corpus: TokenCorpus, settings: TrainerSettings) -> dict[str, Any]:
        """Return the facts that resumed runs must share, with the choice of cached states."""
        # Before memory is estimated: with cached states only the target's matrices are in it.
        self._cached = self.states.kept(settings, corpus)
        return {**super().identity(corpus, settings), CACHED: self._cached}

    def need(self, corpus: TokenCorpus, settings: TrainerSettings) -> MemoryNeed:
        """Return the memory; if it is over half of the free one, steps compute parts again."""
        cached = self._cached
        if cached is None:  # before answers: how much room the disk must have is not known yet
            cached = self.states.pay(settings, corpus)
        known = (self.recipe, self.target, self.shape, corpus, settings, cached)
        need = functools.partial(head_memory, *known)
        ample = need(recompute=False)
        self._recompute = ample.total > free_memory(self.device) / 2  # others may want some too
        return need(recompute=True) if self._recompute else ample

    def learner(self, corpus: TokenCorpus, settings: TrainerSettings) -> HeadLearner:
        """Return the head as it begins: new, fitted to its texts, or an earlier one."""
        run, target = self.run, self.target
        torch.manual_seed(run.seed)
        opened = target.states(self.states.cache.taps, corpus.longest)
        source: FeatureSource
        if self._cached:
            with opened as computing:
                source = self.states.filled(corpus, computing, self.device)
                del computing
            # The model that computed the states is out of memory now.
        else:
            source = self.resources.enter_context(opened)
        matrices = target.matrices()
        torch.manual_seed(run.seed)  # heads start alike, whatever computing states has drawn
        learner = self.recipe.learner(self.shape, matrices, source, corpus)
        learner.recompute = self._recompute
        if self._earlier_head is not None:  # a resumed run has its draft tokens from there, too
            learner.go_on_from(self._earlier_head)
        elif not run.resume:
            learner.start(corpus)
        self.shape = dataclasses.replace(self.shape, vocab_size=matrices.output.shape[0])
        return learner

    def finished(
        self, learner: HeadLearner, corpus: TokenCorpus, report: TrainingReport
    ) -> TrainingReport:
        """Write the head's folder."""
        self._write(self.recipe.files(learner, self.shape), corpus, report)
        self.states.remove()
        return report


class ModelTraining(TargetTraining):
    """A run that trains through the target's layers, begun; the target's own folder stays."""

    recipe: ModelRecipe

    def __init__(self, recipe: ModelRecipe, run: HeadRun, listener: RunListener | None) -> None:
        if run.teacher is not None:
            raise OptionError(f"{recipe.through_layers}: leave out --teacher")
        if is_file_target(run.target):
            folder = f"give the Hugging Face folder of {run.target.name} as --target"
            raise OptionError(f"{recipe.through_layers}: {folder}")
        super().__init__(recipe, run, listener)
        self.states = self._states_of((), torch.float32)  # as the untrained model computes

    def identity(self, corpus: TokenCorpus, settings: TrainerSettings) -> dict[str, Any]:
        """Return the facts that resumed runs must share; room for states is checked too."""
        if self.recipe.learns_earlier_law:
            kept = self.states.room(corpus)
            self.listener.note(f"the model's states are kept on disk as they were: {kept}")
        return super().identity(corpus, settings)

    def need(self, corpus: TokenCorpus, settings: TrainerSettings) -> MemoryNeed:
        """Return the memory of the model and of a step."""
        return self.recipe.need(self.run, self.shape, corpus)

    def learner(self, corpus: TokenCorpus, settings: TrainerSettings) -> Learner:
        """Return the learner of the model, which is loaded; its states as it was are kept."""
        model = load_hf_model(self.run.target, self.device)
        self._model, former = model, None
        if self.recipe.learns_earlier_law:
            source = self.states.filled(corpus, ModelFeatures(model), self.device)
            # A copy of the output matrix as it was; the embedding makes no distributions and is
            # never read.
            matrices = dataclasses.replace(model.matrices, output=model.output.detach().clone())
            former = FormerModel(source, matrices)
        torch.manual_seed(self.run.seed)
        return self.recipe.learner(self.shape, model, settings.steps, former)

    def finished(
        self, learner: Learner, corpus: TokenCorpus, report: TrainingReport
    ) -> TrainingReport:
        """Write the folder: if the model has learnt too, all of it."""
        run, files = self.run, self.recipe.files(learner, self.shape)
        if self.recipe.changes_model:
            copy_tokenizer(run.target, run.output)
            config = json.loads((run.target / "config.json").read_text(encoding="utf-8"))
            model = stored_tensors(run.target, self._model)
            files = HeadFiles({**config, **files.config}, {**model, **files.tensors})
        self._write(files, corpus, report)
        self.states.remove()
        return report


def head_memory(
    recipe: HeadRecipe,
    source: HeadTarget,
    shape: ModelShape,
    corpus: TokenCorpus,
    settings: TrainerSettings,
    cached: bool,
    *,
    recompute: bool,
) -> MemoryNeed:
    """Return the memory of a run at its largest, from shapes alone: nothing is loaded."""
    meta = torch.device("meta")
    matrix = torch.empty(shape.vocab_size, shape.hidden, device=meta)
    with meta:
        matrices, states = TargetMatrices(matrix, matrix, None), _NoFeatures(recipe.taps(shape))
        head = recipe.learner(shape, matrices, states, corpus)
    size = 2 if settings.precision == torch.bfloat16 else 4
    target = source.weight_bytes(size)
    tokens = corpus.widest(settings.tokens_per_batch)
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
    """A placeholder for states, if only shapes matter."""

    def __init__(self, taps: tuple[int, ...]) -> None:
        self.taps = taps

    def features(self, batch: Any) -> Any:  # noqa: ANN401 - never called
        raise NotImplementedError


def _longest_texts(run: HeadRun, documents: Sequence[Document]) -> TokenCorpus:
    """Return a corpus of as many texts as have a question, each as long as texts may be."""
    # Plain texts have no question, so the target answers none of them.
    asking = sum(not isinstance(document, PlainText) for document in documents)
    asking += run.n_own_prompts
    longest = TokenSequence(np.zeros(run.max_length, np.int32), np.ones(run.max_length, np.bool_))
    return corpus_of([longest] * max(1, asking), held_out=run.held_out, seed=run.seed)


def _data_text(run: HeadRun) -> str:
    """Return the origin of the texts, for the card."""
    if run.data:
        given = ", ".join(path.name for path in run.data)
    else:
        given = run.prompts.name if run.prompts else f"{run.n_prompts:,} of specrun's own prompts"
    if run.n_own_prompts:
        given += f", and prompts that the target wrote in {run.n_own_prompts:,} tries"
    return given if run.own_answers is None else f"{given}, answered by the target"
