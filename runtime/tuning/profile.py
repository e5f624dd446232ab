"""Profiles: what `specrun accelerate` found to be fastest for one GGUF file on this machine.

A profile belongs to a machine, a model file (by size and content, wherever it lies and whatever it
is called), the settings that change what evaluations cost, and the files of the drafters that it
names. Where one of them differs it is ignored, with one sentence that says which.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from specrun.bindings.atomic import cache_folder
from specrun.bindings.errors import FileMissingError, OptionError, SpecrunError
from specrun.bindings.machine.devices import describe_machine
from specrun.runtime.costs.tuned import describe_file, read_json, write_json
from specrun.runtime.language import parse_expression

FORMAT = 1
ANY = "any"
"""The workload of a choice for texts of all kinds."""

_LONGEST_NAME = 40
_AGAIN = "run specrun accelerate again"


@dataclass(frozen=True, slots=True)
class Choice:
    """The drafter for a temperature and a workload, with its speed over plain decoding's.

    `drafter` "none" is plain decoding, for which `reason` says why nothing pays.
    """

    temperature: float
    workload: str
    drafter: str
    speed_up: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Profile:
    """Choices for a model file, and all that they were made from.

    `files` are those of the drafters that the choices name, as `describe_file` tells them; `record`
    is what `accelerate` goes on from; `measured` the day. `finished` is whether everything was
    tried.
    """

    target: Mapping[str, object]
    settings: Mapping[str, object]
    choices: tuple[Choice, ...]
    files: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    machine: Mapping[str, object] = field(default_factory=describe_machine)
    measured: str = ""
    finished: bool = False
    record: Mapping[str, Any] = field(default_factory=dict)

    def choice(self, temperature: float, workload: str = ANY) -> Choice | None:
        """Return the choice for a workload nearest to a temperature; None without any.

        A workload that was not measured is as any other text.
        """
        own = [choice for choice in self.choices if choice.workload == workload]
        own = own or [choice for choice in self.choices if choice.workload == ANY]
        # Acceptance moves with the temperature, and with it what pays: the nearest one stands in.
        return min(own, key=lambda choice: abs(choice.temperature - temperature), default=None)


def profile_file(target: Path) -> Path:
    """Return where the profile of a model file is kept: its content names it, not its place."""
    digest = str(describe_file(target)["sha256_of_ends"])[:16]
    return cache_folder() / "profiles" / f"{target.stem[:_LONGEST_NAME]}-{digest}.json"


def known_profile_file(target: Path) -> Path | None:
    """Return the profile of a model file, under whatever name it was measured; None without one."""
    own = profile_file(target)
    if own.is_file():
        return own
    digest = own.stem.rpartition("-")[2]
    return min(own.parent.glob(f"*-{digest}.json"), default=None)


def save_profile(profile: Profile, target: Path) -> Path:
    """Store a profile over an earlier one of the file; return where."""
    content = {"format": FORMAT, **asdict(profile)}
    path = known_profile_file(target) or profile_file(target)
    return write_json(path, content)


def load_profile(
    target: Path,
    settings: Mapping[str, object],
    *,
    warn: Callable[[str], None] = lambda _: None,
) -> Profile | None:
    """Return the profile of a model file; None, and a warning, where it does not apply.

    Nothing here raises, so that no chat hangs on what lies in a cache.
    """
    try:
        path = known_profile_file(target)
        content = None if path is None else read_json(path)
        reason = "" if content is None else _mismatch(content, target, settings)
    except (OSError, FileMissingError) as error:
        what = getattr(error, "strerror", None) or error
        warn(f"the profile of {target.name} cannot be read ({what}); {_AGAIN}")
        return None
    if path is None:
        return None
    try:
        if content is not None and not reason:
            return _profile(content)
    except (KeyError, TypeError, ValueError, AttributeError, SpecrunError):
        content = None
    why = reason or f"{path} is damaged"
    warn(f"the profile of {target.name} was ignored: {why}; {_AGAIN}")
    return None


def _mismatch(content: Mapping[str, Any], target: Path, settings: Mapping[str, object]) -> str:
    """Return why a profile does not apply, "" if it does."""
    if content.get("format") != FORMAT:
        return "it was written by another version of specrun"
    if content.get("machine") != describe_machine():
        return "it was measured on another machine"
    if content.get("target") != describe_file(target):
        return f"{target.name} is another file than the one it was measured with"
    stored = content.get("settings")
    if not isinstance(stored, dict):
        return "its settings are missing"
    for key, value in settings.items():
        if stored.get(key) != value:
            return f"it was measured with {key} {stored.get(key)}, not {value}"
    files = content.get("files")
    return _changed_file(files) if isinstance(files, dict) else "its files are missing"


def _changed_file(files: Mapping[str, object]) -> str:
    for name, described in files.items():
        path = Path(name)
        if not path.is_file():
            return f"it drafts with {name}, which is not there"
        if describe_file(path) != described:
            return f"{name} is another file than the one it was measured with"
    return ""


def _profile(content: Mapping[str, Any]) -> Profile:
    choices = tuple(_choice(value) for value in content["choices"])
    if not isinstance(content["record"], dict) or not isinstance(content["finished"], bool):
        raise TypeError("a record is a mapping, and a profile is finished or not")
    names = ("target", "settings", "files", "machine", "record", "finished")
    return Profile(
        choices=choices,
        measured=str(content["measured"]),
        **{name: content[name] for name in names},
    )


def _choice(value: Mapping[str, Any]) -> Choice:
    numbers = float(value["temperature"]), float(value["speed_up"])
    if not all(math.isfinite(number) and number >= 0.0 for number in numbers):
        raise OptionError(f"{numbers} are no temperature and speed-up")
    texts = value["workload"], value["drafter"], value["reason"]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("workload, drafter and reason are texts")
    workload, drafter, reason = texts
    parse_expression(drafter)  # raises for what is none
    return Choice(numbers[0], workload, drafter, numbers[1], reason)
