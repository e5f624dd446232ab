"""Layer skipping by Bayesian optimisation: the layers of a self-draft with most tokens a second.

Draft & Verify (Zhang et al. 2023, section 3.3) does so with runs of the whole method; here each set
of layers is judged by what decides a run's speed. The target writes a text once; a cut model's laws
on that text give the share of its tokens that would be accepted; the target's measured cost curve
and the cut's cost, a line in its number of layers, give the tokens a second of the best draft
length (`layer_judge`). Sets are proposed by a tree-structured Parzen estimator (Bergstra et al.
2011; optuna), after a few of the shapes that the literature found good.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specrun.bench.layers.layer_judge import CutJudge, LayerTrial, prepare_judge
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import MissingPackageError, OptionError
from specrun.bindings.models.model import Model
from specrun.convert.cut import LayeredModel
from specrun.runtime.laws import SamplingParams
from specrun.runtime.memory import LayerCount

_PATIENCE = 20  # proposals for each evaluation: in small models most have been judged already

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class LayerSearchOptions:
    """At most `evaluations` sets of layers are judged, on `n_tokens` that the target writes.

    `seconds` are spent on cost curves, `max_draft` is the longest draft considered; `seed` fixes
    the proposals. After `most_seconds` in all no further set is judged.
    """

    target: Path
    params: SamplingParams
    evaluations: int = 32
    n_tokens: int = 128
    seconds: float = 6.0
    most_seconds: float = float("inf")
    max_draft: int = 12
    seed: int = 0
    context: ContextOptions = field(default_factory=ContextOptions)
    n_gpu_layers: LayerCount = "auto"
    n_gpu_layers_draft: LayerCount = "auto"
    use_mmap: bool = True

    def __post_init__(self) -> None:
        if self.evaluations < 1:
            raise OptionError(f"{self.evaluations} evaluations find nothing: give at least 1")


@dataclass(frozen=True, slots=True)
class LayerSearchResult:
    """Every set that was judged, in order; `interrupted` if the search was stopped early."""

    n_layers: int
    plain_speed: float
    trials: tuple[LayerTrial, ...]
    seconds: float
    interrupted: bool = False

    @property
    def best(self) -> LayerTrial:
        """The set of most predicted tokens a second."""
        return max(self.trials, key=lambda trial: trial.predicted)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as a mapping, ready for JSON."""
        return {
            "layers": self.n_layers,
            "plain_tokens_per_second": self.plain_speed,
            "best": dataclasses.asdict(self.best),
            "trials": [dataclasses.asdict(trial) for trial in self.trials],
            "interrupted": self.interrupted,
            "seconds": self.seconds,
        }


def search_layers(
    options: LayerSearchOptions,
    prompts_of: Callable[[Model], Sequence[Sequence[int]]],
    progress: Progress = lambda _what, _share: None,
) -> LayerSearchResult:
    """Search. `prompts_of` makes the prompts, as tokens, once the target is loaded.

    Ctrl-C ends the search and keeps what was found; before the first set it passes through. Raises
    MissingPackageError without optuna, UnsupportedModelError for models that cannot be cut or that
    cannot draft.
    """
    started = time.perf_counter()
    _optuna()
    layered = LayeredModel(options.target)
    if layered.n_layers < 2:
        raise OptionError(f"{options.target} has one layer: there is none to skip")
    trials: list[LayerTrial] = []
    interrupted = False
    with tempfile.TemporaryDirectory(prefix="specrun-layers-") as folder:
        judge = prepare_judge(options, prompts_of, layered, Path(folder), progress)
        try:
            for trial in _trials(layered, judge, options):
                trials.append(trial)
                best = max(trial.predicted for trial in trials) / judge.plain_speed
                share = 0.3 + 0.7 * len(trials) / options.evaluations
                done = f"{len(trials)} of {options.evaluations} sets of layers"
                progress(f"{done}, best {best:.2f} times plain", share)
                if time.perf_counter() - started > options.most_seconds:
                    break
        except KeyboardInterrupt:
            if not trials:
                raise
            interrupted = True
    if not trials:
        raise OptionError(f"{options.target} has no layers that can be skipped")
    seconds = time.perf_counter() - started
    return LayerSearchResult(
        layered.n_layers, judge.plain_speed, tuple(trials), seconds, interrupted
    )


def _trials(
    layered: LayeredModel, judge: CutJudge, options: LayerSearchOptions
) -> Iterator[LayerTrial]:
    """Yield up to `evaluations` different sets, judged."""
    optuna = _optuna()
    names = [f"layer {layer}" for layer in range(layered.n_layers)]
    kinds = {name: optuna.distributions.CategoricalDistribution([True, False]) for name in names}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        startup = min(10, max(4, options.evaluations // 3))
        sampler = optuna.samplers.TPESampler(
            seed=options.seed, multivariate=True, n_startup_trials=startup
        )
    study = optuna.create_study(direction="maximize", sampler=sampler)
    for first in _first_sets(layered.n_layers):
        study.enqueue_trial({name: layer in first for layer, name in enumerate(names)})
    known: dict[tuple[int, ...], float] = {}
    for _ in range(_PATIENCE * options.evaluations):
        if len(known) == options.evaluations:
            return
        asked = study.ask(kinds)
        # Not every set can be kept: some models only allow early exits, hybrids only some orders.
        kept = layered.nearest({layer for layer, name in enumerate(names) if asked.params[name]})
        if not kept or len(kept) == layered.n_layers:
            study.tell(asked, 0.0)  # nothing to draft with, or nothing gained: as bad as can be
            continue
        if kept not in known:
            trial = judge.judge(kept)
            known[kept] = trial.predicted
            yield trial
        study.tell(asked, known[kept])


def _first_sets(n_layers: int) -> list[set[int]]:
    """Return early exits, and as many layers spread evenly from the first to the last."""
    sets: list[set[int]] = []
    for share in (0.5, 0.75, 0.25):
        count = min(n_layers - 1, max(1, round(share * n_layers)))
        sets.append(set(range(count)))
        last = n_layers - 1
        sets.append({round(index * last / max(1, count - 1)) for index in range(count)})
    return sets


def _optuna() -> Any:  # noqa: ANN401 - a module that may be absent
    try:
        import optuna
    except ModuleNotFoundError as error:
        raise MissingPackageError("the search", "optuna", "tune") from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna
