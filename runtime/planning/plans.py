"""Stored plans and cost curves of this machine, and the options and results of `specrun tune`."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import FileMissingError, OptionError
from specrun.bindings.files import (
    NotForThisError,
    atomic_path,
    cache_folder,
    count_in,
    json_object,
    list_in,
    number_in,
    read_kept,
    text_in,
)
from specrun.bindings.machine.devices import describe_machine
from specrun.bindings.machine.placement import Placement, current_placement
from specrun.bindings.quantizer.quantizer import FILE_TYPES
from specrun.bindings.threads import available_cores
from specrun.runtime.language import options_of, parse_expression, quoted
from specrun.runtime.laws.sampling import SamplingParams
from specrun.runtime.memory.fit import LayerCount
from specrun.runtime.planning.curves import CostCurve
from specrun.runtime.planning.theory import ChainTheory, expected_tokens

# == Options and results of `specrun tune` =========================================================


_NO_SLOWER = 0.99  # a hundredth is within what the same shape varies by

PlanKind = Literal["plain", "chain", "tree", "dynamic"]
"""What a plan drafts: nothing, a chain, a fixed tree, or one that grows where it is sure."""


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """What to measure, and how models are loaded.

    Each of `params` is planned for on its own; `n_tokens` are written for each, over all prompts
    together. `seconds` are spent on cost curves, `max_depth` is the deepest tree that is planned.
    Alpha is also measured of the drafters `others`, expressions with their files.
    """

    target: Path
    draft: Path
    params: tuple[SamplingParams, ...]
    n_tokens: int = 128
    seconds: float = 12.0
    max_depth: int = 10
    context: ContextOptions = field(default_factory=ContextOptions)
    n_gpu_layers: LayerCount = "auto"
    n_gpu_layers_draft: LayerCount = "auto"
    use_mmap: bool = True
    others: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.params:
            raise OptionError("no sampling settings are given to plan for")
        if self.n_tokens < 8:
            problem = f"{self.n_tokens} tokens say too little about acceptance"
            raise OptionError(f"{problem}: give 8 or more")
        if not 1 <= self.max_depth <= 16:
            raise OptionError(f"the deepest tree is {self.max_depth}: plans are made for 1 to 16")
        if not self.seconds > 0.0:
            raise OptionError(f"{self.seconds} seconds are no time to measure in: give more than 0")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to draft, with what is expected of it; `measured` tokens a second where it was run.

    `options` is the inside of the drafter expression after the file, "" for plain decoding.
    """

    options: str
    kind: PlanKind
    sampling: str
    n_nodes: int
    depth: int
    expected_tokens: float
    predicted: float
    measured: float | None = None
    mean_accepted_length: float | None = None

    @property
    def speed(self) -> float:
        """The measured tokens a second, or else the predicted ones."""
        return self.predicted if self.measured is None else self.measured


@dataclass(frozen=True, slots=True)
class ShapeTrial:
    """The fastest plan in evaluations of one `width` beside such of any; tokens a second, medians.

    `left_out` says why it was not tried, and is empty where it was.
    """

    width: int = 0
    free: float = 0.0
    fixed: float = 0.0
    left_out: str = ""

    @property
    def chosen(self) -> bool:
        """Whether the fixed shape is no slower, so that it becomes the plan's."""
        return not self.left_out and self.fixed >= _NO_SLOWER * self.free


@dataclass(frozen=True, slots=True)
class DrafterAlpha:
    """A drafter's law beside the target's, and what Leviathan et al. (2023) say of its chains.

    `theory` has alpha, the mean of sum min(p, q) (`acceptance`), and c (`cost_ratio`), both
    measured. `operation_ratio` is c-hat, the drafter's operations for a token over the target's;
    `bytes` what a round of `theory.length` drafts reads for a token, over plain decoding's.
    """

    drafter: str
    operation_ratio: float
    bytes: float
    theory: ChainTheory

    @property
    def alpha(self) -> float:
        """The mean over positions of sum min(p, q)."""
        return self.theory.acceptance


