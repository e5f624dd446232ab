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
from specrun.train.trainer.memory import held_interrupt, is_allocation_failure, too_little_memory
from specrun.train.trainer.optimizer import OptimizerStep, PartValues
from specrun.train.trainer.settings import TrainerSettings, dtype_name

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
    state = _checked(path, peek_state)
    return EarlierRun(dict(state["identity"]), state.get("precision"))


def check_same_run(path: Path, earlier: EarlierRun, identity: Mapping[str, Any]) -> None:
    """Raise OptionError if a resumed run differs from its checkpoint: before long work."""
    if earlier.identity:
        _check_same(earlier.identity, identity, path)


def save_run(
    path: Path,
    identity: dict[str, Any],
    learner: Learner,
    optimizer: OptimizerStep,
    place: Place,
    curves: Curves,
    *,
    precision: torch.dtype = torch.float32,
) -> None:
    """Replace the checkpoint; a resumed run must share `identity` with this one.

    `precision` need not be the same, but a run that is left the choice goes on in it.
    """
    state = {
        "format": _FORMAT,
        "identity": identity,
        "precision": dtype_name(precision),
        "learner": learner.state(),
        **optimizer.state(),
        "place": dataclasses.asdict(place),
        "curves": dataclasses.asdict(curves),
    }
    save_state(path, state)


def load_run(
    path: Path, identity: dict[str, Any], learner: Learner, optimizer: OptimizerStep
) -> tuple[Place, Curves]:
    """Load learner and optimizer from a checkpoint; return its place and the curves up to it.

    Raises MalformedFileError if it is damaged or of another version, OptionError if
    `identity` differs.
    """
    state = _checked(path, load_state)
    _check_same(state["identity"], identity, path)
    learner.load_state(state["learner"])
    optimizer.load_state(state)
    stored = state["curves"]
    measures = [(int(step), _renamed(values)) for step, values in stored["measures"]]
    curves = Curves(
        list(stored["losses"]), {k: list(v) for k, v in stored["parts"].items()}, measures
    )
    return Place(**state["place"]), curves


def _renamed(values: Mapping[str, Any]) -> dict[str, Any]:
    return {_FORMER_NAMES.get(name, name): value for name, value in values.items()}


def _checked(path: Path, read: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    try:
        state = read(path)
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


def _check_same(stored: Mapping[str, Any], wanted: Mapping[str, Any], path: Path) -> None:
    for name in sorted(stored.keys() | wanted.keys()):
        before, now = stored.get(name), wanted.get(name)
        if before != now:
            raise OptionError(
                f"{path} was made with {name.replace('_', ' ')} {before}, and --resume needs "
                f"{now}: give the same, or begin anew in another folder"
            )


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Write a training state whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path, force=True) as aside:
        torch.save(state, aside)


def load_state(path: Path) -> dict[str, Any]:
    """Read a training state; only tensors and plain values are accepted."""
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def peek_state(path: Path) -> dict[str, Any]:
    """Read a training state without its tensors' numbers, which are only mapped."""
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
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


class _Run:
    def __init__(
        self,
        learner: Learner,
        texts: EpochTexts,
        settings: TrainerSettings,
        state_path: Path | None,
        identity: dict[str, Any],
        report: Report | None,
    ) -> None:
        self._learner, self._settings, learner.n_updates = learner, settings, settings.steps
        self._corpus_of = functools.lru_cache(maxsize=1)(texts.epoch)
        self._state_path, self._identity, self._report = state_path, identity, report
        self._optimizer = OptimizerStep(learner, settings, self._kept)
        self._place = Place()
        self._curves = Curves()
        self._saved: tuple[int, int] | None = None  # steps and measures of the checkpoint
        self._smooth: float | None = None
        self._whole = True  # whether parameters, optimizer and place belong to the same step

    def open(self, *, resume: bool) -> None:
        """Continue from the checkpoint, or make sure that none is overwritten."""
        assert self._state_path is not None
        check_checkpoint(self._state_path, resume=resume)
        if not resume:
            return
        learning = (self._learner, self._optimizer)
        self._place, self._curves = load_run(self._state_path, self._identity, *learning)
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
        settings = self._settings
        saved_at = time.monotonic()
        self._learner.learning(True)
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
        settings = self._settings
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
        step, every = self._place.step, self._settings.measure_every
        measured = self._curves.measures[-1][0] if self._curves.measures else 0
        due = step == self._settings.steps or (every > 0 and step % every == 0)
        return step > measured and due

    def _measure(self) -> None:
        self._learner.learning(False)
        corpus = self._corpus_of(self._place.epoch)
        batches = corpus.held_out_batches(self._settings.tokens_per_batch, self._learner.device)
        with torch.no_grad():
            found = self._learner.measure(batches)
        self._curves.measures.append((self._place.step, found))
        self._learner.learning(True)
        shown = ", ".join(f"{name} {value:.3f}" for name, value in found.items())
        logger.info("step %d: %s", self._place.step, shown)

    def _tell(self) -> None:
        if self._report is None:
            return
        place = self._place
        per_step = place.seconds / max(1, place.step)
        self._report(
            TrainingStatus(
                step=place.step,
                steps=self._settings.steps,
                loss=self._smooth or 0.0,
                measures=self._curves.measures[-1][1] if self._curves.measures else {},
                tokens_per_second=place.tokens / place.seconds if place.seconds > 0 else 0.0,
                seconds_left=per_step * (self._settings.steps - place.step),
            )
        )

    def _save(self) -> None:
        now = (self._place.step, len(self._curves.measures))
        changed = self._saved != now and self._place.step > 0
        if self._state_path is None or not changed or not self._whole:
            return
        run = (self._identity, self._learner, self._optimizer, self._place, self._curves)
        save_run(self._state_path, *run, precision=self._settings.precision)
        self._saved = now

    def _kept(self) -> str:
        if self._saved is None:
            return "no checkpoint was made before it"
        return f"{self._state_path} keeps step {self._saved[0]}"

    def _out_of_memory(self) -> OutOfMemoryError:
        """Save the last whole state, if there is memory for that, and return the error to raise."""
        self._optimizer.drop_gradients()
        with contextlib.suppress(MemoryError, RuntimeError, OSError):
            self._save()
        return too_little_memory(self._place.step, self._learner.device, self._kept())


def _smoothed(before: float | None, loss: float) -> float:
    return loss if before is None else _SMOOTHING * before + (1 - _SMOOTHING) * loss
