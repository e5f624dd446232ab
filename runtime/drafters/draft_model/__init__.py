"""A small model of the same vocabulary drafts chains and trees (Leviathan et al. 2023;
SpecInfer)."""

from specrun.runtime.drafters.draft_model.adaptive_exit import AdaptiveExit, AdaptiveExitOptions
from specrun.runtime.drafters.draft_model.build import (
    ChainOptions,
    chain_options,
    draft_context_options,
    open_draft_model,
)
from specrun.runtime.drafters.draft_model.chain import DraftSampling
from specrun.runtime.drafters.draft_model.state import DraftModelState, DraftTreeState
from specrun.runtime.drafters.draft_model.tree import DraftTreeDrafter, draft_size

__all__ = [
    "AdaptiveExit",
    "AdaptiveExitOptions",
    "ChainOptions",
    "DraftModelState",
    "DraftSampling",
    "DraftTreeDrafter",
    "DraftTreeState",
    "chain_options",
    "draft_context_options",
    "draft_size",
    "open_draft_model",
]