@dataclass(frozen=True, slots=True)
class TunedSetting:
    """What was found for one sampling setting: first the candidates that ran, fastest first.

    `acceptance` holds for each proposal scheme the share of positions at which the child of each
    rank is accepted, `theory` what the formulas say about chains whose acceptance is that of the
    best scheme's first rank, `shape` what a fixed shape costs the fastest. `alphas` are those of
    drafters that have a law, the draft model first.
    """

    params: SamplingParams
    acceptance: dict[str, tuple[float, ...]]
    theory: ChainTheory
    candidates: tuple[Candidate, ...]
    shape: ShapeTrial = ShapeTrial(left_out="nothing is drafted")
    alphas: tuple[DrafterAlpha, ...] = ()

    @property
    def best(self) -> Candidate:
        """The fastest of those that were run; plain decoding always was."""
        return self.candidates[0]

    @property
    def plain(self) -> Candidate:
        """Plain decoding."""
        return next(candidate for candidate in self.candidates if not candidate.options)

    def to_dict(self) -> dict[str, Any]:
        """Return the setting as a mapping, ready for JSON."""
        names = ("temperature", "top_k", "top_p", "min_p")
        return {
            **{name: getattr(self.params, name) for name in names},
            "acceptance_by_rank": self.acceptance,
            "theory": dataclasses.asdict(self.theory),
            "alpha": [{"alpha": row.alpha, **dataclasses.asdict(row)} for row in self.alphas],
            "plans": [dataclasses.asdict(candidate) for candidate in self.candidates],
            "best": self.best.options or "none",
            "shape": {**dataclasses.asdict(self.shape), "chosen": self.shape.chosen},
        }


