"""llama.cpp's quantizer, in a process of its own, and ggml's conversion of single rows."""

from specrun.bindings.quantizer.quantizer import (
    COPY,
    FILE_TYPE_ALIASES,
    FILE_TYPES,
    TENSOR_NUMBERS,
    TOKEN_MATRICES,
    QuantizeOptions,
    QuantizerProcess,
    needs_importance,
    plan_quantization,
    quantize_file,
)
from specrun.bindings.quantizer.rows import dequantize_rows, half_from_bfloat16, quantize_rows
