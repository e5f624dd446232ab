"""GGUF files as they are written: metadata, tensors, names; and as the source of another."""

from specrun.convert.gguf.gguf_source import GGUFSource, require_whole, stored_numbers
from specrun.convert.gguf.model_name import (
    ModelName,
    file_name,
    loadable_name,
    name_of,
    safe_file_name,
)
from specrun.convert.gguf.writer import (
    FLOATS,
    STORED_TYPES,
    EarlySync,
    Metadata,
    PlannedTensor,
    Progress,
    replace_text,
    write_gguf,
)
