"""Tuning: acceptance measured on texts, and the trees that are fastest on this machine."""

from specrun.runtime.tuning.acceptance import (
    ROWS_AT_ONCE,
    CalibrationText,
    DrawnAlpha,
    DynamicAcceptance,
    RankedPair,
    acceptance_by_rank,
    checked_prompts,
    drafting_shares,
    kept_nodes,
    law_pairs,
    laws_along,
    measure_alpha,
    measure_dynamic_acceptance,
    require_law,
    scored_logits,
)
from specrun.runtime.tuning.heads import (
    HeadCalibration,
    HeadCalibrationOptions,
    calibrate_heads,
    calibrated_layers,
    features_along,
    guess_kinds,
    written_texts,
)
from specrun.runtime.tuning.results import (
    ACCEPTED,
    Candidate,
    ShapeTrial,
    TunedSetting,
    TuneOptions,
    TuneResult,
    WeightType,
    keep_plans,
    same_model,
    weight_types,
)
from specrun.runtime.tuning.tree_plan import (
    plan_dynamic_tree,
    plan_tree,
    tokens_per_second,
)
from specrun.runtime.tuning.tuning import WorkLeft, tune
