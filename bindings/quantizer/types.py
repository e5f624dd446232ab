"""The file types that llama.cpp's quantizer makes: their numbers, their sizes, and what they
need."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from specrun.bindings.gguf import FILE_TYPE_NAMES, TENSOR_TYPES


class FileType(NamedTuple):
    """A file type: llama.cpp's number (llama_ftype), the type of most matrices, and its size.

    `bits_per_weight` is what a Llama of 8 billion parameters takes (the shapes of Llama-3.1-8B), as
    the quantizer's own dry run counts it with an importance matrix. `needs_importance` says that
    such a model cannot be made without one.
    """

    number: int
    base_type: str
    bits_per_weight: float
    needs_importance: bool = False


COPY = "COPY"
"""In place of a file type: copy every tensor as it is."""

_NUMBERS = {name: number for number, name in FILE_TYPE_NAMES.items()}


def _file_type(
    name: str, base: str, bits: float, needs_importance: bool = False
) -> tuple[str, FileType]:
    return name, FileType(_NUMBERS[name], base, bits, needs_importance)


FILE_TYPES: Mapping[str, FileType] = MappingProxyType(
    dict(
        (
            _file_type("F32", "F32", 32.0),
            _file_type("F16", "F16", 16.0),
            _file_type("BF16", "BF16", 16.0),
            _file_type("Q8_0", "Q8_0", 8.5),
            _file_type("Q6_K", "Q6_K", 6.56),
            _file_type("Q5_K_M", "Q5_K", 5.7),
            _file_type("Q5_K_S", "Q5_K", 5.57),
            _file_type("Q5_1", "Q5_1", 6.04),
            _file_type("Q5_0", "Q5_0", 5.59),
            _file_type("Q4_K_M", "Q4_K", 4.89),
            _file_type("Q4_K_S", "Q4_K", 4.67),
            _file_type("Q4_1", "Q4_1", 5.1),
            _file_type("Q4_0", "Q4_0", 4.65),
            _file_type("IQ4_NL", "IQ4_NL", 4.65),
            _file_type("IQ4_XS", "IQ4_XS", 4.42),
            _file_type("MXFP4_MOE", "MXFP4", 8.5),
            _file_type("Q3_K_L", "Q3_K", 4.3),
            _file_type("Q3_K_M", "Q3_K", 4.0),
            _file_type("Q3_K_S", "Q3_K", 3.64),
            _file_type("IQ3_M", "IQ3_S", 3.76),
            _file_type("IQ3_S", "IQ3_S", 3.66),
            _file_type("IQ3_XS", "IQ3_S", 3.5, True),
            _file_type("IQ3_XXS", "IQ3_XXS", 3.25, True),
            _file_type("Q2_K", "Q2_K", 3.16),
            _file_type("Q2_K_S", "Q2_K", 2.97, True),
            _file_type("IQ2_M", "IQ2_S", 2.93, True),
            _file_type("IQ2_S", "IQ2_XS", 2.74, True),
            _file_type("IQ2_XS", "IQ2_XS", 2.59, True),
            _file_type("IQ2_XXS", "IQ2_XXS", 2.38, True),
            _file_type("Q2_0", "Q2_0", 2.68),
            _file_type("TQ2_0", "TQ2_0", 2.52),
            _file_type("TQ1_0", "TQ1_0", 2.19),
            _file_type("IQ1_M", "IQ1_M", 2.15, True),
            _file_type("IQ1_S", "IQ1_S", 2.0, True),
            _file_type("Q1_0", "Q1_0", 1.48),
        )
    )
)
"""Every file type the quantizer offers, from large to small within a kind."""

FILE_TYPE_ALIASES: Mapping[str, str] = MappingProxyType(
    {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}
)
"""Other names that llama.cpp's quantizer takes."""

# What ggml_quantize_chunk makes: it aborts for any other, such as the types of activations.
_NOT_FOR_WEIGHTS = {"Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64"}
TENSOR_NUMBERS: Mapping[str, int] = MappingProxyType(
    {
        kind.name: number
        for number, kind in TENSOR_TYPES.items()
        if kind.name not in _NOT_FOR_WEIGHTS
    }
)
"""The tensor types that weights can be stored in, with ggml's number of each."""

# Too few bits to be chosen well without statistics: llama.cpp refuses them for all but the token
# matrices, where some of them fail an assertion of ggml's (ggml_quantize_requires_imatrix).
_SMALLEST = {"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS"}
_SMALLEST_OF_ALL = {"IQ1_S", "IQ2_XXS", "IQ2_XS"}
TOKEN_MATRICES = frozenset(("token_embd.weight", "per_layer_token_embd.weight", "output.weight"))
"""Token embedding and output matrices: by default, importance matrices have no entries for them."""


def needs_importance(tensor: str, type_name: str, file_type: str) -> bool:
    """Return whether llama.cpp stores this tensor so only with an importance matrix for it."""
    if tensor in TOKEN_MATRICES:
        return type_name in _SMALLEST_OF_ALL
    return type_name in _SMALLEST or (type_name == "Q2_K" and file_type == "Q2_K_S")
