"""A smaller model drafts chains (Leviathan et al. 2023) and trees, also of another vocabulary."""

from specrun.runtime.drafters.draft_model.build import (
    USUAL_LENGTH,
    chain_options,
    draft_context_options,
    open_draft_model,
    plan_draft,
    remark_on_context,
    window_beyond,
)
from specrun.runtime.drafters.draft_model.source import DraftModelSource, draft_size
from specrun.runtime.drafters.draft_model.vocabulary import DraftPair
