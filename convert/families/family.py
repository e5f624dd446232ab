"""Model families: the parts that each defines so that its checkpoints can be converted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from specrun.convert.checkpoint import JsonObject
from specrun.convert.gguf import Metadata

Array = npt.NDArray[Any]


def unchanged(array: Array) -> Array:
    """Return the array as it is."""
    return array


@dataclass(frozen=True, slots=True)
class TensorRule:
    """A tensor of the GGUF file: made from the tensors `sources`, each of `shape`, by `change`.

    If sources have other shapes, `source_shapes` has each one's, and `shape` is the result's.
    Shapes are numpy's (rows first). `change` gets the sources' arrays, in their own number type,
    and returns an array of `result_shape`, which is `shape` unless given. `keep_f32` is for tensors
    that llama.cpp reads as float32 whatever type the rest is stored as; those of one dimension
    always are. `moves_only`: `change` puts numbers elsewhere and leaves each as it is: it then gets
    bfloat16 as its bits, unwidened. `token_ids` are whole numbers, stored as int64 in every file. A
    rule without sources computes its tensor. `is_mxfp4`: `change` returns MXFP4's rows of bytes,
    which are stored so unless all tensors are to be of one plain type.
    """

    name: str
    sources: tuple[str, ...]
    shape: tuple[int, ...]
    change: Callable[..., Array] = unchanged
    result_shape: tuple[int, ...] | None = None
    keep_f32: bool = False
    moves_only: bool = False
    token_ids: bool = False
    source_shapes: tuple[tuple[int, ...], ...] | None = None
    is_mxfp4: bool = False

    @property
    def read_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of each source."""
        return self.source_shapes or (self.shape,) * len(self.sources)

    @property
    def written_shape(self) -> tuple[int, ...]:
        """The shape in the GGUF file."""
        return self.shape if self.result_shape is None else self.result_shape

    @property
    def fixed_type(self) -> str | None:
        """The type the tensor has in every file; None if that is chosen."""
        if self.token_ids:
            return "I64"
        return "F32" if self.keep_f32 or len(self.written_shape) == 1 else None


@dataclass(frozen=True, slots=True)
class Family:
    """One family: the `architectures` of config.json it serves, and llama.cpp's name for it.

    `describe` writes the architecture's keys from the config, `rules` yields its tensors in the
    file's order; both raise UnsupportedModelError for models that llama.cpp could not run as the
    checkpoint means it. `left_out` names tensors that are known and not read, as in `map_rules`.
    """

    architectures: tuple[str, ...]
    gguf_architecture: str
    describe: Callable[[JsonObject, Metadata], None]
    rules: Callable[[JsonObject], Iterable[TensorRule]]
    left_out: Callable[[JsonObject], tuple[str, ...]] = lambda _: ()
