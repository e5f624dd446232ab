"""llama.cpp's quantizer, in a process of its own, and ggml's conversion of single rows."""

from typing import TYPE_CHECKING

from specrun.bindings.faces import lazy_face

if TYPE_CHECKING:
    from specrun.bindings.quantizer.quantizer import (
        COPY,
        FILE_TYPE_ALIASES,
        FILE_TYPES,
        TENSOR_NUMBERS,
        TOKEN_MATRICES,
        WITH_IMPORTANCE,
        QuantizeOptions,
        QuantizerProcess,
        needs_importance,
        quantize_file,
    )
    from specrun.bindings.quantizer.rows import dequantize_rows, half_from_bfloat16, quantize_rows

__getattr__, __dir__ = lazy_face(__name__)
