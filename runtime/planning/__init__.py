"""How much to draft: cost curves, trees that pay for them, accounts, theory and stored plans."""

from specrun.runtime.planning.acceptance import MatchAcceptance
from specrun.runtime.planning.account import SHARE, SHARES_OF_AUTO, START, TRUST, Account
from specrun.runtime.planning.adaptive_exit import AdaptiveExit, AdaptiveExitOptions
from specrun.runtime.planning.curves import (
    STALL,
    TYPICAL_CPU,
    TYPICAL_GPU,
    CostCurve,
    LiveCurve,
    RoundCosts,
    lower_median,
    typical_curve,
)
from specrun.runtime.planning.default_drafter import EDITED, QUESTIONS, drafter_for, workload_of
from specrun.runtime.planning.draft_plan import MOST_DRAFTED, DraftPlan, Plan
from specrun.runtime.planning.measure import (
    CONTACT_SIZES,
    MEASURED_SIZES,
    Contact,
    EvaluationTimes,
    contact_curve,
    measure_cost_curve,
    measure_target_costs,
    sized_to_measure,
    target_curve,
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
from specrun.runtime.planning.profile import (
    ANY,
    Choice,
    Count,
    Number,
    Profile,
    StoredPlan,
    decoded,
    describe_file,
    describe_settings,
    known_curve,
    known_profile_file,
    load_curve,
    load_plans,
    load_profile,
    measured_acceptance,
    profile_file,
    save_curve,
    save_plans,
    save_profile,
    tuned_plan,
    write_json,
)
from specrun.runtime.planning.theory import (
    BestLengths,
    ChainInputs,
    ChainRow,
    ChainTheory,
    MemoryTraffic,
    best_lengths,
    bytes_per_position,
    chain_row,
    chain_theory,
    expected_experts,
    expected_tokens,
    memory_traffic,
    mixture,
)
