"""Drafters made of drafters: cascade, relay, ensemble, Ouroboros, auto."""

from specrun.runtime.drafters.combinators.auto import (
    ArmChooser,
    AutoDrafter,
    ChoiceLog,
    read_choice_logs,
)
from specrun.runtime.drafters.combinators.bandit import Arm, ArmForecast
from specrun.runtime.drafters.combinators.build import auto_expression
from specrun.runtime.drafters.combinators.cascade import CascadeDrafter, DraftModelTarget
from specrun.runtime.drafters.combinators.ensemble import EnsembleDrafter, merge_trees
from specrun.runtime.drafters.combinators.filled import FilledDrafter
from specrun.runtime.drafters.combinators.members import combined, first_path, graft
from specrun.runtime.drafters.combinators.ouroboros import (
    OuroborosDrafter,
    PhraseDrafter,
    matched_phrases,
    phrase_tree,
    refined_phrases,
)
from specrun.runtime.drafters.combinators.relay import RelayDrafter
