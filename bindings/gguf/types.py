"""Tables of the GGUF format: types of metadata values, of tensors and of files (quantizations)."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import NamedTuple, TypeAlias, overload

import numpy as np
import numpy.typing as npt

Scalar: TypeAlias = bool | int | float | str


class ScalarType(NamedTuple):
    """A fixed-size value type: its name, how one is unpacked, how an array of them is."""

    name: str
    layout: struct.Struct
    dtype: np.dtype[np.generic]


UINT32_CODE = 4
STRING_CODE = 8
ARRAY_CODE = 9

# By number: name, code of `struct`, type of numpy. A bool is read as the byte it is: any value but
# 0 is true, as llama.cpp reads it.
_SCALARS = """
    0:uint8:B:u1 1:int8:b:i1 2:uint16:H:u2 3:int16:h:i2 4:uint32:I:u4 5:int32:i:i4 6:float32:f:f4
    7:bool:B:u1 10:uint64:Q:u8 11:int64:q:i8 12:float64:d:f8
"""
SCALAR_TYPES: Mapping[int, ScalarType] = MappingProxyType(
    {
        int(number): ScalarType(name, struct.Struct(f"<{code}"), np.dtype(f"<{dtype}"))
        for number, name, code, dtype in (entry.split(":") for entry in _SCALARS.split())
    }
)
_DTYPES = {kind.name: kind.dtype for kind in SCALAR_TYPES.values()}


class TensorType(NamedTuple):
    """A ggml type: `block_size` numbers are stored in `block_bytes` bytes."""

    name: str
    block_size: int
    block_bytes: int


# By the numbers in a block: ggml_type, name and bytes of a block. (Q8_1: the gguf package has 40,
# but ggml uses 36.)
_TENSOR_TYPES = {
    1: "0:F32:4 1:F16:2 24:I8:1 25:I16:2 26:I32:4 27:I64:8 28:F64:8 30:BF16:2",
    32: "2:Q4_0:18 3:Q4_1:20 6:Q5_0:22 7:Q5_1:24 8:Q8_0:34 9:Q8_1:36 20:IQ4_NL:18 39:MXFP4:17",
    64: "40:NVFP4:36 42:Q2_0:18",
    128: "41:Q1_0:18",
    256: "10:Q2_K:84 11:Q3_K:110 12:Q4_K:144 13:Q5_K:176 14:Q6_K:210 15:Q8_K:292 16:IQ2_XXS:66 "
    "17:IQ2_XS:74 18:IQ3_XXS:98 19:IQ1_S:50 21:IQ3_S:110 22:IQ2_S:82 23:IQ4_XS:136 "
    "29:IQ1_M:56 34:TQ1_0:54 35:TQ2_0:66",
}


def _tensor_types() -> Iterator[tuple[int, TensorType]]:
    for block_size, types in _TENSOR_TYPES.items():
        for number, name, n_bytes in (entry.split(":") for entry in types.split()):
            yield int(number), TensorType(name, block_size, int(n_bytes))


TENSOR_TYPES: Mapping[int, TensorType] = MappingProxyType(dict(sorted(_tensor_types())))
"""ggml's types of tensors by their numbers."""

_BY_NAME = {kind.name: kind for kind in TENSOR_TYPES.values()}
BLOCK_SIZES: Mapping[str, int] = MappingProxyType(
    {name: kind.block_size for name, kind in _BY_NAME.items()}
)


def stored_bytes(shape: Sequence[int], type_name: str) -> int:
    """Return a tensor's bytes in a type whose blocks divide its rows; `shape` in either order."""
    kind = _BY_NAME[type_name]
    return prod(shape) // kind.block_size * kind.block_bytes


# Numbers once given to types that llama.cpp no longer reads: worth a name in the refusal.
_REMOVED = (
    "4:Q4_2 5:Q4_3 31:Q4_0_4_4 32:Q4_0_4_8 33:Q4_0_8_8 36:IQ4_NL_4_4 37:IQ4_NL_4_8 38:IQ4_NL_8_8"
)
REMOVED_TENSOR_TYPES: Mapping[int, str] = MappingProxyType(
    {int(number): name for number, name in (entry.split(":") for entry in _REMOVED.split())}
)

