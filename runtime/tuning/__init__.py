"""Tuning: acceptance measured on texts, and the trees that are fastest on this machine."""

from specrun.runtime.tuning.dynamic_acceptance import (
    DynamicAcceptance,
    kept_nodes,
    measure_dynamic_acceptance,
)
from specrun.runtime.tuning.head_calibration import (
    HeadCalibration,
    HeadCalibrationOptions,
    calibrate_heads,
    features_along,
)
from specrun.runtime.tuning.head_guesses import guess_kinds
from specrun.runtime.tuning.rank_acceptance import (
    CalibrationText,
    LawPair,
    acceptance_by_rank,
    law_pairs,
    laws_along,
)
from specrun.runtime.tuning.tree_plan import (
    dynamic_round_seconds,
    plan_dynamic_tree,
    plan_tree,
    tokens_per_second,
)
from specrun.runtime.tuning.tuning import tune
