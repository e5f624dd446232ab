"""A smaller model drafts chains (Leviathan et al. 2023) and trees, also of another vocabulary."""

from specrun.runtime.drafters.draft_model.build import (
    USUAL_LENGTH,
    ChainOptions,
    chain_options,
    draft_context_options,
    open_draft_model,
    plan_draft,
)
from specrun.runtime.drafters.draft_model.drafter import (
    AdaptiveExit,
    AdaptiveExitOptions,
    DraftSampling,
)
from specrun.runtime.drafters.draft_model.state import DraftModelState, DraftTreeState
from specrun.runtime.drafters.draft_model.tree import DraftTreeDrafter, draft_size
from specrun.runtime.drafters.draft_model.vocabulary import DraftPair
