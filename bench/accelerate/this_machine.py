"""Measurements of a search on this machine: the cost curve, plans, cuts and sweeps of answers."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from specrun.bench.accelerate.found_drafters import found_drafters
from specrun.bench.accelerate.prompts import SearchPrompts
from specrun.bench.accelerate.record import PLAIN
from specrun.bench.accelerate.search import CutFound, FoundDrafter
from specrun.bench.accelerate.training import TrainingOrder, train_head
from specrun.bench.diagnosis.curve_beside import ENOUGH, CurveBeside
from specrun.bench.diagnosis.work import Work, work_of
from specrun.bench.drafters.comparison import Arm
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import OptionError, OutOfMemoryError, SpecrunError
from specrun.bindings.files import cache_folder
from specrun.bindings.gguf import read_header
from specrun.bindings.machine.placement import placing
from specrun.bindings.models.model import Model
from specrun.runtime.chat import prompt_tokens
from specrun.runtime.engine import Runtime, RuntimeOptions
from specrun.runtime.language import method_of_head, parse_expression, quoted
from specrun.runtime.laws import SamplingParams
from specrun.runtime.memory import (
    AskedCounts,
    PlanRequest,
    PlanSettings,
    count_plan,
    layers_here,
    parts_of,
    size_text,
)
from specrun.runtime.planning import (
    CostCurve,
    TuneOptions,
    load_curve,
    measure_target_costs,
    save_curve,
    save_plans,
)
from specrun.runtime.round import Drafter, GenerationResult, close_all
from specrun.runtime.tuning import tune

_CURVE_SECONDS, _PLAN_SECONDS, _CUT_SECONDS = 10.0, 4.0, 3.0
_FITTED_TOKENS = 64  # written at each temperature, to plan and to judge cuts by
_WARM_UP_TOKENS = 8
_STEP = 256  # contexts are as long as texts need, in such steps
_SHORTEST = 24  # tokens of an answer
_MOST_CUTS, _FEWEST_CUTS = 10, 3
_CUT_BUDGET = 25.0  # seconds
_WRITTEN = 4e8  # bytes of a cut that are written in a second, about
_EAGLE = ("eagle", "eagle3")


class ThisMachine:
    """The `Machine` of a search, for one target; a context manager that closes what it opened.

    `params` are the sampling settings by temperature, `n_tokens` the most of an answer, `seconds`
    what comparing may take, `memory` the bytes that target and drafter may take together. `named`
    files are tried as drafters in any case. Where it `forgets`, the cost curve is measured again.
    """

    def __init__(
        self,
        target: Path,
        prompts: SearchPrompts,
        params: Mapping[float, SamplingParams],
        options: RuntimeOptions,
        *,
        n_tokens: int,
        seconds: float,
        memory: int | None = None,
        has_own_prompts: bool = False,
        named: Sequence[Path] = (),
        forgets: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        progress: Callable[[float], None] = lambda _: None,
    ) -> None:
        self._target, self._prompts, self._params = target, prompts, params
        self._options, self._memory = options, memory
        self._has_own_prompts, self._forgets = has_own_prompts, forgets
        self._named = named
        self._n_tokens, self._seconds = n_tokens, seconds
        self._clock, self._progress = clock, progress
        self._context = options.context
        self._curve: CostCurve | None = None
        self._beside: CurveBeside | None = None
        self._n_answered = 0  # prompts, by all drafters each
        self._answer_tokens: int | None = None  # known when it is known how many are compared
        self._opened = ExitStack()
        self._arms: dict[str, dict[tuple[float, str], Arm]] = {}
        self._started: dict[str, list[Drafter]] = {}  # the runtime's first one, and others

    def __enter__(self) -> ThisMachine:
        self._opened.enter_context(placing(self._options.placement))
        return self

    def __exit__(self, *_: object) -> None:
        if self._beside is not None:
            self._beside.close()
        self._close_others(())
        self._opened.close()

    def now(self) -> float:
        """Return the clock's seconds."""
        return self._clock()

    # -- what is measured of the target ------------------------------------------------------------

    def curve(self) -> CostCurve:
        """Return the curve that was measured with these settings, or a new one."""
        context, wanted = self._context, self._options.n_gpu_layers
        layers, _ = layers_here(self._target, context, wanted)
        curve = None if self._forgets else load_curve(self._target, context, layers)
        if curve is None:
            curve = measure_target_costs(
                self._target,
                context,
                n_gpu_layers=wanted,
                seconds=_CURVE_SECONDS,
                use_mmap=self._options.use_mmap,
                progress=self._progress,
            )
            save_curve(curve, self._target, context, layers)
        self._curve = curve
        self._fit()
        return curve

    def curve_beside(self) -> CostCurve | None:
        """Return the curve as it was while drafters were compared, None where none were."""
        return None if self._beside is None else self._beside.curve()

    def _time_beside(self, plain: Arm, answers: Sequence[GenerationResult]) -> None:
        """Time evaluations behind a prompt's answers, if it is one of those that are enough.

        What is compared is compared with that: a curve of another minute may be 10 % off.
        """
        n_prompts = 2 * len(self._params) * sum(map(len, self._prompts.held_out.values()))
        number, self._n_answered = self._n_answered, self._n_answered + 1
        if number % max(1, n_prompts // ENOUGH):
            return
        if number == 0 and self._curve is not None:
            depth = int(plain.prompt_tokens) + (self._answer_tokens or 0) // 2
            # Without memory for one more context the curve of before has to do.
            with suppress(OutOfMemoryError):
                self._beside = CurveBeside(plain.runtime, self._curve, n_prompts, depth)
        if self._beside is not None:
            self._beside.visit(max(answers, key=lambda answer: answer.stats.drafted))

    def _fit(self) -> None:
        """Choose a context that holds the longest prompt and its answer."""
        with Model(self._target, vocab_only=True) as model:
            prompts = [text for texts in self._prompts.held_out.values() for text in texts]
            longest = max(map(len, prompt_tokens(model, [*prompts, *self._prompts.fitting])))
        needed = longest + max(self._n_tokens, _FITTED_TOKENS) + _STEP // 4
        rounded = -(-needed // _STEP) * _STEP
        given = self._context.n_ctx
        fitting = rounded if given == 0 else min(given, rounded)
        self._context = dataclasses.replace(self._context, n_ctx=fitting)

    def _affordable_tokens(self, n_drafters: int) -> int:
        """Return how long answers may be, so that two sweeps of everything take their time."""
        prompts = sum(map(len, self._prompts.held_out.values()))
        answers = 2 * n_drafters * len(self._params) * prompts
        one_token = self._curve.seconds(1) if self._curve else 0.1
        affordable = int(self._seconds / (answers * one_token))
        return min(self._n_tokens, max(_SHORTEST, affordable))

    # -- what could draft --------------------------------------------------------------------------

    def look(self) -> list[FoundDrafter]:
        """Return what could draft for the target."""
        return found_drafters(self._target, self._named)

    def plans(self, found: FoundDrafter) -> list[str]:
        """Return the expressions of a file: those of `tune` for a model, chains and trees else."""
        if found.path is None:
            return [found.method]
        file = quoted(str(found.path))
        self._check_memory(f"{found.method}({file})")
        if found.method == "draft":
            return [*self._tuned(found.path), f"draft({file})"]
        chain = [f"{found.method}({file}, n=auto)"] if found.method in _EAGLE else []
        return [f"{found.method}({file})", *chain]

    def _tuned(self, draft: Path) -> list[str]:
        """Return the fastest plan for each temperature, where one drafts; all are kept."""
        options = TuneOptions(
            self._target,
            draft,
            tuple(self._params.values()),
            n_tokens=_FITTED_TOKENS,
            seconds=_PLAN_SECONDS,
            context=self._context,
            n_gpu_layers=self._options.n_gpu_layers,
            n_gpu_layers_draft=self._options.n_gpu_layers_draft,
            use_mmap=self._options.use_mmap,
        )
        prompts = self._prompts.fitting
        result = tune(options, lambda model: prompt_tokens(model, prompts), self._tuning)
        save_plans(options, result)
        # What was run stands first, fastest first.
        found = (
            next((plan.options for plan in setting.candidates if plan.options), None)
            for setting in result.settings
        )
        fastest = [options for options in found if options]
        return [f"draft({quoted(str(draft))}, {plan})" for plan in dict.fromkeys(fastest)]

    def _tuning(self, _what: str, share: float) -> None:
        self._progress(share)

    def cut(self) -> CutFound:
        """Search for layers to skip, and write the best cut where it promises something."""
        from specrun.bench.layer_search import LayerSearchOptions, search_layers
        from specrun.convert import LayeredModel
        from specrun.convert.cut import range_text

        greedy = min(self._params.values(), key=lambda params: params.temperature)
        options = LayerSearchOptions(
            self._target,
            greedy,
            evaluations=self._affordable_cuts(),
            n_tokens=_FITTED_TOKENS,
            seconds=_CUT_SECONDS,
            most_seconds=_CUT_BUDGET,
            context=self._context,
            n_gpu_layers=self._options.n_gpu_layers,
            n_gpu_layers_draft=self._options.n_gpu_layers_draft,
            use_mmap=self._options.use_mmap,
        )
        prompts = self._prompts.fitting
        result = search_layers(options, lambda model: prompt_tokens(model, prompts), self._tuning)
        if result.interrupted:
            raise KeyboardInterrupt
        best = result.best
        path = cut_file(self._target)
        if best.speed_up > 1.0:
            path.parent.mkdir(parents=True, exist_ok=True)
            LayeredModel(self._target).write(path, best.kept, force=True)
        expression = f"draft({quoted(str(path))}, n={best.n_draft}, sampling={best.sampling})"
        return CutFound(expression, best.speed_up, range_text(best.skipped(result.n_layers)))

    def _affordable_cuts(self) -> int:
        """Return how many cuts can be judged; raises OptionError where they would take too long."""
        one_token = self._curve.seconds(1) if self._curve else 0.1
        each = 0.5 + self._target.stat().st_size / _WRITTEN + _FITTED_TOKENS * one_token
        count = int(_CUT_BUDGET / each)
        if count < _FEWEST_CUTS:
            problem = f"judging one takes about {each:.0f} seconds"
            raise OptionError(f"{problem}: specrun tune --layer-skip takes that time")
        return min(_MOST_CUTS, count)

    def train(self, hours: float) -> list[str]:
        """Train a head from the file alone, on prompts of which none is held out."""
        own = self._prompts.fitting if self._has_own_prompts else ()
        threads = self._context.n_threads
        found = self.look()
        heads = tuple(each.path for each in found if each.path and each.method in _EAGLE)
        order = TrainingOrder(self._target, hours, own, threads, heads)
        head = train_head(order, self._tuning)
        return self.plans(FoundDrafter(head, method_of_file(head), "trained"))

    # -- sweeps ------------------------------------------------------------------------------------

    def sweep(
        self, temperature: float, workload: str, drafters: Sequence[str], seed: int
    ) -> dict[str, Work | str]:
        """Answer the prompts of a workload, prompt by prompt with every drafter in turn."""
        self._close_others(drafters)
        if self._answer_tokens is None:
            self._answer_tokens = self._affordable_tokens(len(drafters))
        found: dict[str, Work | str] = {}
        arms: dict[str, Arm] = {}
        for drafter in drafters:
            try:
                arms[drafter] = self._arm(drafter, temperature, workload)
            except SpecrunError as error:
                if drafter == PLAIN:
                    raise
                found[drafter] = str(error)
        results: dict[str, list[GenerationResult]] = {drafter: [] for drafter in arms}
        params, count = self._params[temperature], len(self._prompts.held_out[workload])
        for number in range(count):
            # In turn forwards and backwards: a machine that grows busier slows all of them alike.
            order = list(arms) if (number + seed) % 2 == 0 else list(reversed(arms))
            answers = {
                drafter: arms[drafter].answer(number, params, self._answer_tokens, seed=seed)
                for drafter in order
            }
            # A prompt that is answered with nothing tells nothing.
            if all(answer.stats.tokens_per_second for answer in answers.values()):
                self._time_beside(arms[PLAIN], list(answers.values()))
                for drafter, answer in answers.items():
                    results[drafter].append(answer)
            self._progress((number + 1) / count)
        if not results[PLAIN]:
            problem = f"{self._target.name} answers none of the prompts ({workload})"
            raise SpecrunError(f"{problem}: give others with --prompts FILE")
        return {**found, **{drafter: work_of(answers) for drafter, answers in results.items()}}

    def _arm(self, drafter: str, temperature: float, workload: str) -> Arm:
        known, setting = self._arms.setdefault(drafter, {}), (temperature, workload)
        if setting not in known:
            runtime = next((arm.runtime for arm in known.values()), None)
            prompts = self._prompts.held_out[workload]
            if runtime is None:
                runtime = self._open(drafter)
                self._started[drafter] = [runtime.session.drafter]
                warm_up = Arm(runtime, prompts, None)
                warm_up.answer(0, self._params[temperature], _WARM_UP_TOKENS, seed=0)
            own = None
            if not files_in(drafter):
                # It learns what pays on its texts, which says nothing of others: where nothing
                # repeats prompt lookup stops, and would hardly begin again for an edit.
                own = runtime.start_drafter()
                self._started[drafter].append(own)
            known[setting] = Arm(runtime, prompts, None, own)
        return known[setting]

    def _open(self, drafter: str) -> Runtime:
        self._check_memory(drafter)
        names = [field.name for field in dataclasses.fields(RuntimeOptions)]
        options: dict[str, Any] = {name: getattr(self._options, name) for name in names}
        options["context"] = self._context
        return self._opened.enter_context(Runtime(self._target, drafter, **options))

    def _close_others(self, drafters: Sequence[str]) -> None:
        """Close what is no longer compared: its memory is the others'."""
        for drafter in [name for name in self._arms if name not in drafters]:
            arms, started = self._arms.pop(drafter), self._started.pop(drafter, [])
            runtime = next((arm.runtime for arm in arms.values()), None)
            if runtime is not None:
                used = runtime.session.drafter
                close_all([other for other in started if other is not used])
                runtime.close()

    def _check_memory(self, drafter: str) -> None:
        if self._memory is None:
            return
        needed = needed_bytes(self._target, drafter, self._context)
        if needed > self._memory:
            what = self._target.name if drafter == PLAIN else "it"
            problem = f"{what} needs {size_text(needed)} of memory"
            raise OutOfMemoryError(f"{problem}, and {size_text(self._memory)} are allowed")


def needed_bytes(target: Path, drafter: str, context: ContextOptions) -> int:
    """Return the bytes that a target and its drafter take on this machine, with their caches."""
    parts = tuple(parts_of(target, drafter, context))
    with AskedCounts() as counts:
        settings = PlanSettings(context.n_ctx, 0, 0)
        plan = count_plan(PlanRequest(parts, (), (), ()), settings, counts)
    return sum(sum(row.by_place.values()) for row in plan.rows)


def method_of_file(head: Path) -> str:
    """Return the drafting method of a head's file."""
    method = method_of_head(read_header(head).architecture)
    if method is None:
        raise OptionError(f"{head} holds no heads")
    return method.name


def cut_file(target: Path) -> Path:
    """Return where the cut of a search is kept."""
    from specrun.runtime.tuning import profile_file

    return cache_folder() / "cuts" / f"{profile_file(target).stem}.gguf"


def is_drafted_by(drafter: str, file: Path) -> bool:
    """Whether a drafter expression names a file."""
    return str(file) in files_in(drafter)


def files_in(drafter: str) -> list[str]:
    """Return the files that a drafter expression names."""
    found, left = [], [parse_expression(drafter)]
    while left:
        expression = left.pop()
        left += [*expression.arguments, *(value for _, value in expression.options)]
        if not expression.is_call and Path(expression.atom).is_file():
            found.append(expression.atom)
    return sorted(set(found))