@dataclass(frozen=True, slots=True)
class TuneResult:
    """Everything that was measured, and the `seconds` it took."""

    target: CostCurve
    draft: CostCurve
    settings: tuple[TunedSetting, ...]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return everything as a mapping, ready for JSON."""
        return {
            "target": dataclasses.asdict(self.target),
            "draft": dataclasses.asdict(self.draft),
            "settings": [setting.to_dict() for setting in self.settings],
            "seconds": self.seconds,
        }


# == Plans of `specrun tune` =======================================================================
#
# A plan belongs to a machine, a pair of model files (by size and content, wherever they lie) and
# the settings that change what evaluations cost. Where one of them differs the plan is ignored,
# with a warning that says which.


_FORMAT = 2
_HASHED = 1 << 20  # bytes at the beginning and at the end: header, first and last tensors
_ROUNDING = 1e-6
_WHAT, _AGAIN = "the stored plan for this pair", "run specrun tune again"


@dataclass(frozen=True, slots=True)
class StoredPlan:
    """The fastest way to draft at one temperature ("": plain decoding). Speeds in tokens a second.

    `alternatives` are the options of the best chain and trees of every proposal scheme, itself
    among them. `width` is that of the fixed shape which was found to be no slower, None: there was
    none.
    """

    temperature: float
    options: str
    alternatives: tuple[str, ...]
    predicted: float
    measured: float | None
    plain: float | None
    width: int | None = None

    def expression(self, draft: Path) -> str:
        """Return the drafter expression for a draft model file."""
        return _expression(draft, self.options)

    def every_expression(self, draft: Path) -> list[str]:
        """Return the expressions of all alternatives."""
        return [_expression(draft, options) for options in self.alternatives]


def _expression(draft: Path, options: str) -> str:
    return f"draft({quoted(str(draft))}, {options})" if options else "none"


def tuned_plan(
    target: Path,
    draft: Path,
    params: SamplingParams,
    *,
    context: ContextOptions,
    n_gpu_layers: LayerCount = "auto",
    n_gpu_layers_draft: LayerCount = "auto",
    warn: Callable[[str], None] = lambda _: None,
) -> StoredPlan | None:
    """Return what was planned for this pair near this temperature, or None.

    A plan that does not apply is ignored; `warn` is told why in one sentence. Nothing here raises.
    """
    settings = describe_settings(context, n_gpu_layers, n_gpu_layers_draft)
    plans = load_plans(target, draft, settings, warn=warn)
    if not plans:
        return None
    # Acceptance moves with the temperature, and with it the best tree: the nearest plan stands in.
    return min(plans, key=lambda plan: abs(plan.temperature - params.temperature))


def measured_acceptance(target: Path, draft: Path, sampling: str) -> tuple[float, ...] | None:
    """Return the acceptance by rank measured for a pair and a proposal scheme, None if it was not.

    It hangs on the models alone, so that a plan of another machine will do. Of several temperatures
    the highest is taken, where the scheme draws, and the lowest, where it takes the most likely
    tokens. A file that is damaged is left out, with a warning in the log.
    """
    try:
        files = {name: describe_file(path) for name, path in (("target", target), ("draft", draft))}
    except (OSError, FileMissingError):  # left to whoever opens them
        return None
    return read_kept(
        plan_file(target, draft),
        lambda data: _acceptance(json_object(data), files, sampling),
        what=_WHAT,
        advice=_AGAIN,
    )


def _acceptance(
    content: Mapping[str, Any], files: Mapping[str, object], sampling: str
) -> tuple[float, ...] | None:
    """Return the acceptance that a plan holds, None if it is of other files or was not measured."""
    if any(content[name] != described for name, described in files.items()):
        return None
    known = [
        (number_in(plan["temperature"]), _shares(plan["acceptance"][sampling]))
        for plan in list_in(content["plans"])
        if plan["acceptance"].get(sampling)
    ]
    nearest = min if sampling == "argmax" else max
    return nearest(known, key=lambda each: each[0])[1] if known else None


def _shares(values: object) -> tuple[float, ...]:
    shares = tuple(number_in(share, 0.0, 1.0) for share in list_in(values))
    if not shares or sum(shares) > 1.0 + _ROUNDING:
        raise ValueError("the shares of ranks have a sum of at most 1")
    return shares


def save_plans(options: TuneOptions, result: TuneResult) -> Path:
    """Store what was found, over an earlier plan of the pair; return the file."""
    layers = options.n_gpu_layers, options.n_gpu_layers_draft
    content = {
        "format": _FORMAT,
        "machine": describe_machine(),
        "target": describe_file(options.target),
        "draft": describe_file(options.draft),
        "settings": describe_settings(options.context, *layers),
        "plans": [_to_json(setting) for setting in result.settings],
    }
    return write_json(plan_file(options.target, options.draft), content)


def _to_json(setting: TunedSetting) -> dict[str, Any]:
    best = setting.best
    return {
        "temperature": setting.params.temperature,
        "options": best.options,
        "alternatives": [plan.options for plan in setting.candidates if plan.options],
        "predicted": best.predicted,
        "measured": best.measured,
        "plain": setting.plain.measured,
        "width": setting.shape.width if setting.shape.chosen else None,
        "acceptance": setting.acceptance,
    }


def load_plans(
    target: Path,
    draft: Path,
    settings: Mapping[str, object],
    *,
    warn: Callable[[str], None] = lambda _: None,
) -> list[StoredPlan]:
    """Return the plans of a pair; none, and a warning, where they were made for something else."""

    def parse(data: bytes) -> list[StoredPlan]:
        content = json_object(data)
        reason = _mismatch(content, target, draft, settings)
        if reason:
            raise NotForThisError(reason)
        return [_plan(plan) for plan in list_in(content["plans"])]

    path = plan_file(target, draft)
    return read_kept(path, parse, what=_WHAT, advice=_AGAIN, warn=warn) or []


def plan_file(target: Path, draft: Path) -> Path:
    """Return where the plan of two model files is kept; their places name it."""
    return cache_file("plans", target, draft)


def cache_file(folder: str, *paths: Path) -> Path:
    """Return where something about these files is kept; names and places of them all name it."""
    # Resolved, so that a file has one name whatever way leads to it.
    places = "\n".join(str(path.expanduser().resolve()) for path in paths)
    key = hashlib.sha256(places.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return cache_folder() / folder / f"{'+'.join(path.stem[:40] for path in paths)}-{key}.json"


def describe_file(path: Path) -> dict[str, object]:
    """Return what tells a model file from another; its place is not part of it."""
    if not path.is_file():
        raise FileMissingError(f"there is no file {path}")
    size = path.stat().st_size
    # Ends and size: a hash over gigabytes of weights would delay every start.
    digest = hashlib.sha256()
    with path.open("rb") as file:
        digest.update(file.read(_HASHED))
        file.seek(max(0, size - _HASHED))
        digest.update(file.read(_HASHED))
    return {"size": size, "sha256_of_ends": digest.hexdigest()}


def describe_settings(
    context: ContextOptions, n_gpu_layers: LayerCount, n_gpu_layers_draft: LayerCount
) -> dict[str, object]:
    """Return the settings that change what evaluations cost."""
    # 0 is written as the number it stands for: both spellings cost the same and share a plan.
    threads = context.n_threads or available_cores()
    return {
        "threads": threads,
        "batch threads": context.n_threads_batch or threads,
        "flash attention": context.flash_attention,
        "key cache": context.cache_type_k,
        "value cache": context.cache_type_v,
        "GPU layers": n_gpu_layers,
        "GPU layers of the draft model": n_gpu_layers_draft,
        **_where(context, current_placement()),
    }


def _where(context: ContextOptions, placement: Placement) -> dict[str, object]:
    """Return what was said about devices, nothing where that is nothing."""
    unusual: dict[str, object] = {} if context.offload_kv else {"keys and values": "not offloaded"}
    if placement == Placement():
        return unusual
    # As JSON gives it back.
    return {**unusual, "devices": json.loads(json.dumps(dataclasses.asdict(placement)))}


def _mismatch(
    content: Mapping[str, Any], target: Path, draft: Path, settings: Mapping[str, object]
) -> str:
    """Return why a plan does not apply, "" if it does."""
    # First, because nothing else of another version's file can be relied on.
    if content.get("format") != _FORMAT:
        return "it was written by another version of specrun"
    if content.get("machine") != describe_machine():
        return "it was measured on another machine"
    for name, path in (("target", target), ("draft", draft)):
        if content.get(name) != describe_file(path):
            return f"{path.name} is another file than the one it was measured with"
    stored = content.get("settings")
    if not isinstance(stored, dict):
        return "its settings are missing"
    for key, value in settings.items():
        if stored.get(key) != value:
            return f"it was measured with {key} {stored.get(key)}, not {value}"
    return ""


def write_json(path: Path, content: Mapping[str, Any]) -> Path:
    """Write a file of the cache, over an earlier one; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path, force=True) as aside:
        aside.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return path


