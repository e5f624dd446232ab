"""Hugging Face checkpoints: folders, safetensors and pickled files, tensors read in pieces."""

from specrun.convert.checkpoint.checkpoint import (
    PICKLE_ENDINGS,
    Checkpoint,
    load_pickle,
    open_checkpoint,
    read_array,
    read_pickle,
    read_safetensors,
)
from specrun.convert.checkpoint.json_file import (
    JsonObject,
    is_positive,
    read_json_object,
    read_small_file,
)
from specrun.convert.checkpoint.mxfp4 import block_numbers, gguf_blocks
from specrun.convert.checkpoint.source_tensor import (
    NUMBER_TYPES,
    PIECE_BYTES,
    SOURCE_KEY,
    ReplacedRow,
    SourceDigest,
    SourceTensor,
    bfloat16_bits,
    raw_stored_as,
    stored_as,
    widened,
)
