"""Reopens a file that was just written, and compares it with what was meant."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specrun.bindings.errors import SpecrunError
from specrun.bindings.gguf_header import read_header
from specrun.convert.tensor_map import MappedTensor

__all__ = ["check_written"]


def check_written(path: Path, tensors: Sequence[MappedTensor]) -> None:
    """Raise SpecrunError unless the file has these tensors, by name, shape and type, and all their bytes."""
    written = {tensor.name: tensor for tensor in read_header(path).tensors}
    wanted = {tensor.name: tensor for tensor in tensors}
    if written.keys() != wanted.keys():
        names = ", ".join(sorted(written.keys() ^ wanted.keys())[:4])
        raise SpecrunError(f"the file came out with other tensors than planned ({names}): this is a mistake in specrun")
    for name, one in wanted.items():
        found = written[name]
        got = found.shape[::-1], found.type_name, found.n_bytes
        if got != (one.shape, one.type_name, one.n_bytes):
            raise SpecrunError(f"{name} came out as {got}, not as planned: this is a mistake in specrun")
