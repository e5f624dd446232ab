"""Costs of evaluations on this machine, and trees that pay for them: Sequoia, Medusa's tree."""

from specrun.runtime.costs.account import ASKING, START, Account
from specrun.runtime.costs.curves import CostCurve, RoundCosts
from specrun.runtime.costs.live_curve import STALL, LiveCurve, lower_median
from specrun.runtime.costs.measure import (
    MEASURED_SIZES,
    EvaluationTimes,
    measure_cost_curve,
    measure_target_costs,
)
from specrun.runtime.costs.medusa_tree import (
    TYPICAL_ACCURACY,
    TYPICAL_PATH_ACCURACY,
    HeadPlan,
    plan_medusa_tree,
)
from specrun.runtime.costs.sequoia import (
    MAX_PLANNED_DEPTH,
    SequoiaProgramme,
    best_tree,
    typical_acceptance,
)
from specrun.runtime.costs.stored_curves import (
    TYPICAL_CPU,
    TYPICAL_GPU,
    known_curve,
    load_curve,
    measured_or_typical,
    save_curve,
    typical_curve,
)
from specrun.runtime.costs.theory import (
    acceptance_probability,
    chain_theory,
    expected_tokens,
    predicted_tokens_per_second,
)
from specrun.runtime.costs.tune_result import (
    Candidate,
    DrafterAlpha,
    PlanKind,
    ShapeTrial,
    TunedSetting,
    TuneOptions,
    TuneResult,
)
from specrun.runtime.costs.tuned import (
    describe_settings,
    load_plans,
    measured_acceptance,
    plan_file,
    save_plans,
    tuned_plan,
)
from specrun.runtime.costs.weight_types import ACCEPTED, WeightType, weight_types
