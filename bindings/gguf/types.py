"""What GGUF files are made of, as plain tables: value types of the metadata, ggml types of the
tensors."""

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


def _scalar(name: str, code: str, dtype: str) -> ScalarType:
    return ScalarType(name, struct.Struct("<" + code), np.dtype(dtype))


UINT32_CODE = 4
STRING_CODE = 8
ARRAY_CODE = 9

# A bool is read as the byte it is: any value but 0 is true, as llama.cpp reads it.
SCALAR_TYPES: Mapping[int, ScalarType] = MappingProxyType(
    {
        0: _scalar("uint8", "B", "<u1"),
        1: _scalar("int8", "b", "<i1"),
        2: _scalar("uint16", "H", "<u2"),
        3: _scalar("int16", "h", "<i2"),
        UINT32_CODE: _scalar("uint32", "I", "<u4"),
        5: _scalar("int32", "i", "<i4"),
        6: _scalar("float32", "f", "<f4"),
        7: _scalar("bool", "B", "<u1"),
        10: _scalar("uint64", "Q", "<u8"),
        11: _scalar("int64", "q", "<i8"),
        12: _scalar("float64", "d", "<f8"),
    }
)
_DTYPES = {kind.name: kind.dtype for kind in SCALAR_TYPES.values()}


class TensorType(NamedTuple):
    """A ggml type: `block_size` numbers are stored in `block_bytes` bytes."""

    name: str
    block_size: int
    block_bytes: int


TENSOR_TYPES: Mapping[int, TensorType] = MappingProxyType(
    {
        0: TensorType("F32", 1, 4),
        1: TensorType("F16", 1, 2),
        2: TensorType("Q4_0", 32, 18),
        3: TensorType("Q4_1", 32, 20),
        6: TensorType("Q5_0", 32, 22),
        7: TensorType("Q5_1", 32, 24),
        8: TensorType("Q8_0", 32, 34),
        9: TensorType("Q8_1", 32, 36),  # what ggml uses; the gguf package says 40
        10: TensorType("Q2_K", 256, 84),
        11: TensorType("Q3_K", 256, 110),
        12: TensorType("Q4_K", 256, 144),
        13: TensorType("Q5_K", 256, 176),
        14: TensorType("Q6_K", 256, 210),
        15: TensorType("Q8_K", 256, 292),
        16: TensorType("IQ2_XXS", 256, 66),
        17: TensorType("IQ2_XS", 256, 74),
        18: TensorType("IQ3_XXS", 256, 98),
        19: TensorType("IQ1_S", 256, 50),
        20: TensorType("IQ4_NL", 32, 18),
        21: TensorType("IQ3_S", 256, 110),
        22: TensorType("IQ2_S", 256, 82),
        23: TensorType("IQ4_XS", 256, 136),
        24: TensorType("I8", 1, 1),
        25: TensorType("I16", 1, 2),
        26: TensorType("I32", 1, 4),
        27: TensorType("I64", 1, 8),
        28: TensorType("F64", 1, 8),
        29: TensorType("IQ1_M", 256, 56),
        30: TensorType("BF16", 1, 2),
        34: TensorType("TQ1_0", 256, 54),
        35: TensorType("TQ2_0", 256, 66),
        39: TensorType("MXFP4", 32, 17),
        40: TensorType("NVFP4", 64, 36),
        41: TensorType("Q1_0", 128, 18),
        42: TensorType("Q2_0", 64, 18),
    }
)

_BY_NAME = {kind.name: kind for kind in TENSOR_TYPES.values()}
BLOCK_SIZES: Mapping[str, int] = MappingProxyType(
    {name: kind.block_size for name, kind in _BY_NAME.items()}
)


def stored_bytes(shape: Sequence[int], type_name: str) -> int:
    """Return a tensor's bytes in a type whose blocks divide its rows; `shape` in either order."""
    kind = _BY_NAME[type_name]
    return prod(shape) // kind.block_size * kind.block_bytes


# Numbers once given to types that llama.cpp no longer reads: worth a name in the refusal.
REMOVED_TENSOR_TYPES: Mapping[int, str] = MappingProxyType(
    {
        4: "Q4_2",
        5: "Q4_3",
        31: "Q4_0_4_4",
        32: "Q4_0_4_8",
        33: "Q4_0_8_8",
        36: "IQ4_NL_4_4",
        37: "IQ4_NL_4_8",
        38: "IQ4_NL_8_8",
    }
)

# general.file_type: which mix of tensor types the quantizer was asked for.
FILE_TYPE_NAMES: Mapping[int, str] = MappingProxyType(
    {
        0: "F32",
        1: "F16",
        2: "Q4_0",
        3: "Q4_1",
        7: "Q8_0",
        8: "Q5_0",
        9: "Q5_1",
        10: "Q2_K",
        11: "Q3_K_S",
        12: "Q3_K_M",
        13: "Q3_K_L",
        14: "Q4_K_S",
        15: "Q4_K_M",
        16: "Q5_K_S",
        17: "Q5_K_M",
        18: "Q6_K",
        19: "IQ2_XXS",
        20: "IQ2_XS",
        21: "Q2_K_S",
        22: "IQ3_XS",
        23: "IQ3_XXS",
        24: "IQ1_S",
        25: "IQ4_NL",
        26: "IQ3_S",
        27: "IQ3_M",
        28: "IQ2_S",
        29: "IQ2_M",
        30: "IQ4_XS",
        31: "IQ1_M",
        32: "BF16",
        36: "TQ1_0",
        37: "TQ2_0",
        38: "MXFP4_MOE",
        39: "NVFP4",
        40: "Q1_0",
        41: "Q2_0",
    }
)


class ArrayValue(Sequence[Scalar]):
    """An array of the metadata, decoded when asked for; equal where type and bytes are."""

    __slots__ = ("_ends", "element_type", "raw")

    def __init__(self, element_type: str, raw: bytes, ends: array[int] | None = None) -> None:
        self.element_type = element_type
        """"string", or the name of a scalar type such as "uint32"."""
        self.raw = raw
        """The elements as the file holds them: strings with a length of 8 bytes before each."""
        self._ends = ends  # where each string ends in `raw`; None for scalars

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
