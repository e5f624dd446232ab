"""Prompt lookup (LLMA) and REST: continuations copied from the text so far or from a datastore."""

from specrun.runtime.drafters.retrieval.build import with_reference
from specrun.runtime.drafters.retrieval.continuation import (
    Continuation,
    TreeLimits,
    continuation_tree,
    teach,
)
from specrun.runtime.drafters.retrieval.match_trust import (
    LONGEST_MATCH,
    Evidence,
    MatchTrust,
    Standing,
)
from specrun.runtime.drafters.retrieval.ngram_index import NgramIndex, Realignment
from specrun.runtime.drafters.retrieval.prompt_lookup import PromptLookupDrafter
from specrun.runtime.drafters.retrieval.rest import RestDrafter
