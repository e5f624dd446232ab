"""Memory that llama.cpp allocates for a model and a context, by device: weights, cells, compute.

A `CountedModel` is loaded without its weights (`no_alloc`), and contexts of it are made without
their memory: their sizes are counted in milliseconds, whatever the size of the file.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from specrun.bindings.contexts.context import Context
from specrun.bindings.errors import UnsupportedModelError
from specrun.bindings.functions import call
from specrun.bindings.library import exported_function
from specrun.bindings.models.model import Model

HOST = "CPU"
"""The name of this machine's own memory, whatever device its buffers were made for."""

_NAMES = ("llama_get_memory_breakdown", "_Z26llama_get_memory_breakdownPK13llama_context")


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Bytes in the memory of one device: `cells` are keys, values and recurrent states."""

    weights: int = 0
    cells: int = 0
    compute: int = 0

    def __add__(self, other: Breakdown) -> Breakdown:
        return Breakdown(
            self.weights + other.weights, self.cells + other.cells, self.compute + other.compute
        )


class CountedModel(Model):
    """A model that takes no memory for weights, and whose contexts take none: to be counted.

    It evaluates nothing.
    """

    _only_counts = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        n_gpu_layers: int = 0,
        load_nextn: bool = False,
        drafts: bool = False,
    ) -> None:
        # llama.cpp asserts that nothing is mapped.
        super().__init__(
            path, n_gpu_layers=n_gpu_layers, use_mmap=False, load_nextn=load_nextn, drafts=drafts
        )


def memory_breakdown(context: Context) -> dict[str, Breakdown]:
    """Return the bytes that a context and its model hold, or would hold, by the names of devices.

    Rows of logits are not among them. Raises `UnsupportedModelError` if this build of llama.cpp
    does not export them.
    """
    _, table = _layout()
    read = exported_function(_NAMES, table, ctypes.c_void_p)
    found: dict[str, Breakdown] = {}
    for buffer_type, counts in _entries(read(context.handle).root):
        name = _device_name(buffer_type)
        found[name] = found.get(name, Breakdown()) + counts
    return found


def _device_name(buffer_type: int) -> str:
    device = call("ggml_backend_buft_get_device")(buffer_type)
    in_host = call("ggml_backend_buft_is_host")(buffer_type) or not device
    if in_host or call("ggml_backend_dev_type")(device) == 0:
        return HOST
    name: bytes = call("ggml_backend_dev_name")(device)
    return name.decode("utf-8", "replace")


# -- a std::map of C++, as its standard libraries lay it out ---------------------------------------


def _layout() -> tuple[Any, Any]:
    """Return the ctypes structures of a node and of the map: a red-black tree.

    The map is larger than two registers, so it is returned through a pointer everywhere. Its nodes,
    as many as there are kinds of memory, are left to the process.
    """
    if sys.platform == "win32":
        problem = "on Windows llama.cpp does not export the sizes of its memory"
        raise UnsupportedModelError(problem)
    return _LIBCXX if sys.platform == "darwin" else _LIBSTDCXX


def _entries(node: Any) -> Iterator[tuple[int, Breakdown]]:  # noqa: ANN401 - a ctypes pointer
    if not node:
        return
    entry = node.contents
    yield from _entries(entry.left)
    yield entry.key, Breakdown(entry.weights, entry.cells, entry.compute)
    yield from _entries(entry.right)


_VALUE = (
    ("key", ctypes.c_void_p),
    ("weights", ctypes.c_size_t),
    ("cells", ctypes.c_size_t),
    ("compute", ctypes.c_size_t),
)


def _structures(head: tuple[str, ...], table: tuple[str, ...]) -> tuple[Any, Any]:
    """Return a node's structure and the map's by the names of their words, 8 bytes each."""

    class Node(ctypes.Structure):
        pass

    def field(name: str) -> tuple[str, Any]:
        links = ("left", "right", "root")
        return name, ctypes.POINTER(Node) if name in links else ctypes.c_size_t

    class Table(ctypes.Structure):
        _fields_ = tuple(map(field, table))

    Node._fields_ = (*map(field, head), *_VALUE)
    return Node, Table


# GCC: a node is its colour and three links; the map's own node, whose parent is the root, follows
# the comparison. Clang's: a node begins with its links, and the map with a link to its first node.
_LIBSTDCXX = _structures(
    ("colour", "parent", "left", "right"),
    ("compare", "colour", "root", "first", "last", "count"),
)
_LIBCXX = _structures(("left", "right", "parent", "colour"), ("first", "root", "count"))
