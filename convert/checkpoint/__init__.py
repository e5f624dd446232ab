"""Hugging Face checkpoints: folders, safetensors and pickled files, tensors read in pieces."""

from specrun.convert.checkpoint.checkpoint import Checkpoint, open_checkpoint
from specrun.convert.checkpoint.json_file import (
    JsonObject,
    is_positive,
    read_json_object,
    read_small_file,
)
from specrun.convert.checkpoint.number_types import bfloat16_bits, raw_stored_as, stored_as, widened
from specrun.convert.checkpoint.pickled_file import PICKLE_ENDINGS, read_pickle
from specrun.convert.checkpoint.safetensors_file import read_array, read_safetensors
from specrun.convert.checkpoint.source_tensor import (
    NUMBER_TYPES,
    PIECE_BYTES,
    SOURCE_KEY,
    SourceDigest,
    SourceTensor,
)
