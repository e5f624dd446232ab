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
from specrun.bindings.machine.devices import describe_machine
from specrun.bindings.machine.placement import Placement, current_placement
from specrun.bindings.threads import available_cores
from specrun.runtime.costs.tune_result import TunedSetting, TuneOptions, TuneResult
from specrun.runtime.language import quoted
from specrun.runtime.offload import LayerCount
from specrun.runtime.sampling import SamplingParams

_FORMAT = 2
_HASHED = 1 << 20  # bytes at the beginning and at the end: header, first and last tensors
_MAX_FILE = 1 << 20
_AGAIN = "run specrun tune again"


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
    try:
        plans = load_plans(target, draft, settings, warn=warn)
    except OSError as error:
        warn(f"the stored plan cannot be read ({error.strerror}); {_AGAIN}")
        return None
    if not plans:
        return None
    # Acceptance moves with the temperature, and with it the best tree: the nearest plan stands in.
    return min(plans, key=lambda plan: abs(plan.temperature - params.temperature))


def measured_acceptance(target: Path, draft: Path, sampling: str) -> tuple[float, ...] | None:
    """Return the acceptance by rank measured for a pair and a proposal scheme, None if it was not.

    It hangs on the models alone, so that a plan of another machine will do. Of several temperatures
    the highest is taken, where the scheme draws, and the lowest, where it takes the most likely
    tokens.
    """
    try:
        content = read_json(plan_file(target, draft)) or {}
        files = (("target", target), ("draft", draft))
        if any(content.get(name) != describe_file(path) for name, path in files):
            return None
        known = [plan for plan in content["plans"] if plan["acceptance"].get(sampling)]
        known.sort(key=lambda record: float(record["temperature"]), reverse=sampling != "argmax")
        return tuple(float(share) for share in known[0]["acceptance"][sampling]) if known else None
    except (OSError, FileMissingError, KeyError, TypeError, ValueError, AttributeError):
        return None


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
    path = plan_file(target, draft)
    if not path.is_file():
        return []
    content = read_json(path)
    reason = "" if content is None else _mismatch(content, target, draft, settings)
    if reason:
        warn(f"the stored plan for this pair was ignored: {reason}; {_AGAIN}")
        return []
    try:
        if content is not None:
            return [_plan(plan) for plan in content["plans"]]
    except (KeyError, TypeError, ValueError):
        pass
    warn(f"the stored plan {path} is damaged and was ignored; {_AGAIN}")
    return []


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


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the content of a file of the cache, None if it is damaged; OSError if not there."""
    with path.open("rb") as file:
        # One byte more than allowed tells a file that is too large without reading it all.
        data = file.read(_MAX_FILE + 1)
    try:
        content = json.loads(data.decode("utf-8")) if len(data) <= _MAX_FILE else None
    # RecursionError: JSON nested deeper than the parser can follow.
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _plan(value: Mapping[str, Any]) -> StoredPlan:
    speeds = {key: value[key] for key in ("measured", "plain")}
    optional = {key: None if speed is None else float(speed) for key, speed in speeds.items()}
    if not isinstance(value["options"], str):
        raise TypeError("options must be a text")
    alternatives = value["alternatives"]
    if not isinstance(alternatives, list) or not all(
        isinstance(text, str) for text in alternatives
    ):
        raise TypeError("alternatives must be a list of texts")
    # Plans from before there were fixed shapes have none.
    width = value.get("width")
    if width is not None and (isinstance(width, bool) or not isinstance(width, int)):
        raise TypeError("width must be a whole number or null")
    temperature, predicted = float(value["temperature"]), float(value["predicted"])
    return StoredPlan(
        temperature,
        value["options"],
        tuple(alternatives),
        predicted,
        **optional,
        width=width,
    )
