"""Plans of `specrun tune`, kept in the user's cache directory and used where they still apply.

A plan belongs to a machine, a pair of model files (by size and content, wherever they lie) and the
settings that change what evaluations cost. Where one of them differs the plan is ignored, with a
warning that says which.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrun.bindings.atomic import atomic_path, cache_folder
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import FileMissingError
from specrun.bindings.kept_file import (
    NotForThisError,
    count_in,
    json_object,
    list_in,
    number_in,
    read_kept,
    text_in,
)
from specrun.bindings.machine.devices import describe_machine
from specrun.bindings.machine.placement import Placement, current_placement
from specrun.bindings.threads import available_cores
from specrun.runtime.costs.tune_result import TunedSetting, TuneOptions, TuneResult
from specrun.runtime.language import parse_expression, quoted
from specrun.runtime.methods import options_of
from specrun.runtime.offload import LayerCount
from specrun.runtime.sampling import SamplingParams

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
