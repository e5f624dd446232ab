"""The trainer of all models: steps, checkpoints, measures, and exact resumption.

A run is a function of its settings and data: the batches of an epoch come from (seed, epoch), noise
from (seed, step), so that a run continued from a checkpoint repeats the losses of one that was
never stopped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from specrun.bindings.errors import (
    FileMissingError,
    MalformedFileError,
    OptionError,
    OutOfMemoryError,
)
from specrun.bindings.files import atomic_path
from specrun.train.data.corpus import EpochTexts, TokenBatch
from specrun.train.trainer.learner import Curves, Learner, TrainingResult, TrainingStatus
from specrun.train.trainer.memory import ANEW, held_interrupt, is_allocation_failure
from specrun.train.trainer.optimizer import OptimizerStep, PartValues
from specrun.train.trainer.settings import TrainerSettings

# == The checkpoint: parameters, optimizer, curves and place in the data, whole or not at all ======


# Raised if a run would go on differently: 2 counts answers' first tokens, 3 has taps' size.
_FORMAT = 3
# Names in checkpoints of earlier versions, by which unfinished runs can still be resumed.
_FORMER_NAMES = {
    "eagle word_weight": "eagle token_weight",
    "hydra word_weight": "hydra token_weight",
    "eagle3 draft_words": "eagle3 draft_tokens",
    "same first word": "same first token",
}


@dataclass(frozen=True, slots=True)
class Place:
    """Steps done, and the next batch `index` of `epoch`; replaced whole: Ctrl-C cannot split it."""

    step: int = 0
    epoch: int = 0
    index: int = 0
    tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class EarlierRun:
    """The `identity` that a resumed run must share, and the precision it last computed in.

    Empty if nothing is resumed; `precision` is None if a checkpoint does not contain it.
    """

    identity: Mapping[str, Any] = field(default_factory=dict)
    precision: str | None = None


def check_checkpoint(path: Path, *, resume: bool) -> None:
    """Raise if there is no checkpoint to resume, or if one would be overwritten."""
    if resume and not path.exists():
        raise FileMissingError(f"there is no {path} to resume: leave out --resume to begin")
    if not resume and path.exists():
        ways = "go on with --resume, or choose another folder"
        raise OptionError(f"{path} holds an earlier run: {ways}")


def earlier_run(path: Path, *, resume: bool) -> EarlierRun:
    """Return the checkpoint's facts about its run if `resume` is given; no weights are read.

    Raises MalformedFileError if it is damaged or of another version.
    """
    if not resume:
        return EarlierRun()
    state = _checked(path, mapped=True)
    return EarlierRun(dict(state["identity"]), state.get("precision"))


def check_same_run(path: Path, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise OptionError if a run differs from its checkpoint, if there is one: before long work."""
    for name in sorted(stored.keys() | wanted.keys()) if stored else ():
        before, now = stored.get(name), wanted.get(name)
        if before != now:
            raise OptionError(
                f"{path} was made with {name.replace('_', ' ')} {before}, and --resume needs "
                f"{now}: give the same, or begin anew in another folder"
            )


def _renamed(values: Mapping[str, Any]) -> dict[str, Any]:
    return {_FORMER_NAMES.get(name, name): value for name, value in values.items()}


def _checked(path: Path, *, mapped: bool = False) -> dict[str, Any]:
    try:
        state = load_state(path, mapped=mapped)
        found = state["format"] == _FORMAT
        if found and "identity" in state:
            state["identity"] = _renamed(state["identity"])
    except Exception as error:  # torch raises many kinds for a damaged file
        raise MalformedFileError(
            f"{path} is not a checkpoint of specrun: begin anew without --resume"
        ) from error
    if not found:
        other = "a checkpoint of another version of specrun"
        raise MalformedFileError(f"{path} is {other}: begin anew")
    return state


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Write a training state whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path, force=True) as aside:
        torch.save(state, aside)


def load_state(path: Path, *, mapped: bool = False) -> dict[str, Any]:
    """Read a training state; only tensors and plain values are accepted.

    If it is `mapped`, the tensors' numbers are not read.
    """
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    return state


