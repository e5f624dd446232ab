"""Training runs: `train` makes a run of any recipe, from files to files.

The folder of a run holds the finished model (config.json, weights, README.md) and `training/` with
the checkpoint and whatever else is needed only while the run goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch

from specrun.bindings.errors import OptionError, SpecrunError
from specrun.train.data.corpus import TokenCorpus
from specrun.train.trainer.learner import Learner, RunListener, SilentListener, TrainingResult
from specrun.train.trainer.memory import MemoryNeed, require_memory
from specrun.train.trainer.settings import (
    TrainerSettings,
    TrainingDefaults,
    device_name,
    usable_device,
    usable_precision,
)
from specrun.train.trainer.trainer import (
    check_checkpoint,
    check_same_run,
    earlier_run,
    train_learner,
)

Run_contra = TypeVar("Run_contra", bound="TrainingRun", contravariant=True)
Report_co = TypeVar("Report_co", bound="TrainingReport", covariant=True)
LongerReport = TypeVar("LongerReport", bound="TrainingReport")


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """The target, the data, the length and the output folder of a training.

    `target` is a Hugging Face folder, `data` files of text or JSON Lines. `steps` overrules
    `epochs`; `learning_rate` None is the usual one. `warmup` is a share of the steps, `measures`
    how often held-out data are measured. Texts have at most `max_length` tokens.
    """

    target: Path
    data: tuple[Path, ...]
    output: Path
    epochs: int = 1
    steps: int | None = None
    tokens_per_batch: int = 4096
    max_length: int = 2048
    held_out: float = 0.05
    learning_rate: float | None = None
    warmup: float = 0.03
    measures: int = 10
    seed: int = 0
    device: str = "auto"
    precision: str = "auto"
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

    @property
    def state_path(self) -> Path:
        """The checkpoint."""
        return self.output / "training" / "state.pt"


@dataclass(frozen=True, slots=True)
class TrainingReport:
    """The report of a run: its folder, its result, and the numbers of parameters and texts.

    `n_held_out` is 0 if there were too few texts to hold any out.
    """

    output: Path
    result: TrainingResult
    n_trained: int
    n_sequences: int
    n_held_out: int
    precision: str
    device: str

    @property
    def measured_on_training(self) -> bool:
        """Whether the measures are of the training texts."""
        return self.n_held_out == 0

    def extended(self, kind: type[LongerReport], **more: Any) -> LongerReport:  # noqa: ANN401
        """Return the report with `more`, as a `kind` of report that has these fields."""
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return kind(**own, **more)


class Training(ABC, Generic[Report_co]):
    """A run under way: its folder may be written, its device and precision are known.

    A kind of training defines its texts, the learner, and the files that are written at the end;
    `train` calls these methods in the order in which they are listed here. `weights_name` is the
    file that a finished run leaves, `reads` are the folders of the models that it reads. A
    resumed run goes on in the precision of its checkpoint.
    """

    usual: ClassVar[TrainingDefaults]
    """How such models are trained, if that is the same for all."""

    def __init__(
        self,
        run: TrainingRun,
        listener: RunListener | None,
        reads: Iterable[Path],
        weights_name: str = "model.safetensors",
    ) -> None:
        self.run, self._weights_name = run, weights_name
        self._check_output(reads)
        if run.n_threads:
            torch.set_num_threads(run.n_threads)
        self.listener = listener or SilentListener()
        self.device = usable_device(run.device)
        self.earlier = earlier_run(run.state_path, resume=run.resume)
        self.precision = usable_precision(run.precision, self.device, self.earlier.precision)
        self.resources = contextlib.ExitStack()
        """Closed at the end of the run: models that are read until then."""

    @abstractmethod
    def texts(self) -> TokenCorpus:
        """Return the texts to learn, answered if they are to be: may take hours."""

    def defaults(self) -> TrainingDefaults:
        """Return how such models are trained."""
        return self.usual

    @abstractmethod
    def identity(self, corpus: TokenCorpus, settings: TrainerSettings) -> dict[str, Any]:
        """Return the facts that a resumed run must share, in addition to trainer's settings."""

    def need(self, corpus: TokenCorpus, settings: TrainerSettings) -> MemoryNeed | None:
        """Return the memory that is needed; None: it was required before, with the texts."""
        return None

    @abstractmethod
    def learner(self, corpus: TokenCorpus, settings: TrainerSettings) -> Learner:
        """Return the learner, its models loaded, as it is before its first step."""

    @abstractmethod
    def finished(
        self,
        learner: Any,  # noqa: ANN401 - the one that `learner` returned
        corpus: TokenCorpus,
        report: TrainingReport,
    ) -> Report_co:
        """Measure the trained model, write its folder, and return the whole report."""

    def settings(self, corpus: TokenCorpus) -> TrainerSettings:
        """Return the trainer's settings for a corpus."""
        run, usual = self.run, self.defaults()
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
            precision=self.precision,
            matrix_optimizer=usual.matrix_optimizer,
        )

    def note_texts(self, corpus: TokenCorpus) -> None:
        """Inform the listener of the number of texts."""
        aside = f"{len(corpus.held_out):,} held out"
        if corpus.measured_on_training:
            aside = "none held out: measures are of the training texts"
        sizes = f"{len(corpus.training):,} sequences of {corpus.n_tokens:,} tokens"
        self.listener.note(f"{sizes} to train on, {aside}")

    def require_memory(self, need: MemoryNeed, note: str = "") -> None:
        """Inform the listener of the need; raise OutOfMemoryError if there is less."""
        self.listener.note(f"memory: about {need}{note}")
        require_memory(need, self.device)

    def open_output(self) -> None:
        """Make the folder, without an earlier run's checkpoint if that is overwritten.

        Raises OptionError for a folder with other files, and SpecrunError if it cannot be made.
        """
        run = self.run
        self._check_output()
        try:
            run.output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SpecrunError(
                f"{run.output} cannot be made ({error.strerror}); choose another folder"
            ) from error
        if run.force and not run.resume:
            run.state_path.unlink(missing_ok=True)

    def _check_output(self, reads: Iterable[Path] = ()) -> None:
        """Raise OptionError if the folder has something that the run would overwrite.

        Models that are read are never written into. Raises FileMissingError if there is no
        checkpoint to resume.
        """
        run, folder, holds = self.run, self.run.output, self._weights_name
        if folder.exists() and not folder.is_dir():
            raise OptionError(f"{folder} is a file; name a folder to write into")
        if folder.exists() and any(read.exists() and folder.samefile(read) for read in reads):
            raise OptionError(
                f"{folder} is the folder of a model that is read; name another folder to write"
            )
        if run.resume:
            check_checkpoint(run.state_path, resume=True)
        if run.resume or run.force:
            return
        advice = "choose another folder, or overwrite it with --force"
        if (folder / holds).exists():
            raise OptionError(f"{folder} already holds {holds}; {advice}")
        strange = [name for name in ("config.json", "README.md") if (folder / name).exists()]
        if strange and not run.state_path.exists():
            raise OptionError(f"{folder} holds {strange[0]} of something else; {advice}")
        check_checkpoint(run.state_path, resume=False)


