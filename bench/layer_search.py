"""Layer skipping: the layers of a self-draft with the most tokens a second."""

from __future__ import annotations

import dataclasses
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from specrun.bindings.contexts import Context, ContextOptions
from specrun.bindings.errors import MissingPackageError, OptionError
from specrun.bindings.models import Model
from specrun.convert.cut import LayeredModel
from specrun.runtime.acceptance import ExactRule
from specrun.runtime.drafters.growing.draft import RANKED_TOKENS, ranking_params
from specrun.runtime.engine import Session
from specrun.runtime.laws import Law, SamplingParams
from specrun.runtime.memory import LoadOptions, layers_of
from specrun.runtime.models import check_draftable
from specrun.runtime.planning import (
    MEASURED_SIZES,
    ChainInputs,
    CostCurve,
    chain_row,
    measure_cost_curve,
    sized_to_measure,
)
from specrun.runtime.round import NoDrafter
from specrun.runtime.trees import TreeSampling
from specrun.runtime.tuning import (
    CalibrationText,
    RankedPair,
    acceptance_by_rank,
    checked_prompts,
    laws_along,
)

# == Prediction of a self-draft's speed from acceptance and costs ==================================
#
# The target writes texts once, and its cost curve T(n), the time of an evaluation of n tokens, is
# measured. A cut (the target with some layers left out) is then judged by two numbers: alpha, the
# share of its tokens that would be accepted (the mean over the texts of sum min(p, q), or of p at
# the cut's most likely token), and c, the seconds of one of its tokens. A draft of n tokens
# produces (1 - alpha^(n + 1)) / (1 - alpha) tokens in n c + T(n + 1) seconds
# (`planning.chain_row`).


_FEWEST_TOKENS, _LONGEST_DRAFT = 8, 12
_TARGETS_SHARE = 0.75  # of the time for measuring costs


@dataclass(frozen=True, slots=True)
class LayerTrial:
    """A set of layers, expected to give `predicted` tokens a second with drafts of `n_draft`.

    `acceptance` is the share of its tokens that would be accepted with `sampling`, "with" or
    "argmax"; `speed_up` is over plain decoding.
    """

    kept: tuple[int, ...]
    sampling: str
    acceptance: float
    n_draft: int
    predicted: float
    speed_up: float

    def skipped(self, n_layers: int) -> tuple[int, ...]:
        """Return the layers of the whole model that are left out."""
        return tuple(layer for layer in range(n_layers) if layer not in self.kept)


class CutJudge:
    """Judges sets of layers on the target's texts, with distributions and costs measured once."""

    def __init__(
        self,
        options: LayerSearchOptions,
        layered: LayeredModel,
        folder: Path,
        texts: Sequence[tuple[CalibrationText, list[Law]]],
        curve: CostCurve,
    ) -> None:
        self._options = options
        self._layered = layered
        self._folder = folder
        self._texts = texts
        # More tokens never cost less: a lower time was disturbed by another process.
        costs = map(curve.seconds, range(1, _LONGEST_DRAFT + 2))
        self._curve = CostCurve.flat(list(accumulate(costs, max)))
        # Layers of the one cut that was timed, and its seconds a token.
        self._measured: tuple[int, float] | None = None

    @property
    def plain_speed(self) -> float:
        """Tokens a second of plain decoding, by the target's evaluations alone."""
        return 1.0 / self._curve.seconds(1)

    def judge(self, kept: tuple[int, ...]) -> LayerTrial:
        """Cut the model to these layers, and predict the target's speed with it."""
        path = self._folder / "cut.gguf"
        self._layered.write(path, kept, force=True)
        try:
            acceptance, sampling = self._acceptance(path, kept)
        finally:
            path.unlink(missing_ok=True)
        ratio = self._step_seconds(len(kept)) / self._curve.seconds(1)
        chains = ChainInputs(acceptance, ratio, 0.0, self._curve)
        rows = [chain_row(chains, n) for n in range(1, _LONGEST_DRAFT + 1)]
        gains = [row.measured or 0.0 for row in rows]
        speed_up = max(gains)
        best = 1 + gains.index(speed_up)  # the shortest of equals
        predicted = speed_up * self.plain_speed
        return LayerTrial(kept, sampling, acceptance, best, predicted, speed_up)

    def _acceptance(self, path: Path, kept: tuple[int, ...]) -> tuple[float, TreeSampling]:
        """Return the greatest share of accepted tokens over the ways to draft.

        The first cut that is opened is also timed, for `_step_seconds`.
        """
        params = self._options.params
        ranking = ranking_params(params, RANKED_TOKENS)
        pairs: list[RankedPair] = []
        with (
            _open(path, self._options, drafts=True) as model,
            Context(model, _wide(self._options.loading.context, model)) as context,
        ):
            for text, laws in self._texts:
                drafted = laws_along(context, text, (params, ranking))
                pairs += (RankedPair(law, *both) for law, both in zip(laws, drafted, strict=True))
            if self._measured is None:
                seconds = (1 - _TARGETS_SHARE) * self._options.seconds
                curve = measure_cost_curve(context, seconds=seconds, sizes=(1,))
                self._measured = len(kept), curve.seconds(1)
        ways: tuple[TreeSampling, ...] = ("argmax",) if params.is_greedy else ("with", "argmax")
        shares = [(min(1.0, float(acceptance_by_rank(pairs, way, 1)[0])), way) for way in ways]
        return max(shares, key=lambda share: share[0])

    def _step_seconds(self, count: int) -> float:
        """Return the cost of a token, on the line through the whole model and the timed cut."""
        whole, all_layers = self._curve.seconds(1), self._layered.n_layers
        measured, seconds = self._measured or (all_layers, whole)
        if measured == all_layers:
            return whole * count / all_layers
        slope = (whole - seconds) / (all_layers - measured)
        # Noise must not make more layers cheaper, nor a model without any cost less than nothing.
        slope = min(max(slope, 0.0), whole / all_layers)
        return whole - slope * (all_layers - count)