# == The trainer ===================================================================================


logger = logging.getLogger(__name__)
_SMOOTHING = 0.95  # of the loss that is shown


Report = Callable[[TrainingStatus], None]


def train_learner(
    learner: Learner,
    texts: EpochTexts,
    settings: TrainerSettings,
    state_path: Path | None = None,
    *,
    resume: bool = False,
    identity: dict[str, Any] | None = None,
    report: Report | None = None,
) -> TrainingResult:
    """Train `learner` in place on `texts` for `settings.steps` steps.

    With a `state_path` the state is saved there every `save_seconds`, on Ctrl-C and at the end;
    `resume` continues from it. `identity` holds the other facts that must be the same then (data,
    target, kind of head), in plain values. Raises SpecrunError if the loss or a gradient is not a
    number: the last checkpoint is kept; and OutOfMemoryError if a step or a measure finds no
    memory: the steps before it are saved.
    """
    whole = {**settings.identity, **(identity or {})}
    run = _Run(learner, texts, settings, state_path, whole, report)
    if state_path is not None:
        run.open(resume=resume)
    return run.train()


@dataclass
class _Run:
    learner: Learner
    texts: EpochTexts
    settings: TrainerSettings
    state_path: Path | None
    identity: dict[str, Any]
    report: Report | None

    def __post_init__(self) -> None:
        self.learner.n_updates = self.settings.steps
        self._corpus_of = functools.lru_cache(maxsize=1)(self.texts.epoch)
        self._optimizer = OptimizerStep(self.learner, self.settings, self._kept)
        self._place = Place()
        self._curves = Curves()
        self._saved: tuple[int, int] | None = None  # steps and measures of the checkpoint
        self._smooth: float | None = None
        self._whole = True  # whether parameters, optimizer and place belong to the same step

    def open(self, *, resume: bool) -> None:
        """Continue from the checkpoint, or make sure that none is overwritten.

        Raises MalformedFileError if it is damaged or of another version, OptionError if it is of
        another run.
        """
        path = self.state_path
        assert path is not None
        check_checkpoint(path, resume=resume)
        if not resume:
            return
        state = _checked(path)
        check_same_run(path, state["identity"], self.identity)
        self.learner.module.load_state_dict(state["learner"])
        self._optimizer.load_state(state)
        self._place, curves = Place(**state["place"]), state["curves"]
        measures = [(int(step), _renamed(values)) for step, values in curves["measures"]]
        self._curves = Curves(curves["losses"], curves["parts"], measures)
        self._saved = (self._place.step, len(self._curves.measures))
        for loss in self._curves.losses:
            self._smooth = _smoothed(self._smooth, loss)
        logger.info("continuing from step %d", self._place.step)

    def train(self) -> TrainingResult:
        resumed_at = self._place.step
        try:
            self._take_steps()
            self._save()  # before the last measure, which may be long
            if self._measure_is_due():
                self._measure()
                self._tell()
            self._save()
        except KeyboardInterrupt:
            self._save()
            raise
        except (MemoryError, RuntimeError) as error:
            if not is_allocation_failure(error):
                raise
            raise self._out_of_memory() from error
        return TrainingResult(self._curves, self._place.tokens, self._place.seconds, resumed_at)

    def _take_steps(self) -> None:
        """Make the steps that are left, with measures and checkpoints in between."""
        settings = self.settings
        saved_at = time.monotonic()
        self.learner.learning(True)
        for numbers in self._batches():
            if self._measure_is_due():  # of a run that was stopped while it measured
                self._measure()
            self._step(self._corpus_of(self._place.epoch).batch(numbers))
            if self._place.step < settings.steps and self._measure_is_due():
                self._measure()
            self._tell()
            if time.monotonic() - saved_at > settings.save_seconds:
                self._save()
                saved_at = time.monotonic()

    def _batches(self) -> Iterator[tuple[int, ...]]:
        """Yield the batches that are left; the place moves on after each."""
        settings = self.settings
        while self._place.step < settings.steps:
            epoch = self._place.epoch
            corpus = self._corpus_of(epoch)
            batches = corpus.training_batches(epoch, settings.seed, settings.tokens_per_batch)
            while self._place.index < len(batches) and self._place.step < settings.steps:
                yield batches[self._place.index]
            if self._place.index >= len(batches):
                self._place = dataclasses.replace(self._place, epoch=epoch + 1, index=0)

    def _step(self, batch: TokenBatch) -> None:
        """Make one step: gradients of all parts of the loss, an update, and the place after it."""
        started = time.monotonic()
        place = self._place
        values = self._optimizer.gradients(batch, place.step)
        after = dataclasses.replace(
            place, step=place.step + 1, index=place.index + 1, tokens=place.tokens + batch.n_tokens
        )
        with held_interrupt():  # a checkpoint can be made before or after, not in between
            self._whole = False
            self._optimizer.update(place.step)
            self._note(values)
            seconds = place.seconds + time.monotonic() - started
            self._place = dataclasses.replace(after, seconds=seconds)
            self._whole = True

    def _note(self, values: PartValues) -> None:
        total = sum(value for value, _ in values.values())
        self._curves.losses.append(total)
        for name, (_, plain) in values.items():
            self._curves.parts.setdefault(name, []).append(plain)
        self._smooth = _smoothed(self._smooth, total)

    def _measure_is_due(self) -> bool:
        step, every = self._place.step, self.settings.measure_every
        measured = self._curves.measures[-1][0] if self._curves.measures else 0
        due = step == self.settings.steps or (every > 0 and step % every == 0)
        return step > measured and due

    def _measure(self) -> None:
        self.learner.learning(False)
        corpus = self._corpus_of(self._place.epoch)
        batches = corpus.held_out_batches(self.settings.tokens_per_batch, self.learner.device)
        with torch.no_grad():
            found = self.learner.measure(batches)
        self._curves.measures.append((self._place.step, found))
        self.learner.learning(True)
        shown = ", ".join(f"{name} {value:.3f}" for name, value in found.items())
        logger.info("step %d: %s", self._place.step, shown)

    def _tell(self) -> None:
        if self.report is None:
            return
        place = self._place
        per_step = place.seconds / max(1, place.step)
        self.report(
            TrainingStatus(
                step=place.step,
                steps=self.settings.steps,
                loss=self._smooth or 0.0,
                measures=self._curves.measures[-1][1] if self._curves.measures else {},
                tokens_per_second=place.tokens / place.seconds if place.seconds > 0 else 0.0,
                seconds_left=per_step * (self.settings.steps - place.step),
            )
        )

    def _save(self) -> None:
        now = (self._place.step, len(self._curves.measures))
        changed = self._saved != now and self._place.step > 0
        if self.state_path is None or not changed or not self._whole:
            return
        state = {
            "format": _FORMAT,
            "identity": self.identity,
            "precision": self.settings.precision_name,
            "learner": self.learner.module.state_dict(),
            **self._optimizer.state(),
            "place": dataclasses.asdict(self._place),
            "curves": dataclasses.asdict(self._curves),
        }
        save_state(self.state_path, state)
        self._saved = now

    def _kept(self) -> str:
        if self._saved is None:
            return "no checkpoint was made before it"
        return f"{self.state_path} keeps step {self._saved[0]}"

    def _out_of_memory(self) -> OutOfMemoryError:
        """Save the last whole state, if there is memory for that, and return the error to raise."""
        self._optimizer.drop_gradients()
        with contextlib.suppress(MemoryError, RuntimeError, OSError):
            self._save()
        device = self.learner.device
        where = "RAM" if device.type == "cpu" else f"memory of {device}"
        return OutOfMemoryError(
            f"the {where} does not suffice after step {self._place.step}: training stopped and "
            f"{self._kept()}; {ANEW} --batch-tokens or --max-length (a resumed run keeps its own, "
            "and needs more memory free)"
        )


def _smoothed(before: float | None, loss: float) -> float:
    return loss if before is None else _SMOOTHING * before + (1 - _SMOOTHING) * loss
