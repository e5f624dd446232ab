"""Quantization of models and heads, and importance matrices."""

from specrun.convert.quantize.imatrix import (
    ImportanceOptions,
    ImportanceReport,
    measure_importance,
    merge_importance,
)
from specrun.convert.quantize.imatrix_file import (
    ImportanceEntry,
    ImportanceMatrix,
    read_importance,
    write_importance,
)
from specrun.convert.quantize.quantize import (
    QuantizationReport,
    known_file_type,
    known_tensor_type,
    quantize_model,
)
from specrun.convert.quantize.quantize_head import (
    HEAD_ARCHITECTURES,
    HEAD_TYPE,
    fitting_type,
    is_head,
)
