"""Profiles: measurements of a model file on this machine, and the choices by them.

A profile is one JSON file for a GGUF file, by its size and content, wherever it lies and whatever
it is called. `specrun accelerate`, `tune`, `calibrate` and `why` write it, each its own part:

- cost curves of the target, one for all settings that change the cost of evaluations;
- plans of `specrun tune`, one for each draft model and such settings;
- the choices of `specrun accelerate`, and the record from which it continues.

A part is used on the machine and with the settings that it was measured with, and for the same
files. Otherwise it is left out, with one sentence on the reason.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import FileMissingError
from specrun.bindings.files import (
    DAMAGE,
    NotForThisError,
    atomic_path,
    cache_folder,
    json_object,
    list_in,
    read_kept,
    read_regular,
)
from specrun.bindings.machine.devices import describe_machine
from specrun.bindings.machine.placement import Placement, current_placement
from specrun.bindings.threads import available_cores
from specrun.runtime.language import options_of, parse_expression, quoted
from specrun.runtime.laws.sampling import SamplingParams
from specrun.runtime.memory.fit import LoadOptions
from specrun.runtime.planning.curves import CostCurve, typical_curve

_FORMAT = 1
_MOST_BYTES = 1 << 24  # the record of a long search
_MOST_PARTS = 32  # curves, and plans: of other settings and draft models
_LONGEST_NAME = 40
_HASHED = 1 << 20  # bytes at the beginning and at the end: header, first and last tensors
_ROUNDING = 1e-6
# Tokens and seconds of an evaluation that can be true.
_WIDEST, _SHORTEST, _LONGEST = 1 << 30, 1e-9, 1e6
_ANOTHER_VERSION = "written by another version of specrun"
_TUNE, _ACCELERATE = "run specrun tune again", "run specrun accelerate again"
_PAIR = "the stored plan for this pair"

Warn = Callable[[str], None]
_Part = TypeVar("_Part")

Number = Annotated[float, msgspec.Meta(ge=0.0, le=sys.float_info.max)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
"""Finite numbers of kept files, 0 or more, and whole ones."""


# == The file ======================================================================================


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


def _read(
    target: Path,
    parse: Callable[[Mapping[str, Any]], _Part | None],
    *,
    what: str,
    advice: str,
    warn: Warn | None = None,
) -> _Part | None:
    """Return a part of a profile; None without it. Nothing is raised: see `read_kept`."""

    def whole(data: bytes) -> _Part | None:
        content = json_object(data)
        # First, because nothing else of another version's file can be relied on.
        if content.get("format") != _FORMAT:
            raise NotForThisError(f"it was {_ANOTHER_VERSION}")
        return parse(content)

    try:
        path = known_profile_file(target)
    except (OSError, FileMissingError) as error:
        if warn is not None:  # else left to the caller that opens the file
            cause = getattr(error, "strerror", None) or error
            warn(f"{what} cannot be read ({cause}); {advice}")
        return None
    if path is None:
        return None
    return read_kept(path, whole, what=what, advice=advice, warn=warn, most=_MOST_BYTES)


def _write(target: Path, parts: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> Path:
    """Replace parts of a profile, given its contents; return its file.

    Other parts stay if the file is of this version, machine and model, and whole.
    """
    path = known_profile_file(target) or profile_file(target)
    about = {
        "format": _FORMAT,
        "machine": describe_machine(),
        "target": describe_file(target),
    }
    try:
        kept: Mapping[str, Any] = json_object(read_regular(path))
    except (OSError, *DAMAGE):
        kept = {}
    if any(kept.get(name) != value for name, value in about.items()):
        kept = {}
    return write_json(path, {**kept, **about, **parts(kept)})


def _with(kept: Mapping[str, Any], name: str, part: Mapping[str, Any], *keys: str) -> list[Any]:
    """Return a list of a profile with this part first, which replaces that of the same keys."""
    before = kept.get(name)
    parts = before if isinstance(before, list) else []
    others = [
        other
        for other in parts
        if isinstance(other, dict) and any(other.get(key) != part[key] for key in keys)
    ]
    return [part, *others][:_MOST_PARTS]


def _mismatch(
    content: Mapping[str, Any], target: Path, stored: object, settings: Mapping[str, object]
) -> str:
    """Return why a part that was measured with `stored` settings does not apply, "" if it does."""
    if content.get("machine") != describe_machine():
        return "it was measured on another machine"
    if content.get("target") != describe_file(target):
        return f"{target.name} is another file than the one it was measured with"
    if not isinstance(stored, dict):
        return "its settings are missing"
    for key, value in settings.items():
        if stored.get(key) != value:
            return f"it was measured with {key} {stored.get(key)}, not {value}"
    return ""


def describe_file(path: Path) -> dict[str, object]:
    """Return the identity of a model file; its place is not part of it."""
    if not path.is_file():
        raise FileMissingError(f"there is no file {path}")
    status = path.stat()
    digest = _hash_of_ends(path, status.st_size, (status.st_ino, status.st_mtime_ns))
    return {"size": status.st_size, "sha256_of_ends": digest}


@functools.lru_cache(maxsize=64)
def _hash_of_ends(path: Path, size: int, _version: tuple[int, int]) -> str:
    """Return a hash of a file's ends; an opening looks for it several times."""
    # Ends and size: a hash over gigabytes of weights would delay every start.
    digest = hashlib.sha256()
    with path.open("rb") as file:
        digest.update(file.read(_HASHED))
        file.seek(max(0, size - _HASHED))
        digest.update(file.read(_HASHED))
    return digest.hexdigest()


