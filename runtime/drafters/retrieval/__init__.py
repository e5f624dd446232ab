"""Prompt lookup (LLMA) and REST: continuations copied from the text so far or from a datastore."""

from specrun.runtime.drafters.retrieval.answers import (
    MOST_TOKENS,
    AnswerStore,
    answers_file,
    kept_answers,
    newest,
    open_answers,
)
from specrun.runtime.drafters.retrieval.continuation import (
    LONGEST_MATCH,
    MATCH_PRIORS,
    Continuation,
    Evidence,
    TreeLimits,
    continuation_tree,
    teach,
)
from specrun.runtime.drafters.retrieval.datastore import (
    DEPTH,
    HEADER_BYTES,
    BuildProgress,
    ContextIndex,
    StoreHeader,
    build_store,
    key_width,
    open_mapped,
    open_store,
    order_by_context,
    read_reference,
    read_reference_tokens,
    read_store_header,
    text_pieces,
    verify_store,
    write_store_header,
)
from specrun.runtime.drafters.retrieval.ngram_index import NgramIndex, Realignment
from specrun.runtime.drafters.retrieval.prompt_lookup import PromptLookupDrafter, with_reference
from specrun.runtime.drafters.retrieval.rest import RestDrafter