def _plan(value: Mapping[str, Any]) -> StoredPlan:
    speeds = {key: value[key] for key in ("measured", "plain")}
    optional = {key: None if speed is None else number_in(speed) for key, speed in speeds.items()}
    # Plans from before there were fixed shapes have none.
    width = value.get("width")
    return StoredPlan(
        number_in(value["temperature"]),
        _options(value["options"]),
        tuple(map(_options, list_in(value["alternatives"]))),
        number_in(value["predicted"]),
        **optional,
        width=None if width is None else count_in(width, 1),
    )


def _options(value: object) -> str:
    """Return the options of a draft model's expression; raises for what are none."""
    options = text_in(value)
    options_of(parse_expression(_expression(Path("draft.gguf"), options)))
    return options


# == Cost curves of targets: measured on this machine, or else typical ones ========================
#
# A curve belongs to a machine, a model file and the settings that change what evaluations cost;
# where one of them differs it is not used.


_CURVE_FORMAT = 2  # 1: medians, which pauses of the machine could fool
_SHORTEST, _LONGEST = 1e-9, 1e6  # seconds of an evaluation that can be true

# Relative to one token. CPU: a 400M F16 Llama on two AVX-512 cores; quantized models are steeper
# still. GPU: what a memory-bound 7B shows on current cards, which pay little for rows until the
# matrix kernels change.
_SIZES = (1, 2, 4, 6, 8, 16, 32, 64)
_CPU_TIMES = (1.0, 1.37, 1.64, 1.85, 2.65, 3.3, 5.8, 10.8)
_GPU_TIMES = (1.0, 1.06, 1.1, 1.14, 1.18, 1.3, 1.45, 1.8)
TYPICAL_CPU = CostCurve(_SIZES, _CPU_TIMES, _CPU_TIMES)
TYPICAL_GPU = CostCurve(_SIZES, _GPU_TIMES, _GPU_TIMES)


def typical_curve(n_gpu_layers: int) -> CostCurve:
    """Return a curve, relative to one token, for `n_gpu_layers` (-1: all) of a target on a GPU."""
    return TYPICAL_GPU if n_gpu_layers != 0 else TYPICAL_CPU


def known_curve(target: Path, context: ContextOptions, n_gpu_layers: int) -> CostCurve:
    """Return the curve measured for this target, machine and settings, or else a typical one."""
    return measured_or_typical(target, context, n_gpu_layers)[0]


def measured_or_typical(
    target: Path, context: ContextOptions, n_gpu_layers: int
) -> tuple[CostCurve, bool]:
    """Return a curve for a file and these settings, and whether it was measured, not typical."""
    measured = load_curve(target, context, n_gpu_layers)
    return measured or typical_curve(n_gpu_layers), measured is not None


