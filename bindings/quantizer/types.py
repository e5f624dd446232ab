"""File types of llama.cpp's quantizer (llama_ftype): numbers, sizes, need of importance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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

# Name, type of most matrices and bits per weight; ! marks those that need an importance matrix.
_TABLE = """
    F32 F32 32.0, F16 F16 16.0, BF16 BF16 16.0, Q8_0 Q8_0 8.5, Q6_K Q6_K 6.56, Q5_K_M Q5_K 5.7,
    Q5_K_S Q5_K 5.57, Q5_1 Q5_1 6.04, Q5_0 Q5_0 5.59, Q4_K_M Q4_K 4.89, Q4_K_S Q4_K 4.67,
    Q4_1 Q4_1 5.1, Q4_0 Q4_0 4.65, IQ4_NL IQ4_NL 4.65, IQ4_XS IQ4_XS 4.42, MXFP4_MOE MXFP4 8.5,
    Q3_K_L Q3_K 4.3, Q3_K_M Q3_K 4.0, Q3_K_S Q3_K 3.64, IQ3_M IQ3_S 3.76, IQ3_S IQ3_S 3.66,
    IQ3_XS IQ3_S 3.5 !, IQ3_XXS IQ3_XXS 3.25 !, Q2_K Q2_K 3.16, Q2_K_S Q2_K 2.97 !,
    IQ2_M IQ2_S 2.93 !, IQ2_S IQ2_XS 2.74 !, IQ2_XS IQ2_XS 2.59 !, IQ2_XXS IQ2_XXS 2.38 !,
    Q2_0 Q2_0 2.68, TQ2_0 TQ2_0 2.52, TQ1_0 TQ1_0 2.19, IQ1_M IQ1_M 2.15 !, IQ1_S IQ1_S 2.0 !,
    Q1_0 Q1_0 1.48
"""


def _file_types() -> Iterator[tuple[str, FileType]]:
    numbers = {name: number for number, name in FILE_TYPE_NAMES.items()}
    for row in _TABLE.split(","):
        name, base, bits, *mark = row.split()
        yield name, FileType(numbers[name], base, float(bits), bool(mark))


FILE_TYPES: Mapping[str, FileType] = MappingProxyType(dict(_file_types()))
"""Every file type the quantizer offers, from large to small within a kind."""

FILE_TYPE_ALIASES: Mapping[str, str] = MappingProxyType(
    {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}
)
"""Other names that llama.cpp's quantizer takes."""

# What ggml_quantize_chunk makes: it aborts for any other, such as the types of activations.
_NOT_FOR_WEIGHTS = {"Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64"}
_OF_WEIGHTS = {
    kind.name: code for code, kind in TENSOR_TYPES.items() if kind.name not in _NOT_FOR_WEIGHTS
}
TENSOR_NUMBERS: Mapping[str, int] = MappingProxyType(_OF_WEIGHTS)
"""The tensor types that weights can be stored in, with ggml's number of each."""

# Too few bits to be chosen well without statistics: llama.cpp refuses them for all but the token
# matrices, where those that always need them fail an assertion of ggml's.
_SMALLEST = {"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS"}
ALWAYS_WITH_IMPORTANCE = frozenset(("IQ1_S", "IQ2_XXS", "IQ2_XS"))
"""Types that ggml makes with an importance matrix only (ggml_quantize_requires_imatrix)."""
TOKEN_MATRICES = frozenset(("token_embd.weight", "per_layer_token_embd.weight", "output.weight"))
"""Token embedding and output matrices: by default, importance matrices have no entries for them."""


def needs_importance(tensor: str, type_name: str, file_type: str) -> bool:
    """Return whether llama.cpp stores this tensor so only with an importance matrix for it."""
    if tensor in TOKEN_MATRICES:
        return type_name in ALWAYS_WITH_IMPORTANCE
    return type_name in _SMALLEST or (type_name == "Q2_K" and file_type == "Q2_K_S")
