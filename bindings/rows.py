"""What an evaluation left in llama.cpp's output buffers, as arrays without copies."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from specrun.bindings.batch import Batch
from specrun.bindings.context_options import ContextOptions
from specrun.bindings.errors import ClosedError, OptionError, StaleViewError
from specrun.bindings.layer_inputs import LayerInputs
from specrun.bindings.library import native_function
from specrun.bindings.model import Model
from specrun.bindings.nextn import nextn_rows

FloatRows = npt.NDArray[np.float32]
_LOGITS, _HIDDEN, _NEXTN = "llama_get_logits", "llama_get_embeddings", "llama_get_embeddings_nextn"


class OutputBuffers:
    """The output buffers of one context; close them before it.

    `generation` counts up with whatever may overwrite or move them.
    """

    def __init__(self, handle: Any, model: Model, options: ContextOptions) -> None:  # noqa: ANN401 - a ctypes pointer
        self.generation = 0
        self._handle = handle
        self._options = options
        self._widths = {
            _LOGITS: model.vocabulary.size,
            _HIDDEN: model.n_embd,
            _NEXTN: model.n_embd_out,
        }
        self._views: dict[str, tuple[int, FloatRows]] = {}
        self._addresses = {
            name: native_function(name, ctypes.c_void_p, ctypes.c_void_p)
            for name in (_LOGITS, _HIDDEN)
        }
        if options.nextn_states:
            self._addresses[_NEXTN] = nextn_rows()
        self._layers: LayerInputs | None = None
        if options.layer_inputs:
            self._layers = LayerInputs(handle, options.layer_inputs, model.n_embd)

    def logits(self, count: int) -> FloatRows:
        """Return the first `count` rows of logits, or more, [.., n_vocab]."""
        return self._view(_LOGITS, count)

    def hidden_states(self, count: int) -> FloatRows:
        """Return the first `count` final hidden states, or more, [.., n_embd]."""
        if not self._options.hidden_states:
            raise OptionError(
                "this context was made without hidden states (ContextOptions.hidden_states)"
            )
        return self._view(_HIDDEN, count)

    def layer_inputs(self, layer: int, count: int) -> FloatRows:
        """Return the inputs of a layer at the first `count` tokens, [.., n_embd]."""
        if self._layers is None:
            raise OptionError(
                "this context was made without layer inputs (ContextOptions.layer_inputs)"
            )
        return self._layers.rows(layer, count)

    def nextn_states(self, count: int) -> FloatRows:
        """Return what NextN blocks read of the first `count` tokens, [.., n_embd_out]."""
        if not self._options.nextn_states:
            raise OptionError(
                "this context was made without NextN states (ContextOptions.nextn_states)"
            )
        return self._view(_NEXTN, count)

    def close(self) -> None:
        """Make all rows stale, for good."""
        self.generation += 1
        self._handle = None
        self._views.clear()

    def _view(self, name: str, count: int) -> FloatRows:
        if self._handle is None:
            raise ClosedError("the context is closed")
        address: int | None = self._addresses[name](self._handle)
        if not address:
            raise OptionError(
                "this evaluation gave no rows: no token of the batch asked for output"
            )
        known = self._views.get(name)
        # The buffer only moves when it grows, so the array over it is made once and reused.
        if known is None or known[0] != address or len(known[1]) < count:
            width = self._widths[name]
            flat = (ctypes.c_float * (count * width)).from_address(address)
            known = (address, np.ctypeslib.as_array(flat).reshape(count, width))
            self._views[name] = known
        return known[1]


class Rows:
    """The output rows of one evaluation, valid until the next one on the same context.

    Row i belongs to the i-th token of the batch that asked for output. Reading a row after the
    context has evaluated again raises `StaleViewError`: llama.cpp reuses, and may move, the memory.
    `every_token` says that llama.cpp gave a row for every token, asked for or not; `n_states` is
    how many tokens have NextN states.
    """

    __slots__ = (
        "_buffers",
        "_generation",
        "_indices",
        "_layers",
        "_logits",
        "_n_states",
        "_n_tokens",
        "_native_count",
        "count",
    )

    def __init__(
        self, buffers: OutputBuffers, batch: Batch, n_states: int, *, every_token: bool
    ) -> None:
        self._buffers = buffers
        self._generation = buffers.generation
        self.count = batch.n_outputs
        self._n_states = n_states
        self._native_count = self.count
        self._n_tokens = batch.n_tokens
        self._layers: dict[int, FloatRows] = {}
        self._indices: npt.NDArray[np.intp] | None = None
        self._logits: FloatRows | None = None
        if every_token and self.count < batch.n_tokens:
            self._native_count = batch.n_tokens
            self._indices = np.flatnonzero(batch.outputs[: batch.n_tokens])

    def logits(self, row: int) -> FloatRows:
        """Return the logits of one row, float32 of shape [n_vocab], a view."""
        index = self._index_of(row)
        if self._logits is None:
            self._logits = self._buffers.logits(self._native_count)
        return self._logits[index]  # type: ignore[no-any-return]

    def hidden_state(self, row: int) -> FloatRows:
        """Return the final normed hidden state of one row, float32 of shape [n_embd], a view."""
        index = self._index_of(row)
        return self._buffers.hidden_states(self._native_count)[index]  # type: ignore[no-any-return]

    def layer_input(self, token: int, layer: int) -> FloatRows:
        """Return the input of a layer at one token of the batch, float32 of shape [n_embd], a view.

        Every token has one, whether it asked for output or not.
        """
        self._require_fresh()
        if not 0 <= token < self._n_tokens:
            raise OptionError(f"token {token} of an evaluation of {self._n_tokens} tokens")
        rows = self._layers.get(layer)
        if rows is None:
            rows = self._layers[layer] = self._buffers.layer_inputs(layer, self._n_tokens)
        return rows[token]  # type: ignore[no-any-return]

    def nextn_state(self, token: int) -> FloatRows:
        """Return what NextN blocks read of token i of the batch, row or not: a view [n_embd_out].

        float32 of the model's `n_embd_out` numbers.
        """
        self._require_fresh()
        if not 0 <= token < self._n_states:
            raise OptionError(
                f"the state of token {token}, of an evaluation that gave {self._n_states} states"
            )
        return self._buffers.nextn_states(self._n_states)[token]  # type: ignore[no-any-return]

    def _require_fresh(self) -> None:
        if self._generation != self._buffers.generation:
            raise StaleViewError(
                "these rows were overwritten by a later evaluation: copy what must be kept"
            )

    def _index_of(self, row: int) -> int:
        self._require_fresh()
        if not 0 <= row < self.count:
            raise OptionError(f"row {row} of an evaluation that gave {self.count} rows")
        return row if self._indices is None else int(self._indices[row])