def save_curve(curve: CostCurve, target: Path, context: ContextOptions, n_gpu_layers: int) -> Path:
    """Store a measured curve over an earlier one of this target; return the file."""
    content = _circumstances(target, context, n_gpu_layers)
    content |= {"sizes": curve.sizes, "reused": curve.reused, "rebuilt": curve.rebuilt}
    content |= {"spread": curve.spread}
    return write_json(cache_file("curves", target), content)


def load_curve(target: Path, context: ContextOptions, n_gpu_layers: int) -> CostCurve | None:
    """Return the curve measured for this target, machine and settings; None without one.

    A file that is damaged is left out, with a warning in the log.
    """
    try:
        wanted = _circumstances(target, context, n_gpu_layers)
    except (OSError, FileMissingError):  # left to whoever opens it
        return None
    # Through JSON and back, so that equal circumstances compare equal (tuples become lists).
    as_stored = json.loads(json.dumps(wanted))
    return read_kept(
        cache_file("curves", target),
        lambda data: _curve(json_object(data), as_stored),
        what=f"the cost curve of {target.name}",
        advice="specrun tune measures a new one",
    )


def _curve(content: Mapping[str, Any], wanted: Mapping[str, Any]) -> CostCurve | None:
    """Return a stored curve, None for one of other circumstances."""
    if any(content[name] != value for name, value in wanted.items()):
        return None
    sizes = tuple(count_in(size, 1) for size in list_in(content["sizes"]))
    reused, rebuilt = (_times(content[name]) for name in ("reused", "rebuilt"))
    return CostCurve(sizes, reused, rebuilt, tuple(map(number_in, list_in(content["spread"]))))


def _times(values: object) -> tuple[float, ...]:
    return tuple(number_in(seconds, _SHORTEST, _LONGEST) for seconds in list_in(values))


def _circumstances(target: Path, context: ContextOptions, n_gpu_layers: int) -> dict[str, Any]:
    settings = describe_settings(context, n_gpu_layers, 0)
    # A target's curve holds whatever drafts for it.
    del settings["GPU layers of the draft model"]
    return {
        "format": _CURVE_FORMAT,
        "machine": describe_machine(),
        "target": describe_file(target),
        "settings": settings,
    }


# == Weight types of one model on this machine: the gain by drafting, and the fastest ==============
#
# What drafts gain hangs on the steps of T(n), the time of n tokens, and these on the kernels of the
# weight type: where eight tokens take little more than one, most is gained. Compared are the curves
# that were measured here, of files that lie side by side and differ in the type that their names
# say.


ACCEPTED = 0.8
"""The share of drafted tokens that a comparison takes to be accepted."""

_MOST_DRAFTED = 10
_NAMES = "|".join(sorted(FILE_TYPES, key=len, reverse=True))
_TYPE = re.compile(rf"[-._](?:{_NAMES})(?![0-9A-Za-z_])", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class WeightType:
    """A file and its curve; None where it was not measured with these settings."""

    file: Path
    curve: CostCurve | None

    @property
    def plain(self) -> float:
        """Tokens a second without drafting, 0 where nothing is known."""
        return 1.0 / self.curve.seconds(1) if self.curve else 0.0

    @property
    def gain(self) -> float:
        """The speed-up of the best chain whose drafts cost nothing and are `ACCEPTED`."""
        if self.curve is None:
            return 0.0
        curve = self.curve.as_padded()
        chains = (
            expected_tokens(ACCEPTED, n) / curve.seconds(1 + n) for n in range(_MOST_DRAFTED + 1)
        )
        return curve.seconds(1) * max(chains)


def same_model(target: Path) -> list[Path]:
    """Return the files beside a target whose names differ from its own in the weight type alone."""
    bare = _TYPE.sub("", target.name)
    if bare == target.name:
        return []
    beside = sorted(target.parent.glob("*.gguf"))
    return [path for path in beside if path != target and _TYPE.sub("", path.name) == bare]


def weight_types(
    target: Path, curve: CostCurve, context: ContextOptions, n_gpu_layers: int
) -> list[WeightType]:
    """Return the target and its other weight types, the one that gains most first."""
    own = WeightType(target, curve)
    others = (
        WeightType(path, load_curve(path, context, n_gpu_layers)) for path in same_model(target)
    )
    return sorted([own, *others], key=lambda known: -known.gain)