def _prepare_judge(
    options: LayerSearchOptions,
    prompts_of: Callable[[Model], Sequence[Sequence[int]]],
    layered: LayeredModel,
    folder: Path,
    progress: Progress,
) -> CutJudge:
    """Let the target write, and measure it; it is closed again, so that a cut has the memory."""
    with _open(options.target, options) as model:
        check_draftable(model)
        size = _wide(options.loading.context, model)
        prompts = checked_prompts(
            prompts_of(model), options.n_tokens, size.n_ctx, needs="the search"
        )
        progress("writing a text", 0.0)
        texts = _written(model, size, prompts, options)
        with Context(model, size) as context:
            judged = [
                (text, [law for (law,) in laws_along(context, text, (options.params,))])
                for text in texts
            ]
            curve = measure_cost_curve(
                context,
                seconds=_TARGETS_SHARE * options.seconds,
                sizes=tuple(size for size in MEASURED_SIZES if size <= _LONGEST_DRAFT + 1),
                progress=lambda done: progress("measuring the target", 0.1 + 0.2 * done),
            )
    return CutJudge(options, layered, folder, judged, curve)


def _open(path: Path, options: LayerSearchOptions, *, drafts: bool = False) -> Model:
    loading = options.loading
    layers = layers_of(path, loading, drafts=drafts)
    return Model(path, n_gpu_layers=layers, use_mmap=loading.use_mmap, drafts=drafts)


def _wide(options: ContextOptions, model: Model) -> ContextOptions:
    """Return a context whose evaluations give many rows."""
    return dataclasses.replace(sized_to_measure(options, model), n_outputs=max(MEASURED_SIZES))


def _written(
    model: Model, size: ContextOptions, prompts: list[list[int]], options: LayerSearchOptions
) -> list[CalibrationText]:
    """Return the prompts with the target's answers, unless these are empty."""
    most = max(_FEWEST_TOKENS, options.n_tokens // len(prompts))
    texts = []
    with Session.open(model, NoDrafter(), size, ExactRule()) as session:
        for prompt in prompts:
            stream = session.stream(prompt, options.params, seed=0, max_tokens=most)
            answer = stream.drain().token_ids
            if answer:
                texts.append(CalibrationText((*prompt, *answer), len(prompt)))
    written = sum(len(text.tokens) - text.n_prompt for text in texts)
    if written < _FEWEST_TOKENS:
        raise OptionError(
            f"the target answered with {written} tokens, too few to measure acceptance: "
            "give other prompts"
        )
    return texts


# == The search: Bayesian optimisation =============================================================
#
# Draft & Verify (Zhang et al. 2023, section 3.3) does so with runs of the whole method. Here each
# set of layers is judged by the two numbers that decide a run's speed. The target writes a text
# once. A cut model's distributions on that text give the share of its tokens that would be
# accepted. The target's measured cost curve and the cut's cost, a line in its number of layers,
# give the tokens a second of the best draft length. Sets are proposed by a tree-structured Parzen
# estimator (Bergstra et al. 2011; optuna), after a few of the shapes that the literature found
# good.


_PATIENCE = 20  # proposals for each evaluation: in small models most have been judged already

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class LayerSearchOptions:
    """At most `evaluations` sets of layers are judged, on `n_tokens` that the target writes.

    `seconds` are spent on cost curves. After `most_seconds` in all no further set is judged.
    """

    target: Path
    params: SamplingParams
    evaluations: int = 32
    n_tokens: int = 128
    seconds: float = 6.0
    most_seconds: float = float("inf")
    loading: LoadOptions = field(default_factory=LoadOptions)

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

    Ctrl-C ends the search and keeps its results; before the first set it passes through. Raises
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
        judge = _prepare_judge(options, prompts_of, layered, Path(folder), progress)
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
        sampler = optuna.samplers.TPESampler(seed=0, multivariate=True, n_startup_trials=startup)
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
