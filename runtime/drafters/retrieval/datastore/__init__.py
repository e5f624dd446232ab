"""Corpora as suffix arrays, ordered by context: REST's datastores, prompt lookup's references."""

from specrun.runtime.drafters.retrieval.datastore.build_store import BuildProgress
from specrun.runtime.drafters.retrieval.datastore.context_index import (
    DEPTH,
    ContextIndex,
    key_width,
    order_by_context,
)
from specrun.runtime.drafters.retrieval.datastore.corpus_text import (
    read_reference,
    read_reference_tokens,
    text_pieces,
)
from specrun.runtime.drafters.retrieval.datastore.store_file import (
    HEADER_BYTES,
    StoreHeader,
    open_mapped,
    open_store,
    read_store_header,
    verify_store,
    write_store_header,
)
