"""Whether a head's file fits a target, by the checks that opening it would apply, without its weights."""

from __future__ import annotations

import os

import numpy as np

from specrun.bindings.ggml.device import ComputeDevice
from specrun.bindings.ggml.weights import load_tensors
from specrun.bindings.gguf_header import read_header
from specrun.bindings.model import Model
from specrun.runtime.heads.eagle3_layout import WORD_MAP, checked_words, read_layout
from specrun.runtime.heads.head_file import HeadFile
from specrun.runtime.methods import method_of_head

__all__ = ["check_head", "is_head"]


def is_head(path: str | os.PathLike[str]) -> bool:
    """Return whether a GGUF file holds heads, which are no model of their own."""
    return method_of_head(read_header(path).architecture) is not None


def check_head(path: str | os.PathLike[str], target: Model) -> None:
    """Raise PairError, UnsupportedModelError or MalformedFileError for a head that cannot draft for this target."""
    file = HeadFile(path, read_header(path).architecture)
    if file.kind != "eagle3":
        file.check_target(target)
        return
    if WORD_MAP not in read_layout(file, target).tensors:
        return
    device = ComputeDevice(n_threads=1)
    try:
        store = load_tensors(path, device, [WORD_MAP])
        try:
            checked_words(store.read(WORD_MAP, np.int64).astype(np.int64, copy=False), file, target)
        finally:
            store.close()
    finally:
        device.close()