def describe_settings(options: LoadOptions) -> dict[str, object]:
    """Return the settings that change the cost of evaluations."""
    context = options.context
    # 0 is written as the number it stands for: both spellings cost the same and share a plan.
    threads = context.n_threads or available_cores()
    return {
        "threads": threads,
        "batch threads": context.n_threads_batch or threads,
        "flash attention": context.flash_attention,
        "key cache": context.cache_type_k,
        "value cache": context.cache_type_v,
        "GPU layers": options.n_gpu_layers,
        "GPU layers of the draft model": options.n_gpu_layers_draft,
        **_where(context, current_placement()),
    }


def _where(context: ContextOptions, placement: Placement) -> dict[str, object]:
    """Return the given settings of devices, nothing if there are none."""
    unusual: dict[str, object] = {} if context.offload_kv else {"keys and values": "not offloaded"}
    if placement == Placement():
        return unusual
    return {**unusual, "devices": _as_json(dataclasses.asdict(placement))}


def _as_json(value: Mapping[str, object]) -> Any:  # noqa: ANN401 - whatever JSON gives back
    """Return a value as JSON gives it back, so that equal ones compare equal."""
    return json.loads(json.dumps(value))


def decoded(value: object, kind: type[_Part]) -> _Part:
    """Return a value of a kept file as a dataclass; raises ValueError if it is none."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None


def write_json(path: Path, content: Mapping[str, Any]) -> Path:
    """Write a file of the cache, over an earlier one; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path, force=True) as aside:
        aside.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return path


