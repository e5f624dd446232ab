"""Options and results of `specrun tune`: plans for a draft model, and weight types compared."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import OptionError
from specrun.bindings.quantizer.quantizer import FILE_TYPES
from specrun.runtime.laws.sampling import SamplingParams
from specrun.runtime.memory.fit import LoadOptions
from specrun.runtime.planning import (
    ChainTheory,
    CostCurve,
    StoredPlan,
    describe_settings,
    expected_tokens,
    load_curve,
    save_plans,
)

_NO_SLOWER = 0.99  # a hundredth is within the variation of a shape

PlanKind = Literal["plain", "chain", "tree", "dynamic"]
"""The drafts of a plan: nothing, a chain, a fixed tree, or one that grows where it is sure."""


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """The settings of a measurement, and of loading models.

    Each of `params` is planned for on its own; `n_tokens` are written for each, over all prompts
    together. `seconds` are spent on cost curves.
    Alpha is also measured of the drafters `others`, expressions with their files.
    """

    target: Path
    draft: Path
    params: tuple[SamplingParams, ...]
    n_tokens: int = 128
    seconds: float = 12.0
    loading: LoadOptions = field(default_factory=LoadOptions)
    others: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.params:
            raise OptionError("no sampling settings are given to plan for")
        if self.n_tokens < 8:
            problem = f"{self.n_tokens} tokens are too few to measure acceptance"
            raise OptionError(f"{problem}: give 8 or more")
        if not self.seconds > 0.0:
            raise OptionError(f"{self.seconds} seconds are no time to measure in: give more than 0")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to draft, with its expected yield; `measured` tokens a second if it was run.

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

    `left_out` is the reason why it was not tried, and is empty if it was.
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
    """A drafter's distribution beside the target's, with the theory of Leviathan et al. (2023).

    `theory` has alpha, the mean of sum min(p, q) (`acceptance`), and c (`cost_ratio`), both
    measured. `operation_ratio` is c-hat, the drafter's operations for a token over the target's;
    `bytes` those that a round of `theory.length` drafts reads for a token, over plain decoding's.
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
    """The results for one sampling setting: first the candidates that ran, fastest first.

    `acceptance` holds for each proposal scheme the share of positions at which the child of each
    rank is accepted, `theory` the formulas' results for chains whose acceptance is that of the best
    scheme's first rank, `shape` the cost of a fixed shape for the fastest. `alphas` are those of
    drafters that have a distribution, the draft model first.
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

    @property
    def to_store(self) -> StoredPlan:
        """The plan that is kept."""
        best = self.best
        return StoredPlan(
            self.params.temperature,
            best.options,
            tuple(plan.options for plan in self.candidates if plan.options),
            best.predicted,
            best.measured,
            self.plain.measured,
            self.shape.width if self.shape.chosen else None,
            self.acceptance,
        )

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
            "target_costs": self.target.to_dict(),
            "draft_costs": self.draft.to_dict(),
            "settings": [setting.to_dict() for setting in self.settings],
            "seconds": self.seconds,
        }


def keep_plans(options: TuneOptions, result: TuneResult) -> Path:
    """Store the results in the target's profile; return its file."""
    settings = describe_settings(options.loading)
    plans = [setting.to_store for setting in result.settings]
    return save_plans(options.target, options.draft, settings, plans)


# == Weight types of one model on this machine: the gain by drafting, and the fastest ==============
#
# The gain of drafts depends on the steps of T(n), the time of n tokens, and these on the kernels of
# the weight type: if eight tokens take little more than one, most is gained. Curves measured here
# are compared, of files that lie side by side and differ in the type that their names give.


ACCEPTED = 0.8
"""The share of drafted tokens that a comparison takes to be accepted."""

_MOST_DRAFTED = 10
_NAMES = "|".join(sorted(FILE_TYPES, key=len, reverse=True))
_TYPE = re.compile(rf"[-._](?:{_NAMES})(?![0-9A-Za-z_])", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class WeightType:
    """A file and its curve; None if it was not measured with these settings."""

    file: Path
    curve: CostCurve | None

    @property
    def plain(self) -> float:
        """Tokens a second without drafting, 0 if nothing is known."""
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
