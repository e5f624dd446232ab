"""A run's checkpoint: parameters, optimizer, curves and place in the data, whole or not at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from specrun.bindings.errors import FileMissingError, MalformedFileError, OptionError
from specrun.bindings.files import atomic_path
from specrun.train.trainer.learner import Learner
from specrun.train.trainer.listener import Curves
from specrun.train.trainer.optimizer_step import OptimizerStep
from specrun.train.trainer.precision import dtype_name

# Raised where a run would go on differently: 2 counts answers' first tokens, 3 knows taps' size.
_FORMAT = 3
# What unfinished runs of earlier versions called these; as stored, so that they can be resumed.
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

    Empty where nothing is resumed; `precision` is None where a checkpoint does not tell.
    """

    identity: Mapping[str, Any] = field(default_factory=dict)
    precision: str | None = None


def check_checkpoint(path: Path, *, resume: bool) -> None:
    """Raise where there is no checkpoint to resume, or where one would be overwritten."""
    if resume and not path.exists():
        raise FileMissingError(f"there is no {path} to resume: leave out --resume to begin")
    if not resume and path.exists():
        ways = "go on with --resume, or choose another folder"
        raise OptionError(f"{path} holds an earlier run: {ways}")


def earlier_run(path: Path, *, resume: bool) -> EarlierRun:
    """Return what the checkpoint says of its run where `resume` is given; no weights are read.

    Raises MalformedFileError where it is damaged or of another version.
    """
    if not resume:
        return EarlierRun()
    state = _checked(path, peek_state)
    return EarlierRun(dict(state["identity"]), state.get("precision"))


def check_same_run(path: Path, earlier: EarlierRun, identity: Mapping[str, Any]) -> None:
    """Raise OptionError where a resumed run differs from its checkpoint: before long work."""
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
    """Replace the checkpoint; `identity` names what a resumed run must share with this one.

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

    Raises MalformedFileError where it is damaged or of another version, OptionError where
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
                f"{path} was made with {name.replace('_', ' ')} {before} and --resume asks for "
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