# general.file_type: the mix of tensor types that the quantizer was to write (llama_ftype from 0 on;
# "-" is a number that is not, or no longer, given).
_FILE_TYPES = """
    F32 F16 Q4_0 Q4_1 - - - Q8_0 Q5_0 Q5_1 Q2_K Q3_K_S Q3_K_M Q3_K_L Q4_K_S Q4_K_M Q5_K_S
    Q5_K_M Q6_K IQ2_XXS IQ2_XS Q2_K_S IQ3_XS IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ3_M IQ2_S IQ2_M
    IQ4_XS IQ1_M BF16 - - - TQ1_0 TQ2_0 MXFP4_MOE NVFP4 Q1_0 Q2_0
"""
FILE_TYPE_NAMES: Mapping[int, str] = MappingProxyType(
    {number: name for number, name in enumerate(_FILE_TYPES.split()) if name != "-"}
)


class ArrayValue(Sequence[Scalar]):
    """An array of the metadata, decoded when read; equal if type and bytes are."""

    __slots__ = ("_ends", "element_type", "raw")

    def __init__(self, element_type: str, raw: bytes, ends: array[int] | None = None) -> None:
        self.element_type = element_type
        """"string", or the name of a scalar type such as "uint32"."""
        self.raw = raw
        """The elements as the file holds them: strings with a length of 8 bytes before each."""
        self._ends = ends  # the end of each string in `raw`; None for scalars

    def __len__(self) -> int:
        if self._ends is not None:
            return len(self._ends)
        return len(self.raw) // _DTYPES[self.element_type].itemsize

    @overload
    def __getitem__(self, index: int) -> Scalar: ...
    @overload
    def __getitem__(self, index: slice) -> list[Scalar]: ...
    def __getitem__(self, index: int | slice) -> Scalar | list[Scalar]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if self._ends is not None:
            return self.bytes_at(index).decode("utf-8", "replace")
        value: Scalar = self.to_numpy()[index].item()
        return value

    def __iter__(self) -> Iterator[Scalar]:
        if self._ends is None:
            yield from self.to_numpy().tolist()
            return
        start = 8
        for end in self._ends:
            yield self.raw[start:end].decode("utf-8", "replace")
            start = end + 8

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ArrayValue):
            return NotImplemented
        return self.element_type == other.element_type and self.raw == other.raw

    def __hash__(self) -> int:
        return hash((self.element_type, self.raw))

    def __repr__(self) -> str:
        return f"<ArrayValue of {len(self)} x {self.element_type}>"

    def tolist(self) -> list[Scalar]:
        """Return all elements as Python values; bytes that are not UTF-8 become U+FFFD."""
        return list(self)

    def bytes_at(self, index: int) -> bytes:
        """Return string `index` as the exact bytes in the file, which need not be UTF-8."""
        if self._ends is None:
            raise TypeError(f"an array of {self.element_type} has no strings")
        index = range(len(self._ends))[index]
        start = self._ends[index - 1] if index else 0
        return self.raw[start + 8 : self._ends[index]]

    def string_ends(self) -> npt.NDArray[np.int64]:
        """Return the end of each string in `raw`, int64 [n]."""
        if self._ends is None:
            raise TypeError(f"an array of {self.element_type} has no strings")
        return np.frombuffer(self._ends, dtype=np.int64)

    def to_numpy(self) -> npt.NDArray[np.generic]:
        """Return the elements of a scalar array as a read-only numpy array over the same bytes."""
        if self._ends is not None:
            raise TypeError("an array of strings has no numpy form: use tolist() or bytes_at()")
        values = np.frombuffer(self.raw, dtype=_DTYPES[self.element_type])
        if self.element_type == "bool":
            values = values != 0
            values.flags.writeable = False
        return values


MetadataValue: TypeAlias = Scalar | ArrayValue
