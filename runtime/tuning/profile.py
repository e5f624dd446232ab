"""Profiles written by `specrun accelerate`, and the default drafter that they choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import FileMissingError, SpecrunError
from specrun.bindings.files import (
    NotForThisError,
    cache_folder,
    json_object,
    list_in,
    number_in,
    read_kept,
    text_in,
)
from specrun.bindings.gguf import read_header
from specrun.bindings.machine.devices import describe_machine
from specrun.runtime.acceptance import build_rule
from specrun.runtime.language import options_of, parse_expression, short_label
from specrun.runtime.memory.fit import LayerCount
from specrun.runtime.models.names import is_recurrent
from specrun.runtime.planning.plans import describe_file, describe_settings, write_json

# == Profiles ======================================================================================
#
# A profile belongs to a machine, a model file (by size and content, wherever it lies and whatever
# it is called), the settings that change what evaluations cost, and the files of the drafters that
# it names. Where one of them differs it is ignored, with one sentence that says which.


FORMAT = 1
ANY = "any"
"""The workload of a choice for texts of all kinds."""

_LONGEST_NAME = 40
_MOST_BYTES = 1 << 24  # the record of a long search
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

    def parse(data: bytes) -> Profile:
        content = json_object(data)
        reason = _mismatch(content, target, settings)
        if reason:
            raise NotForThisError(reason)
        return _profile(content)

    what = f"the profile of {target.name}"
    try:
        path = known_profile_file(target)
    except (OSError, FileMissingError) as error:
        cause = getattr(error, "strerror", None) or error
        warn(f"{what} cannot be read ({cause}); {_AGAIN}")
        return None
    if path is None:
        return None
    return read_kept(path, parse, what=what, advice=_AGAIN, warn=warn, most=_MOST_BYTES)


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
    choices = tuple(map(_choice, list_in(content["choices"])))
    if not isinstance(content["record"], dict) or not isinstance(content["finished"], bool):
        raise TypeError("a record is a mapping, and a profile is finished or not")
    names = ("target", "settings", "files", "machine", "record", "finished")
    return Profile(
        choices=choices,
        measured=text_in(content["measured"]),
        **{name: content[name] for name in names},
    )


def _choice(value: Mapping[str, Any]) -> Choice:
    drafter = text_in(value["drafter"])
    options_of(parse_expression(drafter))  # raises for what is none
    return Choice(
        number_in(value["temperature"]),
        text_in(value["workload"]),
        drafter,
        number_in(value["speed_up"]),
        text_in(value["reason"]),
    )


# == The default drafter: the profile's, else `auto`, which limits its losses ======================
#
# `drafter_for` is asked by whatever opens a model for a user (chat, generate, a server). Under a
# rule that is not exact nothing is chosen here: what a user did not ask for must not change a
# text's law.


PLAIN, AUTO = "none", "auto"
QUESTIONS, EDITED = "questions", "edited"
"""Workloads of profiles: answers to short prompts, and such that repeat or edit a long one."""

_LONG_PROMPT = 400  # characters from which a prompt holds a text that the answer is about


@dataclass(frozen=True, slots=True)
class ChosenDrafter:
    """A drafter expression, and the line that says where it comes from ("": nothing to say)."""

    expression: str
    note: str = ""


def drafter_for(
    target: Path,
    temperature: float,
    workload: str = ANY,
    *,
    context: ContextOptions,
    n_gpu_layers: LayerCount = "auto",
    n_gpu_layers_draft: LayerCount = "auto",
    accept: str = "exact",
    use_profile: bool = True,
    warn: Callable[[str], None] = lambda _: None,
) -> ChosenDrafter:
    """Return how to draft for a model file where nobody says how.

    `workload` is one of a profile (`workload_of`), "any" where it is not known. `use_profile` False
    leaves the profile out. `warn` is told in a sentence why a profile does not apply; files that
    cannot be read are left to whoever opens them.
    """
    if not build_rule(accept).exact:
        return ChosenDrafter(PLAIN)
    if use_profile:
        settings = describe_settings(context, n_gpu_layers, n_gpu_layers_draft)
        profile = load_profile(target, settings, warn=warn)
        choice = None if profile is None else profile.choice(temperature, workload)
        if choice is not None:
            return ChosenDrafter(choice.drafter, _note(choice))
    return ChosenDrafter(AUTO if _takes_back(target) else PLAIN)


def workload_of(prompt: str) -> str:
    """Return the workload of one prompt: a long one holds a text to summarise or edit."""
    return EDITED if len(prompt) >= _LONG_PROMPT else QUESTIONS


def _takes_back(target: Path) -> bool:
    """Whether drafts can be taken back at all, by what the header says."""
    try:
        return not is_recurrent(read_header(target))
    except SpecrunError:
        return False


def _note(choice: Choice) -> str:
    off = "(--no-profile: without it)"
    if choice.drafter == PLAIN:
        why = f", {choice.reason}" if choice.reason else ""
        return f"profile: decoding plainly, as specrun accelerate found nothing faster{why} {off}"
    drafter = short_label(parse_expression(choice.drafter))
    return f"profile: {drafter}, {choice.speed_up:.2f} times plain decoding when measured {off}"
