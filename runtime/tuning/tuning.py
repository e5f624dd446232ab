"""`specrun tune`: measures a pair of models on this machine and plans the drafts.

Costs are measured once for each model. For each sampling setting the target then writes texts, on
which both models' distributions give the acceptance by rank of every proposal scheme; each scheme
gets its fastest tree and its fastest chain, and the best of them are run, so that predictions stand
beside measurements.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace

from specrun.bindings.contexts.context import Context
from specrun.bindings.errors import OptionError, UnsupportedModelError
from specrun.bindings.models.model import Model
from specrun.runtime.acceptance import ExactRule
from specrun.runtime.drafters.build import build_drafter
from specrun.runtime.drafters.draft_model import draft_context_options, draft_size
from specrun.runtime.drafters.environment import DraftEnvironment
from specrun.runtime.engine.session import Session
from specrun.runtime.language import quoted
from specrun.runtime.laws.sampling import SamplingParams
from specrun.runtime.memory import fitted_here, layers_of
from specrun.runtime.models.pairing import check_pair
from specrun.runtime.planning import CostCurve, RoundCosts, chain_theory, measure_cost_curve
from specrun.runtime.planning.measure import MEASURED_SIZES, sized_to_measure
from specrun.runtime.planning.theory import memory_traffic, multiplications
from specrun.runtime.round.drafter import DrafterWeights, NoDrafter
from specrun.runtime.round.padding import Shape
from specrun.runtime.trees import DynamicShape, TreeSampling
from specrun.runtime.tuning.acceptance import (
    CalibrationText,
    PairCosts,
    RankedPair,
    acceptance_by_rank,
    checked_prompts,
    drafting_shares,
    law_pairs,
    mean_alpha,
    measure_alpha,
    measure_dynamic_acceptance,
    require_law,
)
from specrun.runtime.tuning.results import (
    Candidate,
    DrafterAlpha,
    PlanKind,
    ShapeTrial,
    TunedSetting,
    TuneOptions,
    TuneResult,
)
from specrun.runtime.tuning.tree_plan import TreePlan, plan_dynamic_tree, plan_tree

_RANKS = 8
_TOLERANCE = 0.01
# Python's own time beside turning logits into distributions, in seconds: of any round, of one that
# drafts, of each evaluated draft node and of each drafted one (`tools/measure overhead`).
_PER_ROUND, _PER_TREE, _PER_LAW, _PER_NODE = 40e-6, 80e-6, 20e-6, 9e-6
_CURVES = 0.2  # of the bar, for cost curves
_TARGETS_SHARE = 0.75  # of the time for cost curves
_DYNAMIC_TOPK = (2, 3, 4)
_DEEPEST, _DEEPEST_DYNAMIC = 10, 8
_GROWING_SHARE = 0.1  # of the time for cost curves, for each topk and setting
_TURNS = 3  # of a plan with free and with fixed shapes
_CHANCE = 0.85  # of the most promising plan's speed: predictions are not far off
_SCHEMES: tuple[TreeSampling, ...] = ("argmax", "without", "with")

# About how many texts' time the steps of a setting take: planning, candidates, fixed shapes.
_PLANNING, _TRIES, _SHAPES = 0.5, 2.0, 1.4 * _TURNS

Progress = Callable[[str, float, float | None], None]
"""Takes the current step, the share of the whole that is done, and the seconds left if known."""


class WorkLeft:
    """The share of some work that is done, and its time left by the rate so far.

    `total` is the work in seconds, as it is expected. A tenth of it counts as done at that rate,
    so that the first pieces do not let the estimate jump.
    """

    def __init__(self, total: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._total, self._clock, self._began = total, clock, clock()

    def progress(self, done: float) -> tuple[float, float]:
        """Return the share that is done and the seconds left, after so much of the work."""
        prior, spent = 0.1 * self._total, self._clock() - self._began
        left = max(0.0, self._total - done) * (spent + prior) / (done + prior)
        return (spent / (spent + left) if spent + left else 1.0), left


def tuned_layers(options: TuneOptions) -> tuple[int, int]:
    """Return n_gpu_layers (-1: all) of the target and of the draft model, as in a chat."""
    drafter = f"draft({quoted(str(options.draft))})"
    fitted = fitted_here(options.target, options.loading, drafter)
    draft_layers = layers_of(options.draft, fitted, drafts=True)
    return layers_of(options.target, fitted), draft_layers


def tune(
    options: TuneOptions,
    prompts_of: Callable[[Model], Sequence[Sequence[int]]],
    progress: Progress = lambda _what, _share, _left: None,
) -> TuneResult:
    """Measure and plan. `prompts_of` makes the prompts, as tokens, once the target is loaded."""
    started = time.perf_counter()
    layers, draft_layers = tuned_layers(options)
    use_mmap = options.loading.use_mmap
    with Model(options.target, n_gpu_layers=layers, use_mmap=use_mmap) as target:
        bench = _Bench(options, target, progress)
        bench.require_laws()
        prompts = bench.checked(prompts_of(target))
        with Model(
            options.draft, n_gpu_layers=draft_layers, use_mmap=use_mmap, drafts=True
        ) as draft:
            check_pair(target, draft)
            curves = bench.measure_costs(draft)
            bench.pad_by(curves[0])
            planned = [
                bench.plan(draft, curves, params, prompts, number)
                for number, params in enumerate(options.params)
            ]
        # The draft model is closed by now: candidates load it themselves, and it would lie in
        # memory twice.
        settings = tuple(
            bench.try_out(setting, prompts, number) for number, setting in enumerate(planned)
        )
    progress("done", 1.0, 0.0)
    return TuneResult(*curves, settings, time.perf_counter() - started)


class _Bench:
    """The steps of one tuning."""

    def __init__(self, options: TuneOptions, target: Model, progress: Progress) -> None:
        self._options = options
        self._target = target
        self._progress = progress
        self._work: WorkLeft | None = None
        self._text_s = 0.0  # seconds of a text, by the target's curve
        self._context = sized_to_measure(options.loading.context, target)
        self._environment = DraftEnvironment.of(target, self._context, options.loading)
        self._curve: CostCurve | None = None

    def pad_by(self, curve: CostCurve) -> None:
        """Let sessions pad batches where this curve is cheaper, as they will once it is kept."""
        self._curve = curve
        self._environment = replace(self._environment, costs=curve.as_padded())
        self._text_s = self._options.n_tokens * curve.seconds(1)
        setting = 1.0 + _PLANNING + len(self._options.others) + _TRIES + _SHAPES
        self._work = WorkLeft(self._text_s * setting * len(self._options.params))

    def _tell(self, what: str, texts: float) -> None:
        """Report a step, behind work of so many texts' time."""
        share, left = self._work.progress(texts * self._text_s) if self._work else (0.0, None)
        self._progress(what, _CURVES + (1.0 - _CURVES) * share, left)

    def require_laws(self) -> None:
        """Raise if one of the drafters whose alpha is to be measured has none."""
        for drafter in self._options.others:
            require_law(self._environment, drafter)

    def checked(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return the prompts, each of which must leave room for its text."""
        return checked_prompts(prompts, self._options.n_tokens, self._context.n_ctx, needs="tuning")

    def measure_costs(self, draft: Model) -> tuple[CostCurve, CostCurve]:
        """Return both models' curves; the target's takes most of the time."""

        def measured(model: Model, name: str, begin: float, end: float, share: float) -> CostCurve:
            def report(done: float) -> None:
                self._progress(f"measuring the {name}", begin + (end - begin) * done, None)

            seconds = share * self._options.seconds
            with self._wide_context(model) as context:
                return measure_cost_curve(context, seconds=seconds, progress=report)

        target = measured(self._target, "target", 0.0, 0.15, _TARGETS_SHARE)
        return target, measured(draft, "draft model", 0.15, _CURVES, 1 - _TARGETS_SHARE)

    def plan(
        self,
        draft: Model,
        curves: tuple[CostCurve, CostCurve],
        params: SamplingParams,
        prompts: list[list[int]],
        number: int,
    ) -> TunedSetting:
        """Let the target write; return the candidates, of which only plain decoding was run."""
        done = number * (1.0 + _PLANNING + len(self._options.others))
        self._tell(f"writing a text at temperature {params.temperature:g}", done)
        with self._session(DrafterWeights(NoDrafter.name, NoDrafter)) as session:
            texts, speed, _ = self._answers(session, prompts, params)
        self._tell(f"planning for temperature {params.temperature:g}", done + 1.0)
        pairs: list[RankedPair] = []
        per_law = 0.0
        with self._wide_context(self._target) as ours, self._wide_context(draft) as theirs:
            for text in texts:
                more, per_law = law_pairs(ours, theirs, text, params)
                pairs += more
        # Turning logits into a distribution is paid once a round for the target, and for each
        # evaluated draft node.
        costs = RoundCosts(
            curves[0].as_padded(),
            curves[1],
            per_round=_PER_ROUND + per_law,
            per_tree=_PER_TREE,
            per_law=_PER_LAW + per_law,
            per_node=_PER_NODE,
        )
        dynamic = self._dynamic_candidates(draft, texts, costs, params)
        plain = Candidate("", "plain", "", 0, 0, 1.0, 1.0 / costs.plain_seconds, speed, 1.0)
        acceptance, candidates = self._candidates(pairs, costs, params)
        unique = {candidate.options: candidate for candidate in (plain, *candidates, *dynamic)}
        first = max(shares[0] for shares in acceptance.values())
        ratio = multiplications(draft) / multiplications(self._target)
        theory = chain_theory(first, costs, ratio)
        n_context = sum(len(text.tokens) for text in texts) / max(1, len(texts))
        pair = PairCosts(costs, memory_traffic(self._target, self._context), n_context)
        alpha = mean_alpha((found.target, found.draft) for found in pairs)
        read = memory_traffic(draft, self._context)
        alphas = (
            pair.row(f"draft({draft.path.name})", alpha, ratio, read),
            *pair.ngram_rows(texts, [found.target for found in pairs], params),
            *self._other_alphas(pair, texts, params, done + 1.0 + _PLANNING),
        )
        ordered = sorted(unique.values(), key=lambda candidate: -candidate.predicted)
        return TunedSetting(params, acceptance, theory, tuple(ordered), alphas=alphas)

    def _other_alphas(
        self,
        pair: PairCosts,
        texts: Sequence[CalibrationText],
        params: SamplingParams,
        done: float,
    ) -> Iterator[DrafterAlpha]:
        """Let the other drafters draft for the same prompts; yield their alphas."""
        prompts = [text.tokens[: text.n_prompt] for text in texts]
        most = max(1, self._options.n_tokens // max(1, len(prompts)))
        for number, drafter in enumerate(self._options.others):
            self._tell(f"measuring alpha of {drafter}", done + number)
            found = measure_alpha(self._environment, drafter, prompts, params, max_tokens=most)
            operations, read = drafting_shares(found, pair.target, self._target)
            yield pair.row(drafter, found.alpha, operations, read, found.step_seconds)

    def _candidates(
        self, pairs: list[RankedPair], costs: RoundCosts, params: SamplingParams
    ) -> tuple[dict[str, tuple[float, ...]], list[Candidate]]:
        acceptance: dict[str, tuple[float, ...]] = {}
        candidates: list[Candidate] = []
        # Greedy distributions are point masses, which leave nothing to draw: the schemes do not
        # differ then.
        for sampling in _SCHEMES[:1] if params.is_greedy else _SCHEMES:
            vector = acceptance_by_rank(pairs, sampling, _RANKS).tolist()
            acceptance[sampling] = tuple(vector)
            # With a single rank the plan is a chain: the best one is tried beside the best tree.
            for ranks in (1, _RANKS) if self._target.can_branch else (1,):
                plan = plan_tree(
                    vector[:ranks],
                    costs,
                    sizes=_tree_sizes(costs),
                    max_depth=self._environment.bounded(_DEEPEST),
                    tolerance=_TOLERANCE,
                )
                if plan is not None:
                    candidates.append(_candidate(plan, sampling))
        return acceptance, candidates

    def _dynamic_candidates(
        self,
        draft: Model,
        texts: Sequence[CalibrationText],
        costs: RoundCosts,
        params: SamplingParams,
    ) -> list[Candidate]:
        """Return the best tree that grows by path probability, if one pays."""
        if not self._target.can_branch:
            return []
        sizes = _tree_sizes(costs)
        measured = []
        for topk in _DYNAMIC_TOPK:
            n_sequences, n_outputs = draft_size(DynamicShape(_DEEPEST_DYNAMIC, topk, max(sizes)))
            options = draft_context_options(self._context, draft)
            size = replace(options, n_sequences=n_sequences, n_outputs=n_outputs)
            with Context(draft, size) as context:
                measured.append(
                    measure_dynamic_acceptance(
                        context,
                        texts,
                        params,
                        topk=topk,
                        max_depth=_DEEPEST_DYNAMIC,
                        max_nodes=max(sizes),
                        target_vocab_size=self._target.vocabulary.size,
                        seconds=self._options.seconds * _GROWING_SHARE,
                    )
                )
        plan = plan_dynamic_tree(measured, costs, sizes=sizes, tolerance=_TOLERANCE)
        return [] if plan is None else [_candidate(plan, "argmax")]

    def try_out(self, planned: TunedSetting, prompts: list[list[int]], number: int) -> TunedSetting:
        """Run the most promising candidates, and put the fastest of them first."""
        params = planned.params
        drafting = [candidate for candidate in planned.candidates if candidate.options]
        known = [candidate for candidate in planned.candidates if not candidate.options]
        # The most promising of each kind, if it has a chance: chain, fixed tree, dynamic tree.
        firsts = {candidate.kind: candidate for candidate in reversed(drafting)}
        best = [candidate for candidate in drafting if candidate is firsts[candidate.kind]]
        tried = [plan for plan in best if plan.predicted > _CHANCE * drafting[0].predicted]
        done = (1.0 + _PLANNING + len(self._options.others)) * len(self._options.params)
        done += number * (_TRIES + _SHAPES)
        for index, candidate in enumerate(tried):
            what = f"running draft({candidate.options}) at temperature {params.temperature:g}"
            self._tell(what, done + _TRIES * index / len(tried))
            expression = f"draft({quoted(str(self._options.draft))}, {candidate.options})"
            with self._session(build_drafter(expression, self._environment)) as session:
                _, speed, length = self._answers(session, prompts, params)
            known.append(replace(candidate, measured=speed, mean_accepted_length=length))
        known.sort(key=lambda record: -record.speed)
        unknown = [candidate for candidate in drafting if candidate not in tried]
        found = replace(planned, candidates=(*known, *unknown))
        if not found.best.options:
            return found
        self._tell(f"trying a fixed shape at temperature {params.temperature:g}", done + _TRIES)
        return replace(found, shape=self._try_shape(found.best, prompts, params))

    def _try_shape(
        self, best: Candidate, prompts: list[list[int]], params: SamplingParams
    ) -> ShapeTrial:
        """Run a plan in evaluations of one width and of any, by turns."""
        expression = f"draft({quoted(str(self._options.draft))}, {best.options})"
        speeds: dict[Shape, list[float]] = {"free": [], "fixed": []}
        with ExitStack() as stack:
            sessions = {}
            for shape in speeds:
                weights = build_drafter(expression, self._environment)
                try:
                    sessions[shape] = stack.enter_context(self._session(weights, shape))
                except (OptionError, UnsupportedModelError) as error:
                    return ShapeTrial(left_out=str(error))
            for _ in range(_TURNS):
                for shape, session in sessions.items():
                    _, speed, _ = self._answers(session, prompts, params)
                    speeds[shape].append(speed or 0.0)
            width = sessions["fixed"].target.width or 0
        free, fixed = (statistics.median(found) for found in speeds.values())
        return ShapeTrial(width, free, fixed)

    def _answers(
        self, session: Session, prompts: list[list[int]], params: SamplingParams
    ) -> tuple[list[CalibrationText], float | None, float | None]:
        """Return the answers, tokens a second, and tokens a round; a short answer warms up."""
        session.stream(prompts[0], params, seed=1, max_tokens=4).drain()
        most = max(8, self._options.n_tokens // len(prompts))
        streams = (session.stream(prompt, params, seed=0, max_tokens=most) for prompt in prompts)
        results = [stream.drain() for stream in streams]
        texts = [
            CalibrationText((*prompt, *result.token_ids), len(prompt))
            for prompt, result in zip(prompts, results, strict=True)
            if result.token_ids
        ]
        tokens = sum(len(result.token_ids) for result in results)
        # Tokens over seconds in all: a mean of speeds would give short answers too much weight.
        seconds = sum(
            len(result.token_ids) / result.stats.tokens_per_second
            for result in results
            if result.stats.tokens_per_second
        )
        rounds = sum(result.stats.rounds for result in results)
        return texts, tokens / seconds if seconds else None, tokens / rounds if rounds else None

    def _wide_context(self, model: Model) -> Context:
        options = self._context
        if model is not self._target:
            options = draft_context_options(options, model)
        return Context(model, replace(options, n_outputs=max(MEASURED_SIZES)))

    @contextmanager
    def _session(self, weights: DrafterWeights, shape: Shape = "free") -> Iterator[Session]:
        """Yield a session, closed after the block with its drafter and the weights."""
        with closing(weights):
            drafter, rule = weights.start(), ExactRule()
            wider = None if self._curve is None else self._curve.wider
            with Session.open(
                self._target, drafter, self._context, rule, shape=shape, wider=wider
            ) as session:
                yield session


def _candidate(plan: TreePlan, sampling: TreeSampling) -> Candidate:
    """Return a plan as the options of a drafter expression: a chain if the tree is one."""
    shape, (n_nodes, depth) = plan.shape, plan.size
    kind: PlanKind
    if isinstance(shape, DynamicShape):
        kind, options = "dynamic", f"depth={depth}, topk={shape.topk}, nodes={n_nodes}"
    elif shape.n_leaves == 1:
        chain = "argmax" if sampling == "argmax" else "with"
        kind, options = "chain", f"n={depth}, sampling={chain}"
    else:
        kind, options = "tree", f'tree="{shape}", sampling={sampling}'
    worth = (plan.expected_tokens, plan.tokens_per_second)
    return Candidate(options, kind, sampling, n_nodes, depth, *worth)


def _tree_sizes(costs: RoundCosts) -> list[int]:
    """Return the numbers of nodes that were measured: the curve's sizes without the root."""
    return [size - 1 for size in costs.target.sizes[1:]]
