"""The environment of drafters' builders: target, costs, context settings and default files."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import OptionError
from specrun.bindings.models.model import Model
from specrun.runtime.drafters.batching import DraftMeeting
from specrun.runtime.language import Expression, find_method
from specrun.runtime.memory.fit import LayerCount, LoadOptions
from specrun.runtime.models.names import locate_model
from specrun.runtime.planning import MOST_DRAFTED, CostCurve, DraftPlan, LiveCurve, known_curve
from specrun.runtime.planning.curves import DraftCost
from specrun.runtime.planning.kept_states import kept_states
from specrun.runtime.round.drafter import DrafterWeights, Pace, make_all
from specrun.runtime.round.padding import Shape

_FIXED_WIDTH = 8  # CPUs pay twice as much for 16 tokens, for few more that are accepted
_LEAST_STEP = 0.03  # a plain round's share that the least evaluation of a drafter takes


class Places(Protocol):
    """Texts in which the places most like the end of a text are found."""

    def nearest(
        self, context: Sequence[int], count: int, length: int, min_match: int
    ) -> list[tuple[int, list[int]]]:
        """Return up to `count` places, each match's length and its continuation."""
        ...


@dataclass(frozen=True, slots=True)
class DraftEnvironment:
    """The inputs of builders; `default_files` are the demo's, by the names of methods.

    `costs` are those of the target's evaluations, None: as it was measured on this machine
    (`measured`, or else the stored ones), or else a typical curve, which rounds then correct
    (`learnt`). Drafters that measure read `clock`; if nothing may be chosen `by_clock`, drafts
    depend on counts alone, as under rules whose distribution is the drafter's too; `keeps_rows`:
    such a rule reads the drafter's own rows. `shape` sets whether all evaluations have one width.
    At a `meeting` draft models of several conversations are evaluated together. Drafts of a
    recurrent target have at most `n_kept` tokens if no number is given, because each keeps a state;
    None: as many as pay and fit. The empty places of a block may be filled up (`may_fill`,
    `fills`). `answers` are those that are kept, for prompt lookups.
    """

    target: Model
    context: ContextOptions
    n_gpu_layers: LayerCount = "auto"
    use_mmap: bool = True
    default_files: Mapping[str, Path] | None = None
    costs: CostCurve | None = None
    measured: CostCurve | None = None
    clock: Callable[[], float] = time.perf_counter
    by_clock: bool = True
    learnt: LiveCurve | None = None
    shape: Shape = "free"
    keeps_rows: bool = False
    meeting: DraftMeeting | None = None
    n_kept: int | None = None
    may_fill: bool = True
    answers: Places | None = None

    @classmethod
    def of(
        cls,
        target: Model,
        context: ContextOptions,
        options: LoadOptions,
        **others: Any,  # noqa: ANN401 - the other fields
    ) -> DraftEnvironment:
        """Return the environment of drafters that are loaded with these options."""
        layers, use_mmap = options.n_gpu_layers_draft, options.use_mmap
        return cls(target, context, n_gpu_layers=layers, use_mmap=use_mmap, **others)

    @property
    def n_ctx(self) -> int:
        """How many tokens a conversation may have."""
        return self.context.n_ctx or self.target.n_ctx_train

    @property
    def curve(self) -> CostCurve:
        """The cost of the target's evaluations: learnt while decoding, if drafters may be timed.

        If they may not it stays as it was known, whatever rounds take.
        """
        return self.known if self.learnt is None else self.learnt

    @property
    def known(self) -> CostCurve:
        """The known cost of the target's evaluations before anything was decoded.

        It may descend if batches cannot be padded: a recurrent state takes back the tokens that
        fill them, and no more than it can.
        """
        if self.costs is not None:
            return self.costs
        if self.target.can_branch:
            return self._known.as_padded()
        n_texts = 1 if self.meeting is None else self.meeting.n_texts
        n_kept = self.n_kept if self.n_kept and self.target.can_roll_back else 0
        return self._known.as_padded(n_texts * (1 + n_kept))

    @property
    def wider(self) -> Callable[..., int]:
        """How many tokens to evaluate in place of a number of them (`CostCurve.wider`)."""
        return (self.costs or self._known).wider

    @property
    def _known(self) -> CostCurve:
        target = self.target
        return self.measured or known_curve(target.path, self.context, target.n_gpu_layers)

    @property
    def fills(self) -> bool:
        """Whether places that a drafter of this environment leaves empty may be filled.

        Only if evaluations were measured, and under exact rules.
        """
        return (
            self.by_clock
            and not self.keeps_rows
            and self.may_fill
            and self.shape == "free"
            and self.costs is None
            and bool(self.known.spread)
        )

    @property
    def most_drafted(self) -> int:
        """The most tokens drafted if no number is given: a fixed shape's rounds cost as much."""
        usual = _FIXED_WIDTH if self.shape == "fixed" else MOST_DRAFTED + 1
        width = self.shape if isinstance(self.shape, int) else usual
        return self.bounded(max(1, min(width, self.context.n_batch) - 1))

    def bounded(self, n_tokens: int) -> int:
        """Return a usual length of drafts, or less for a target with a recurrent state."""
        if self.target.can_branch:
            return n_tokens
        if self.n_kept is not None:
            return min(n_tokens, self.n_kept)
        return min(n_tokens, kept_states(self.target.path, self.known, self.target.placed.offload))

    def draft_plan(
        self,
        share: float,
        text_share: Callable[[], float] | None = None,
        *,
        depth: int | None = None,
        rounds: Callable[[int], float] | None = None,
    ) -> DraftPlan:
        """Return the plan of a drafter of chains, or of trees at most `depth` deep.

        It reads `share` of the target for a token of a chain or a depth of a tree. `text_share` are
        the keys and values of the text, which evaluations of the target read in addition to its
        weights, as a share of these. It is computed in every round, if drafters read less of it.
        `rounds` takes the place of `share` if the cost of depths is no sum of shares.
        """
        step = max(share, _LEAST_STEP)
        cost: Callable[[int], float] = lambda n: n * step  # noqa: E731
        if rounds is not None:
            cost = lambda n: max(rounds(n), _LEAST_STEP)  # noqa: E731
        elif depth is not None:
            cost = lambda n: max(n * share, _LEAST_STEP)  # noqa: E731
        together = self.meeting if self.by_clock else None
        learnt = self._seconds(self.curve, text_share, together)
        # How many tokens are drawn decides which text a seed gives: neither the clock may decide it
        # nor how many other conversations there are.
        drawn = self._seconds(self.known, text_share, None), self._draft_cost(self.known, cost)
        learnt_cost = self._draft_cost(self.curve, cost)
        return DraftPlan(learnt, learnt_cost, self.most_drafted, depth=depth, drawn=drawn)

    def _draft_cost(self, curve: CostCurve, rounds: Callable[[int], float]) -> DraftCost:
        """Return the time of drafts, learnt if the target's rounds are timed."""
        if not isinstance(curve, LiveCurve):
            return DraftCost(rounds, lambda: curve.seconds(1))
        return DraftCost(rounds, lambda: curve.seconds(1), self.clock, lambda: curve.is_timed)

    def pace_of(self, *, chooses: bool, draws: bool = False) -> Pace:
        """Return the pace of a drafter that `chooses` how much it drafts or not, and may draw."""
        if not chooses:
            return "counted"
        return "greedy" if draws else "compared"

    def share(self) -> float:
        """Return how much of a plain round's time it takes with all that draft now."""
        if self.meeting is None:
            return 1.0
        n = self.meeting.n_drafting
        return self.known.seconds(n) / (n * self.known.seconds(1))

    def _seconds(
        self,
        curve: CostCurve,
        text_share: Callable[[], float] | None,
        meeting: DraftMeeting | None,
    ) -> Callable[[int], float]:
        """Return the seconds of an evaluation of n tokens, below a text of any length.

        If several conversations are evaluated together, it is the share of each, if all have n.
        """
        seconds: Callable[[int], float] = curve.seconds
        if meeting is not None:
            seconds = lambda n: curve.seconds(n * meeting.n_drafting) / meeting.n_drafting  # noqa: E731
        if self.shape != "free":
            # A fixed width costs the same whatever is drafted.
            fixed = curve.seconds(self.most_drafted + 1)
            seconds = lambda _: fixed  # noqa: E731
        if text_share is None:
            return seconds
        plain = curve.seconds(1)
        return lambda n: seconds(n) + plain * text_share()


BuildPart = Callable[[Expression, DraftEnvironment], DrafterWeights]
"""Builds a part of an expression: the function with which combinators build their members."""


def build_parts(
    expressions: Sequence[Expression], env: DraftEnvironment, build: BuildPart
) -> list[DrafterWeights]:
    """Build several parts of an expression; closes those already built when one fails."""
    return make_all(functools.partial(build, part, env) for part in expressions)


def file_of(expression: Expression, env: DraftEnvironment) -> Path:
    """Return the file that an expression names, or the demo's own for this kind of drafter."""
    if expression.arguments:
        return Path(expression.arguments[0].atom).expanduser()
    default = (env.default_files or {}).get(expression.atom)
    if default is None:
        file = find_method(expression.atom).file
        request = "there is no file to name" if file is None else file.request
        raise OptionError(f"{expression}: {request}")
    return default


def model_file_of(expression: Expression, env: DraftEnvironment) -> Path:
    """Return the file of a model or heads; an expression may also name it as `locate_model` does.

    That is `hf:OWNER/REPO:QUANT`, or an unambiguous name of a model that is stored here.
    """
    return locate_model(file_of(expression, env))
