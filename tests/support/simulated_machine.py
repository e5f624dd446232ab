"""A simulated machine for searches: a cost curve, and drafters of known acceptance and cost.

What a sweep takes follows from these figures alone, so that it is known which choice must come out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from specrun.bench.accelerate.candidates import CutFound, FoundDrafter
from specrun.bench.accelerate.record import PLAIN
from specrun.bench.diagnosis.diagnosis import Work
from specrun.bindings.errors import OptionError, SpecrunError
from specrun.runtime.planning import Account, CostCurve, DraftPlan, expected_tokens
from specrun.runtime.planning.curves import DraftCost
from specrun.runtime.round.drafter import RoundOutcome
from specrun.runtime.trees import DraftTree

FLAT = CostCurve.flat([0.010, 0.0104, 0.0106, 0.0108, 0.011, 0.0112, 0.0115, 0.012])
STEEP = CostCurve.flat([0.010 * times for times in (1.0, 1.7, 1.8, 2.0, 2.2, 2.6, 3.0, 3.5, 4.0)])
"""SmolLM2-135M at F16 on two cores, and a curve as of a GPU."""

PYTHON_S = 0.0001
ROUNDS = 100


@dataclass(frozen=True, slots=True)
class Simulated:
    """A drafter: chains of `n`, `acceptance` of each token, in a `coverage` of the rounds.

    `seconds` is what a round's drafting takes. By `luck` the machine was less busy when it was
    measured. A `fault` says why it cannot be opened.
    """

    acceptance: float = 0.0
    n: int = 0
    coverage: float = 1.0
    seconds: float = 0.0
    luck: float = 1.0
    fault: str = ""

    def work(self, curve: CostCurve, slow: float = 1.0) -> Work:
        """Return what 100 rounds take."""
        slow /= self.luck
        drafting = round(ROUNDS * self.coverage) if self.n else 0
        per_round = expected_tokens(self.acceptance, self.n)
        tokens = round(ROUNDS - drafting + drafting * per_round)
        target = drafting * curve.seconds(1 + self.n) + (ROUNDS - drafting) * curve.seconds(1)
        drafter, python = drafting * self.seconds, ROUNDS * PYTHON_S
        accepted = tokens - ROUNDS
        parts = (slow * target, slow * drafter, slow * python)
        tests = round(accepted / self.acceptance) if self.acceptance else drafting
        return Work(
            tokens, ROUNDS, drafting, drafting * self.n, tests, accepted, sum(parts), *parts
        )


@dataclass
class SimulatedMachine:
    """A machine that computes, in the place of `ThisMachine`.

    `drafters` are by workload, then by expression, those that are missing draft nothing; `found`
    maps what is found to its plans, `cut_found` is the best cut, None: the model cannot be cut. The
    sweep numbered `interrupt_at` is interrupted. If it `takes_all`, steps before the sweeps take
    all the seconds that they are given. `called` lists what was asked for.
    """

    costs: CostCurve
    drafters: Mapping[str, Mapping[str, Simulated]]
    found: Mapping[FoundDrafter, Sequence[str] | SpecrunError] = field(default_factory=dict)
    cut_found: CutFound | None = None
    trained: Sequence[str] = ()
    costs_beside: CostCurve | None = None
    interrupt_at: int | None = None
    called: list[str] = field(default_factory=list)
    clock: float = 0.0
    n_sweeps: int = 0
    takes_all: bool = False

    def now(self) -> float:
        return self.clock

    def curve(self, seconds: float) -> CostCurve:
        self.called.append("curve")
        self._take(seconds)
        return self.costs

    def curve_beside(self) -> CostCurve | None:
        return self.costs_beside

    def look(self) -> list[FoundDrafter]:
        return list(self.found)

    def _take(self, seconds: float) -> None:
        """Let time pass, if steps take what they may."""
        self.clock += seconds if self.takes_all else 0.0

    def plans(self, found: FoundDrafter, seconds: float) -> Sequence[str]:
        self.called.append(f"plans {found.name}")
        self._take(seconds)
        plans = self.found[found]
        if isinstance(plans, SpecrunError):
            raise plans
        return plans

    def cut(self, seconds: float) -> CutFound:
        self.called.append("cut")
        self._take(seconds)
        if self.cut_found is None:
            raise OptionError("it has one layer: there is none to skip")
        return self.cut_found

    def train(self, hours: float) -> Sequence[str]:
        self.called.append(f"train {hours:g}")
        self._take(3600.0 * hours)
        if not self.trained:
            raise OptionError("it cannot be trained")
        return self.trained

    def sweep(
        self, temperature: float, workload: str, drafters: Sequence[str], seed: int, seconds: float
    ) -> dict[str, Work | str]:
        if self.n_sweeps == self.interrupt_at:
            self.interrupt_at = None
            raise KeyboardInterrupt
        self.n_sweeps += 1
        self.called.append(f"sweep {workload} {temperature:g} {seed}")
        # All of a repetition are slowed alike: by what else runs on the machine then.
        slow = 1.0 + 0.5 * (seed % 2)
        found: dict[str, Work | str] = {}
        for name in drafters:
            drafter = self.drafters[workload].get(name, Simulated())
            found[name] = drafter.fault or drafter.work(self.costs, slow)
            self.clock += 0.0 if drafter.fault else drafter.work(self.costs, slow).seconds
        assert PLAIN in found
        return found


class Endless(Account):
    """May lose anything."""

    room = 1.0  # type: ignore[assignment]


def draft_cost(step: float, *, of_any_depth: bool = False) -> DraftCost:
    """Return the cost of a drafter that takes so many seconds for a token or depth.

    Or for a draft `of_any_depth`.
    """
    return DraftCost(lambda depth: step if of_any_depth else depth * step, lambda: 1.0)


def end_chain(plan: DraftPlan, drafted: int, accepted: int) -> None:
    """End a round of a plan whose first tokens, of so many, were accepted."""
    tree = plan.drafted(DraftTree.chain([1] * drafted))
    text = [0, *([1] * accepted), 2]
    plan.observe(RoundOutcome(text, tree, tuple(range(accepted)), 2, None))  # type: ignore[arg-type]