class Recipe(Protocol[Run_contra, Report_co]):
    """A kind of model to train and its settings: its loss, its texts, and its files."""

    def training(self, run: Run_contra, listener: RunListener | None) -> Training[Report_co]:
        """Return the training of a run, begun."""


def train(
    recipe: Recipe[Run_contra, Report_co], run: Run_contra, listener: RunListener | None = None
) -> Report_co:
    """Train a recipe's model from files to files.

    Ctrl-C keeps a checkpoint. Raises OptionError, FileMissingError and MalformedFileError for the
    input, PairError for models that do not fit each other, OutOfMemoryError with an estimate
    before weights are loaded, SpecrunError if the disk is too small or the loss is not a number,
    and as reading data and models does.
    """
    training = recipe.training(run, listener)
    with training.resources:
        corpus = training.texts()
        settings = training.settings(corpus)
        identity = training.identity(corpus, settings)
        wanted = {**settings.identity, **identity}
        check_same_run(run.state_path, training.earlier.identity, wanted)
        need = training.need(corpus, settings)
        if need is not None:
            training.require_memory(need)
        training.open_output()
        learner = training.learner(corpus, settings)
        result = train_learner(
            learner,
            corpus,
            settings,
            run.state_path,
            resume=run.resume,
            identity=identity,
            report=training.listener.status,
        )
        report = TrainingReport(
            run.output,
            result,
            n_trained=learner.n_trained,
            n_sequences=len(corpus.training),
            n_held_out=0 if corpus.measured_on_training else len(corpus.held_out),
            precision=settings.precision_name,
            device=device_name(learner.device),
        )
        return training.finished(learner, corpus, report)