def _older_file(folder: str, *paths: Path) -> Path:
    """Return where earlier versions kept a curve or a plan: a file each, named by places."""
    places = "\n".join(str(path.expanduser().resolve()) for path in paths)
    key = hashlib.sha256(places.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return cache_folder() / folder / f"{'+'.join(path.stem[:40] for path in paths)}-{key}.json"


def _warn_of_older(path: Path, *, what: str, warn: Warn | None = None) -> None:
    """Warn that a file of an earlier version is left out, if there is one."""

    def refuse(_: bytes) -> None:
        raise NotForThisError(f"{path} was {_ANOTHER_VERSION}")

    read_kept(path, refuse, what=what, advice=_TUNE, warn=warn)


# == Cost curves ===================================================================================


def known_curve(target: Path, context: ContextOptions, n_gpu_layers: int) -> CostCurve:
    """Return the curve measured for this target, machine and settings, or else a typical one."""
    return load_curve(target, context, n_gpu_layers) or typical_curve(n_gpu_layers)


def save_curve(curve: CostCurve, target: Path, context: ContextOptions, n_gpu_layers: int) -> Path:
    """Store a measured curve over an earlier one of these settings; return the profile's file."""
    settings = _target_settings(context, n_gpu_layers)
    part = {"settings": settings, **curve.to_dict(), "is_first": curve.is_first}
    return _write(target, lambda kept: {"curves": _with(kept, "curves", part, "settings")})


def load_curve(target: Path, context: ContextOptions, n_gpu_layers: int) -> CostCurve | None:
    """Return the curve measured for this target, machine and settings; None without one.

    A file that is damaged is left out, with a warning in the log.
    """
    settings, what = _target_settings(context, n_gpu_layers), f"the cost curve of {target.name}"

    def parse(content: Mapping[str, Any]) -> CostCurve | None:
        for part in list_in(content.get("curves", [])):
            if not _mismatch(content, target, part["settings"], settings):
                return _curve(part)
        return None

    curve = _read(target, parse, what=what, advice="specrun tune measures a new one")
    if curve is None:
        _warn_of_older(_older_file("curves", target), what=what)
    return curve


def _target_settings(context: ContextOptions, n_gpu_layers: int) -> Any:  # noqa: ANN401
    settings = describe_settings(LoadOptions(context, n_gpu_layers=n_gpu_layers))
    # A target's curve holds whatever drafts for it.
    del settings["GPU layers of the draft model"]
    return _as_json(settings)


def _curve(part: Mapping[str, Any]) -> CostCurve:
    curve = decoded(part, CostCurve)
    times = (*curve.reused, *curve.rebuilt)
    if curve.sizes[-1] > _WIDEST or not all(_SHORTEST <= s <= _LONGEST for s in times):
        raise ValueError("no evaluation is so wide, or takes so long")
    return curve


# == Plans of `specrun tune` =======================================================================


@dataclass(frozen=True, slots=True)
class StoredPlan:
    """The fastest way to draft at one temperature ("": plain decoding). Speeds in tokens a second.

    `alternatives` are the options of the best chain and trees of every proposal scheme, itself
    among them. `width` is that of the fixed shape which was found to be no slower, None: there was
    none. `acceptance` has the shares of ranks by proposal scheme.
    """

    temperature: Number
    options: str
    alternatives: tuple[str, ...]
    predicted: Number
    measured: Number | None
    plain: Number | None
    width: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    acceptance: Mapping[str, tuple[Number, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for options in (self.options, *self.alternatives):
            options_of(parse_expression(_expression(Path("draft.gguf"), options)))
        if any(sum(shares) > 1.0 + _ROUNDING for shares in self.acceptance.values()):
            raise ValueError("the shares of ranks have a sum of at most 1")

    def expression(self, draft: Path) -> str:
        """Return the drafter expression for a draft model file."""
        return _expression(draft, self.options)

    def every_expression(self, draft: Path) -> list[str]:
        """Return the expressions of all alternatives."""
        return [_expression(draft, options) for options in self.alternatives]


def _expression(draft: Path, options: str) -> str:
    return f"draft({quoted(str(draft))}, {options})" if options else "none"


def save_plans(
    target: Path, draft: Path, settings: Mapping[str, object], plans: Sequence[StoredPlan]
) -> Path:
    """Store the plan, over earlier plans of the pair; return the profile's file."""
    part = {
        "draft": describe_file(draft),
        "path": _place(draft),
        "settings": settings,
        "plans": [asdict(plan) for plan in plans],
    }
    return _write(target, lambda kept: {"plans": _with(kept, "plans", part, "draft", "settings")})


def _place(path: Path) -> str:
    return str(path.expanduser().resolve())


def load_plans(
    target: Path,
    draft: Path,
    settings: Mapping[str, object],
    *,
    warn: Warn = lambda _: None,
) -> list[StoredPlan]:
    """Return the plans of a pair; none, and a warning, if they were made for something else."""

    def parse(content: Mapping[str, Any]) -> list[StoredPlan] | None:
        own = _plans_of(content, draft)
        if not own:
            return None
        reasons = [_mismatch(content, target, part["settings"], settings) for part in own]
        if all(reasons):
            raise NotForThisError(reasons[0])
        return decoded(own[reasons.index("")]["plans"], list[StoredPlan])

    told: list[str] = []
    found = _read(target, parse, what=_PAIR, advice=_TUNE, warn=told.append)
    if found is None and not told:
        _warn_of_older(_older_file("plans", target, draft), what=_PAIR, warn=told.append)
    for sentence in told:
        warn(sentence)
    return found or []


def _plans_of(content: Mapping[str, Any], draft: Path) -> list[Mapping[str, Any]]:
    """Return the plans for a draft model; raises for another file in its place."""
    parts = list_in(content.get("plans", []))
    described = describe_file(draft)
    own = [part for part in parts if part["draft"] == described]
    if not own and any(part["path"] == _place(draft) for part in parts):
        problem = f"{draft.name} is another file than the one it was measured with"
        raise NotForThisError(problem)
    return own


def tuned_plan(
    target: Path,
    draft: Path,
    params: SamplingParams,
    options: LoadOptions,
    warn: Warn = lambda _: None,
) -> StoredPlan | None:
    """Return the plan for this pair near this temperature, or None.

    A plan that does not apply is ignored; `warn` receives the reason in one sentence. Nothing here
    raises.
    """
    plans = load_plans(target, draft, describe_settings(options), warn=warn)
    # Acceptance moves with the temperature, and with it the best tree: the nearest plan stands in.
    return min(plans, key=lambda plan: abs(plan.temperature - params.temperature), default=None)


def measured_acceptance(target: Path, draft: Path, sampling: str) -> tuple[float, ...] | None:
    """Return the acceptance by rank measured for a pair and a proposal scheme, None if it was not.

    It depends on the models alone, so that a plan of another machine will do. Of several
    temperatures the highest is taken, if the scheme draws, and the lowest, if it takes the
    most likely tokens. A file that is damaged is left out, with a warning in the log.
    """

    def parse(content: Mapping[str, Any]) -> tuple[float, ...] | None:
        described = describe_file(draft)
        known = [
            plan
            for part in list_in(content.get("plans", []))
            if part["draft"] == described and content["target"] == describe_file(target)
            for plan in decoded(part["plans"], list[StoredPlan])
            if plan.acceptance.get(sampling)
        ]
        nearest = min if sampling == "argmax" else max
        found = nearest(known, key=lambda plan: plan.temperature, default=None)
        return None if found is None else found.acceptance[sampling]

    if not draft.is_file():  # left to the caller that opens it
        return None
    return _read(target, parse, what=_PAIR, advice=_TUNE)


# == Choices of `specrun accelerate` ===============================================================


ANY = "any"
"""The workload of a choice for texts of all kinds."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The drafter for a temperature and a workload, with its speed over plain decoding's.

    `drafter` "none" is plain decoding, for which `reason` is the cause. The speed-up was
    between `low` and `high` in all repetitions; 0 each if that is not known.
    """

    temperature: Number
    workload: str
    drafter: str
    speed_up: Number
    reason: str = ""
    low: Number = 0.0
    high: Number = 0.0

    def __post_init__(self) -> None:
        options_of(parse_expression(self.drafter))  # raises if it is none

    @property
    def extent(self) -> str:
        """The range of the speed-up in words, behind it."""
        return f" ({self.low:.1f} to {self.high:.1f})" if self.high else ""


@dataclass(frozen=True, slots=True)
class Profile:
    """Choices for a model file, and all that they were made from.

    `files` are those of the drafters that the choices name, as `describe_file` describes them;
    `accelerate` continues from `record`; `measured` the day. `finished` is whether everything was
    tried.
    """

    settings: Mapping[str, object]
    choices: tuple[Choice, ...]
    files: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    measured: str = ""
    finished: bool = False
    record: Mapping[str, Any] = field(default_factory=dict)

    def choice(self, temperature: float, workload: str = ANY) -> Choice | None:
        """Return the choice for a workload nearest to a temperature; None without any.

        A workload that was not measured is as any other text.
        """
        own = [choice for choice in self.choices if choice.workload == workload]
        own = own or [choice for choice in self.choices if choice.workload == ANY]
        # Acceptance moves with the temperature, and so does the best drafter: the nearest one
        # stands in.
        return min(own, key=lambda choice: abs(choice.temperature - temperature), default=None)


def save_profile(profile: Profile, target: Path) -> Path:
    """Store choices over earlier ones of the file; return where."""
    return _write(target, lambda _: asdict(profile))


def load_profile(
    target: Path, settings: Mapping[str, object], *, warn: Warn = lambda _: None
) -> Profile | None:
    """Return the choices for a model file; None without any, or with a warning if not for these.

    Nothing here raises, so that no chat depends on a file in a cache.
    """

    def parse(content: Mapping[str, Any]) -> Profile | None:
        if "choices" not in content and "settings" not in content:
            return None  # curves or plans alone
        reason = _mismatch(content, target, content.get("settings"), settings)
        if not reason:
            files = content.get("files")
            reason = _changed(files) if isinstance(files, dict) else "its files are missing"
        if reason:
            raise NotForThisError(reason)
        return decoded(content, Profile)

    return _read(target, parse, what=f"the profile of {target.name}", advice=_ACCELERATE, warn=warn)


def _changed(files: Mapping[str, object]) -> str:
    """Return which of these files is not as it was, in words; "" if all are."""
    for name, described in files.items():
        path = Path(name)
        if not path.is_file():
            return f"it drafts with {name}, which is not there"
        if describe_file(path) != described:
            return f"{name} is another file than the one it was measured with"
    return ""
