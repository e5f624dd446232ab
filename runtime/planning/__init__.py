"""How much to draft: cost curves, trees that pay for them, accounts, theory and stored plans."""

from specrun.runtime.planning.account import ASKING, START, Account
from specrun.runtime.planning.curves import STALL, CostCurve, LiveCurve, RoundCosts, lower_median
from specrun.runtime.planning.draft_plan import MOST_DRAFTED, DraftPlan
from specrun.runtime.planning.measure import (
    MEASURED_SIZES,
    EvaluationTimes,
    measure_cost_curve,
    measure_target_costs,
    sized_to_measure,
)
from specrun.runtime.planning.optimal_trees import (
    MAX_PLANNED_DEPTH,
    TYPICAL_ACCURACY,
    TYPICAL_PATH_ACCURACY,
    HeadPlan,
    SequoiaProgramme,
    best_tree,
    plan_medusa_tree,
    typical_acceptance,
)
from specrun.runtime.planning.plans import (
    ACCEPTED,
    TYPICAL_CPU,
    TYPICAL_GPU,
    Candidate,
    DrafterAlpha,
    PlanKind,
    ShapeTrial,
    TunedSetting,
    TuneOptions,
    TuneResult,
    WeightType,
    describe_file,
    describe_settings,
    known_curve,
    load_curve,
    load_plans,
    measured_acceptance,
    measured_or_typical,
    plan_file,
    same_model,
    save_curve,
    save_plans,
    tuned_plan,
    typical_curve,
    weight_types,
    write_json,
)
from specrun.runtime.planning.theory import (
    BestLengths,
    ChainInputs,
    ChainRow,
    MemoryTraffic,
    acceptance_probability,
    best_lengths,
    bytes_per_position,
    chain_row,
    chain_theory,
    expected_experts,
    expected_tokens,
    memory_traffic,
    mixture,
    predicted_tokens_per_second,
    tokens_per_second_by_bandwidth,
)
