"""Inputs of the formulas, measured: alpha on the target's answers, c, and the bytes that are read.

alpha and c are those of drafts as they are made (`runtime/tuning/acceptance.py`), T(n) is measured
once for the target, operations and bytes are counted from the files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrun.bench.drafters.answers import prompt_ids
from specrun.bench.drafters.prompts import Prompt
from specrun.bindings.contexts import ContextOptions
from specrun.bindings.errors import OptionError
from specrun.runtime.engine import Runtime
from specrun.runtime.language import parse_expression, short_label
from specrun.runtime.laws import SamplingParams
from specrun.runtime.memory import LoadOptions
from specrun.runtime.planning import (
    TYPICAL_CPU,
    TYPICAL_GPU,
    ChainInputs,
    CostCurve,
    known_curve,
    measure_target_costs,
    memory_traffic,
)
from specrun.runtime.tuning import DrawnAlpha, drafting_shares, measure_alpha

Progress = Callable[[str, float], None]
_TYPICAL = {"cpu": TYPICAL_CPU, "gpu": TYPICAL_GPU}


@dataclass(frozen=True, slots=True)
class TheoryMeasurement:
    """Which drafters (expressions with their files) are measured, on whose answers.

    `params` are one setting a temperature. `curve` None measures T(n) in about `seconds`. `cached`
    tokens are read in addition to the weights, by target and formula. `options` are those of
    `Runtime`.
    """

    target: Path
    drafters: tuple[str, ...]
    prompts: tuple[Prompt, ...]
    params: tuple[SamplingParams, ...]
    options: Mapping[str, Any]
    max_tokens: int = 48
    seconds: float = 6.0
    cached: int = 512
    curve: CostCurve | None = None


@dataclass(frozen=True, slots=True)
class MeasuredChain:
    """A drafter at one temperature: its measures, and the inputs of the formulas."""

    drafter: str
    temperature: float
    found: DrawnAlpha
    inputs: ChainInputs


def measure_theory(
    measurement: TheoryMeasurement, progress: Progress = lambda _what, _share: None
) -> list[MeasuredChain]:
    """Return the measures, drafter by drafter; raises as `measure_alpha` and `Runtime`."""
    chains: list[MeasuredChain] = []
    curve, steps = measurement.curve, len(measurement.drafters) * len(measurement.params)
    for drafter in measurement.drafters:
        with Runtime(measurement.target, drafter, **measurement.options) as runtime:
            environment, most = runtime.environment, measurement.max_tokens
            target = memory_traffic(runtime.model, environment.context)
            prompts = [prompt_ids(runtime, prompt, None) for prompt in measurement.prompts]
            label = short_label(parse_expression(drafter))
            for params in measurement.params:
                share = len(chains) / steps
                progress(f"measuring alpha of {label}", share)
                found = measure_alpha(environment, drafter, prompts, params, max_tokens=most)
                if not found.n_places:
                    raise OptionError(f"{label} drafted nothing in these answers: give a larger -n")
                if curve is None:
                    progress("measuring T(n)", share)
                    layers = measurement.options.get("n_gpu_layers", "auto")
                    loading = LoadOptions(environment.context, n_gpu_layers=layers)
                    seconds = measurement.seconds
                    curve = measure_target_costs(measurement.target, loading, seconds=seconds)
                operations, read = drafting_shares(found, target, runtime.model)
                step, cached = found.step_seconds / curve.seconds(1), float(measurement.cached)
                traffic = (target, read)
                inputs = ChainInputs(found.alpha, step, operations, curve, traffic, cached)
                chains.append(MeasuredChain(label, params.temperature, found, inputs))
    return chains


def curve_of(text: str, target: Path, context: ContextOptions, n_gpu_layers: int) -> CostCurve:
    """Return the curve "known" (measured here, or typical), "cpu" or "gpu", or that of points.

    Points are "1:1,2:1.38,4:1.98": tokens of an evaluation, and its time in any unit.
    """
    if text == "known":
        return known_curve(target, context, n_gpu_layers)
    if text in _TYPICAL:
        return _TYPICAL[text]
    try:
        points = [part.split(":") for part in text.split(",")]
        sizes, times = zip(*((int(size), float(time)) for size, time in points), strict=True)
    except ValueError:
        raise OptionError(
            f"{text!r} is no cost curve: use known, cpu, gpu, or points such as 1:1,2:1.38,4:1.98"
        ) from None
    return CostCurve(sizes, times, times)
