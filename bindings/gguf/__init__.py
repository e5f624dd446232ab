"""Headers of GGUF files, read and checked before any native code sees the file."""

from typing import TYPE_CHECKING

from specrun.bindings.faces import lazy_face

if TYPE_CHECKING:
    from specrun.bindings.gguf.header import (
        MAX_HEADER_BYTES,
        MAX_STRINGS,
        PADDED_PARAMETERS,
        GGUFHeader,
        TensorInfo,
        read_header,
    )
    from specrun.bindings.gguf.types import (
        BLOCK_SIZES,
        FILE_TYPE_NAMES,
        REMOVED_TENSOR_TYPES,
        TENSOR_TYPES,
        ArrayValue,
        MetadataValue,
        stored_bytes,
    )

__getattr__, __dir__ = lazy_face(__name__)
