"""llama.cpp's own EAGLE-3 graphs, driven as its common/speculative.cpp drives them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specrun.bindings.contexts.batch import Batch
from specrun.bindings.contexts.context import Context
from specrun.bindings.library import llama, native_function
from specrun.bindings.models.model import Model

Rows = npt.NDArray[np.float32]


class LlamaEagle3:
    """A head as a llama.cpp model, in a context beside the target's, which lends it what it
    lacks."""

    def __init__(self, path: Path, target: Context) -> None:
        self._native = llama()
        self._model = Model(path)
        params = self._native.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = 256, 32, 32
        params.n_threads = params.n_threads_batch = 1
        params.flash_attn_type, params.type_k, params.type_v = 0, 0, 0
        params.ctx_other = target.handle
        self._context = self._native.llama_init_from_model(self._model.handle, params)
        assert self._context
        native_function("_Z26llama_set_embeddings_nextnP13llama_contextbb", None, ctypes.c_void_p,
        ctypes.c_bool,
                        ctypes.c_bool)(self._context, True, True)  # fmt: skip
        self.hidden = self._model.n_embd
        self.vocab_size = self._model.vocabulary.size

    def encode(self, features: Rows) -> Rows:
        """States [n, hidden] of the taps [n, taps * target's hidden]."""
        features = np.ascontiguousarray(features, np.float32)
        batch = self._native.llama_batch()
        batch.n_tokens = len(features)
        batch.embd = features.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        assert self._native.llama_encode(self._context, batch) == 0
        return self._states(len(features))

    def decode(self, tokens: Sequence[int], states: Rows, start: int) -> tuple[Rows, Rows]:
        """What is fed back [n, hidden] and logits over the target's tokens [n, vocab], after a
        chain of pairs."""
        states = np.ascontiguousarray(states, np.float32)
        batch = Batch(len(tokens), 1)
        batch.fill_chain(tokens, start, [0], len(tokens))
        struct = batch.struct
        struct.embd = states.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        assert self._native.llama_decode(self._context, struct) == 0
        logits = native_function("llama_get_logits", ctypes.c_void_p, ctypes.c_void_p)(
            self._context
        )
        return self._states(len(tokens)), _copied(logits, len(tokens), self.vocab_size)

    def truncate(self, length: int) -> None:
        """Forget the pairs from a position on."""
        self._native.llama_memory_seq_rm(
            self._native.llama_get_memory(self._context), 0, length, -1
        )

    def close(self) -> None:
        self._native.llama_free(self._context)
        self._model.close()

    def _states(self, count: int) -> Rows:
        get = native_function(
            "_Z26llama_get_embeddings_nextnP13llama_context", ctypes.c_void_p, ctypes.c_void_p
        )
        return _copied(get(self._context), count, self.hidden)


def _copied(address: Any, count: int, width: int) -> Rows:
    assert address
    return (
        np.ctypeslib.as_array((ctypes.c_float * (count * width)).from_address(address))
        .reshape(count, width)
        .copy()
    )
