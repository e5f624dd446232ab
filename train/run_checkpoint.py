"""The checkpoint of a training run: parameters, optimizer, curves, and the place in the data, whole or not at all."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specrun.bindings.errors import FileMissingError, MalformedFileError, OptionError
from specrun.train.checkpoint import load_state, save_state
from specrun.train.learner import Learner
from specrun.train.training_progress import Curves

__all__ = ["Place", "check_checkpoint", "load_run", "save_run"]

_FORMAT = 3  # raised where a run would go on differently: 2 counts answers' first words, 3 knows the size of taps


@dataclass(frozen=True, slots=True)
class Place:
    """`step` steps are done, the next batch is number `index` of `epoch`; replaced whole, so no Ctrl-C splits it."""

    step: int = 0
    epoch: int = 0
    index: int = 0
    tokens: int = 0
    seconds: float = 0.0


def check_checkpoint(path: Path, *, resume: bool) -> None:
    """Raise FileMissingError where there is no checkpoint to resume, OptionError where one would be overwritten."""
    if resume and not path.exists():
        raise FileMissingError(f"there is no {path} to resume: leave out --resume to begin")
    if not resume and path.exists():
        raise OptionError(f"{path} holds an earlier run: go on with --resume, or choose another folder")


def save_run(
    path: Path,
    identity: dict[str, Any],
    learner: Learner,
    optimizer: torch.optim.Optimizer,
    place: Place,
    curves: Curves,
) -> None:
    """Replace the checkpoint; `identity` names what a resumed run must have in common with this one."""
    state = {
        "format": _FORMAT,
        "identity": identity,
        "learner": learner.state(),
        "optimizer": optimizer.state_dict(),
        "place": dataclasses.asdict(place),
        "curves": dataclasses.asdict(curves),
    }
    save_state(path, state)


def load_run(
    path: Path, identity: dict[str, Any], learner: Learner, optimizer: torch.optim.Optimizer
) -> tuple[Place, Curves]:
    """Put learner and optimizer where the checkpoint left them; return the place and the curves up to it.

    Raises MalformedFileError where it is damaged or of another version, OptionError where `identity` differs.
    """
    try:
        state = load_state(path)
        found = state["format"] == _FORMAT
    except Exception as error:  # torch raises many kinds for a damaged file
        raise MalformedFileError(f"{path} is not a checkpoint of specrun: begin anew without --resume") from error
    if not found:
        raise MalformedFileError(f"{path} is a checkpoint of another version of specrun: begin anew")
    _check_same(state["identity"], identity, path)
    learner.load_state(state["learner"])
    optimizer.load_state_dict(state["optimizer"])
    stored = state["curves"]
    measures = [(int(step), dict(values)) for step, values in stored["measures"]]
    curves = Curves(list(stored["losses"]), {k: list(v) for k, v in stored["parts"].items()}, measures)
    return Place(**state["place"]), curves


def _check_same(stored: dict[str, Any], wanted: dict[str, Any], path: Path) -> None:
    for name in sorted(stored.keys() | wanted.keys()):
        before, now = stored.get(name), wanted.get(name)
        if before != now:
            raise OptionError(
                f"{path} was made with {name.replace('_', ' ')} {before} and --resume asks for {now}: give the same, "
                "or begin anew in another folder"
            )
