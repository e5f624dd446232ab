"""Timing proxies for the drafter, the target and the rule of the decoding loop as it is shipped.

Each proxy adds the seconds of its calls to a `Stopwatch`. Native evaluation is told by the counters
of context and drafter and subtracted; what no proxy saw is the loop's own time. With a simulated
device what counts is the wall time that it was not busy. What proxies do lies within a round, so
they only add and note: everything is worked out between two rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from measure.overhead.device import DeviceCounts
from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.embedding_inputs import EmbeddingInputs
from specrun.runtime.acceptance import (
    Acceptance,
    AcceptanceRule,
    LawAt,
    LawPair,
    PairAt,
    PairRule,
    Rule,
)
from specrun.runtime.laws import Law, NoiseSource
from specrun.runtime.laws.law import RowLaws
from specrun.runtime.round import CachedText, Drafter, DraftRequest, TargetModel
from specrun.runtime.round.drafter import RoundOutcome
from specrun.runtime.round.target import EvaluatedRows
from specrun.runtime.trees import DraftTree

PARTS = ("draft", "batch", "law", "acceptance", "commit", "text")
"""The parts of a round outside native evaluation."""


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Seconds of one round: the parts outside native evaluation, and native evaluation itself.

    `draft` is propose and observe, `batch` filling and reading the target's evaluation, `law`
    turning logits into laws one by one, `acceptance` the rest of the rule (with its laws, if cuts
    of the rows alone make them), `commit` keeping the accepted path, `text` all that lies
    between: the loop, text, events, statistics.
    """

    draft: float
    batch: float
    law: float
    acceptance: float
    commit: float
    text: float
    target_native: float
    drafter_native: float
    n_drafted: int
    n_accepted: int
    device: DeviceCounts

    @property
    def overhead(self) -> float:
        """Wall time of the round outside native evaluation."""
        return float(sum(getattr(self, part) for part in PARTS))

    @property
    def exposed(self) -> float:
        """Time outside native evaluation that the device was idle: it waited for us."""
        return self.overhead + self.target_native - self.device.hidden_s - self.device.busy_s

    @property
    def share(self) -> float:
        """The share of a round that is ours, drafters' native evaluation left out."""
        return self.exposed / (self.exposed + self.device.busy_s)


class Stopwatch:
    """Sums of what the proxies time.

    A round lasts from one `Drafter.propose` to the next or, where the drafter is not asked, from
    the evaluation.
    """

    def __init__(
        self, target: Callable[[], float], drafter: Callable[[], float], device: DeviceCounts
    ) -> None:
        self.rounds: list[RoundTimes] = []
        self._native = (target, drafter)  # seconds in native evaluation so far
        self._device = device
        self._device_before = device.copy()
        self._started: float | None = None
        self._native_before = (0.0, 0.0)
        # Seconds in each of them, of this round.
        self.draft = self.evaluate = self.law = self.rule = self.commit = 0.0
        self.outcome: RoundOutcome | None = None  # if the drafter was told
        self._is_drafted = False  # a drafter was asked since the last evaluation

    @property
    def drafter_native(self) -> float:
        """Seconds of the drafter's native evaluation so far."""
        return self._native[1]()

    def begin_evaluation(self) -> None:
        """Start the next round, unless a drafter that was asked has done so."""
        if not self._is_drafted:
            self.begin_round()
        self._is_drafted = False

    def begin_round(self) -> None:
        """Finish the round under way, if any, and start the next."""
        self._is_drafted = True
        now = time.perf_counter()
        native = (self._native[0](), self._native[1]())
        if self._started is not None:
            self._finish(now - self._started, native)
        self._native_before = native
        self._device_before = self._device.copy()
        self.draft = self.evaluate = self.law = self.rule = self.commit = 0.0
        self.outcome = None
        self._started = time.perf_counter()

    def abandon(self) -> None:
        """Forget the round under way: what follows it is not the loop's time."""
        self._started = None

    def _finish(self, wall: float, native: tuple[float, float]) -> None:
        target, drafter = (
            now - before for now, before in zip(native, self._native_before, strict=True)
        )
        outcome = self.outcome
        self.rounds.append(
            RoundTimes(
                draft=self.draft - drafter,
                batch=self.evaluate - target,
                law=self.law,
                # The laws are asked for by the rule, so they are part of its time.
                acceptance=self.rule - self.law,
                commit=self.commit,
                text=wall - self.draft - self.evaluate - self.rule - self.commit,
                target_native=target,
                drafter_native=drafter,
                n_drafted=0 if outcome is None else outcome.tree.n_candidates,
                n_accepted=0 if outcome is None else len(outcome.path),
                device=self._device.since(self._device_before),
            )
        )


class TimedDrafter(Drafter):
    """A drafter with its `propose` and `observe` timed."""

    def __init__(self, inner: Drafter, watch: Stopwatch) -> None:
        self._inner = inner
        self._watch = watch
        self.name = inner.name
        self.max_leaves = inner.max_leaves
        self.max_nodes = inner.max_nodes
        self.needs_hidden_states = inner.needs_hidden_states
        self.remark = inner.remark
        self.layer_inputs = inner.layer_inputs
        self.reads_logits = inner.reads_logits
        self.keeps_rows = inner.keeps_rows
        self.embedding_inputs, self.pause = inner.embedding_inputs, inner.pause

    @property
    def native_seconds(self) -> float:
        """The wrapped drafter's."""
        return self._inner.native_seconds

    def begin(self, tokens: Sequence[int]) -> None:
        """Pass on; prompts are not part of a round."""
        self._inner.begin(tokens)

    def learn_prompt(self, start: int, rows: EvaluatedRows, count: int) -> None:
        """Pass on; prompts are not part of a round."""
        self._inner.learn_prompt(start, rows, count)

    def propose(self, request: DraftRequest) -> DraftTree:
        """Start a round and time the proposal."""
        watch = self._watch
        watch.begin_round()
        started = time.perf_counter()
        tree = self._inner.propose(request)
        watch.draft += time.perf_counter() - started
        return tree

    def observe(self, outcome: RoundOutcome) -> None:
        """Time the observation."""
        watch = self._watch
        watch.outcome, started = outcome, time.perf_counter()
        self._inner.observe(outcome)
        watch.draft += time.perf_counter() - started

    def close(self) -> None:
        """Close the wrapped drafter."""
        self._inner.close()


class TimedTarget(TargetModel):
    """The target with its evaluations and commits timed."""

    def __init__(
        self, context: Context, watch: Stopwatch, inputs: EmbeddingInputs | None = None
    ) -> None:
        super().__init__(context, inputs)
        self._watch = watch

    def evaluate(self, text: CachedText, tree: DraftTree) -> EvaluatedRows:
        """Time filling the batch and evaluating it."""
        watch = self._watch
        watch.begin_evaluation()
        started = time.perf_counter()
        rows = super().evaluate(text, tree)
        watch.evaluate += time.perf_counter() - started
        return rows

    def commit(self, text: CachedText, tree: DraftTree, path: Sequence[int]) -> None:
        """Time keeping the accepted path."""
        started = time.perf_counter()
        super().commit(text, tree, path)
        self._watch.commit += time.perf_counter() - started


class TimedRule:
    """A rule with its walk timed, and within it the laws it asks for."""

    def __init__(self, inner: AcceptanceRule, watch: Stopwatch) -> None:
        self._inner = inner
        self._watch = watch
        self.name = inner.name
        self.exact = inner.exact

    def accept(
        self, tree: DraftTree, law_at: LawAt, noise: NoiseSource, position: int
    ) -> Acceptance:
        """Time the whole walk."""
        watch, laws = self._watch, law_at
        # Cuts of rows are a part of the walk: timed one by one, the clock would cost as much.
        if not isinstance(law_at, RowLaws):

            def laws(node: int) -> Law:
                started = time.perf_counter()
                law = law_at(node)
                watch.law += time.perf_counter() - started
                return law

        started = time.perf_counter()
        accepted = self._inner.accept(tree, laws, noise, position)
        watch.rule += time.perf_counter() - started
        return accepted


class TimedPairRule(PairRule):
    """A rule that weighs the drafter's laws too, timed as `TimedRule` times others."""

    def __init__(self, inner: PairRule, watch: Stopwatch) -> None:
        self._inner, self._watch = inner, watch
        self.name = inner.name
        self.reads_raw_draft, self.takes_points = inner.reads_raw_draft, inner.takes_points

    def law(self, pair: LawPair) -> Law:
        """Pass on."""
        return self._inner.law(pair)

    def accept(
        self, tree: DraftTree, pair_at: PairAt, noise: NoiseSource, position: int
    ) -> Acceptance:
        """Time the whole walk, less what the drafter evaluates on the way."""
        watch = self._watch

        def timed_pair(node: int) -> LawPair:
            started = time.perf_counter()
            pair = pair_at(node)
            watch.law += time.perf_counter() - started
            return pair

        started, native = time.perf_counter(), watch.drafter_native
        accepted = self._inner.accept(tree, timed_pair, noise, position)
        # Laws are where the drafter is evaluated, once at most: after a whole draft.
        native = watch.drafter_native - native
        watch.rule += time.perf_counter() - started - native
        watch.law -= native
        watch.draft += native
        return accepted


def timed_rule(rule: Rule, watch: Stopwatch) -> Rule:
    """Return a rule that is timed."""
    if isinstance(rule, PairRule):
        return TimedPairRule(rule, watch)
    return TimedRule(rule, watch)
