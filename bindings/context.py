"""A context: evaluates batches of one model and shows their rows (logits, hidden states) without copies."""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from specrun.bindings.batch import Batch
from specrun.bindings.devices import available_cores
from specrun.bindings.errors import (
    ClosedError,
    OptionError,
    OutOfMemoryError,
    StaleViewError,
    UnsupportedModelError,
    decode_error,
)
from specrun.bindings.input_observer import InputObserver
from specrun.bindings.layer_inputs import LayerInputs, check_layer_inputs
from specrun.bindings.library import last_native_errors, llama, native_function
from specrun.bindings.memory import Memory
from specrun.bindings.model import Model
from specrun.bindings.nextn import nextn_rows, show_nextn_states
from specrun.bindings.rope_scaling import AS_TRAINED, RopeScaling

__all__ = ["MAX_SEQUENCES", "Context", "ContextOptions", "Rows"]

FloatRows = npt.NDArray[np.float32]
MAX_SEQUENCES = 256  # LLAMA_MAX_SEQ
MAX_THREADS = 512  # GGML_MAX_N_THREADS: ggml crashes beyond it
_NEXTN = "llama_get_embeddings_nextn"
_FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}
_CACHE_TYPES = {
    "f32": 0,
    "f16": 1,
    "bf16": 30,
    "q8_0": 8,
    "q4_0": 2,
    "q4_1": 3,
    "q5_0": 6,
    "q5_1": 7,
    "iq4_nl": 20,
}


@dataclass(frozen=True, slots=True)
class ContextOptions:
    """How a context is made. Zero means: the model's own context length; as many threads as cores.

    `n_outputs` is the most rows one evaluation may give, `n_sequences` the most sequence ids: both size
    native buffers, so they should be what the widest tree needs and no more. `hidden_states` makes the
    final normed state of every token available, at the price of evaluating the output head for it.
    `layer_inputs` are the layers whose inputs are available at every token, at no such price.
    `nextn_states` makes available what NextN blocks read, for every token and without the output head.
    `n_rollback` is how many of the last evaluation's tokens a recurrent state can take back, where
    `Model.can_roll_back`; other models ignore it. `rope` stretches positions beyond the trained context.
    """

    n_ctx: int = 0
    n_batch: int = 512
    n_ubatch: int = 512
    n_sequences: int = 1
    n_outputs: int = 1
    n_threads: int = 0
    n_threads_batch: int = 0
    hidden_states: bool = False
    layer_inputs: tuple[int, ...] = ()
    nextn_states: bool = False
    n_rollback: int = 0
    flash_attention: Literal["auto", "on", "off"] = "auto"
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    rope: RopeScaling = AS_TRAINED

    def __post_init__(self) -> None:
        if not 0 <= self.n_ctx < 2**31:
            raise OptionError(f"n_ctx is {self.n_ctx}: give 0 (automatic) or a positive number")
        for name in ("n_threads", "n_threads_batch"):
            if not 0 <= getattr(self, name) <= MAX_THREADS:
                raise OptionError(f"{name} is {getattr(self, name)}: give 0 (automatic) to {MAX_THREADS}")
        for name in ("n_batch", "n_ubatch", "n_outputs"):
            if not 1 <= getattr(self, name) < 2**31:
                raise OptionError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if not 0 <= self.n_rollback < 2**16:
            raise OptionError(f"n_rollback is {self.n_rollback}: give 0 or a small number of tokens")
        if not 1 <= self.n_sequences <= MAX_SEQUENCES:
            raise OptionError(f"n_sequences is {self.n_sequences}: llama.cpp allows 1 to {MAX_SEQUENCES}")
        if self.flash_attention not in _FLASH_ATTENTION:
            raise OptionError(f"flash attention is {self.flash_attention!r}: use auto, on or off")
        for name in ("cache_type_k", "cache_type_v"):
            if getattr(self, name) not in _CACHE_TYPES:
                known = ", ".join(_CACHE_TYPES)
                raise OptionError(f"{name} is {getattr(self, name)!r}: use one of {known}")

    def size_for(self, model: Model) -> int:
        """Return the context's length for a model: no more than it was trained for, unless `rope` stretches that."""
        return self.rope.context_size(self.n_ctx, model.n_ctx_train)


class Rows:
    """The output rows of one evaluation, valid until the next one on the same context.

    Row i belongs to the i-th token of the batch that asked for output. Reading a row after the context
    has evaluated again raises `StaleViewError`: llama.cpp reuses, and may move, the memory.
    """

    __slots__ = (
        "_context",
        "_generation",
        "_indices",
        "_layers",
        "_logits",
        "_n_states",
        "_n_tokens",
        "_native_count",
        "count",
    )

    def __init__(self, context: Context, generation: int, batch: Batch) -> None:
        self._context = context
        self._generation = generation
        self.count = batch.n_outputs
        self._n_states = context._count_states(batch)
        self._native_count = self.count
        self._n_tokens = batch.n_tokens
        self._layers: dict[int, FloatRows] = {}
        self._indices: npt.NDArray[np.intp] | None = None
        self._logits: FloatRows | None = None
        if context.options.hidden_states and self.count < batch.n_tokens:
            # llama.cpp then gives a row for every token, asked for or not.
            self._native_count = batch.n_tokens
            self._indices = np.flatnonzero(batch.outputs[: batch.n_tokens])

    def logits(self, row: int) -> FloatRows:
        """Return the logits of one row, float32 of shape [n_vocab], a view."""
        index = self._index_of(row)
        if self._logits is None:
            self._logits = self._context._logits_view(self._native_count)
        return self._logits[index]  # type: ignore[no-any-return]

    def hidden_state(self, row: int) -> FloatRows:
        """Return the final normed hidden state of one row, float32 of shape [n_embd], a view."""
        index = self._index_of(row)
        return self._context._hidden_view(self._native_count)[index]  # type: ignore[no-any-return]

    def layer_input(self, token: int, layer: int) -> FloatRows:
        """Return the input of a layer at one token of the batch, float32 of shape [n_embd], a view.

        Every token has one, whether it asked for output or not.
        """
        self._require_fresh()
        if not 0 <= token < self._n_tokens:
            raise OptionError(f"token {token} of an evaluation of {self._n_tokens} tokens")
        rows = self._layers.get(layer)
        if rows is None:
            rows = self._layers[layer] = self._context._layer_view(layer, self._n_tokens)
        return rows[token]  # type: ignore[no-any-return]

    def nextn_state(self, token: int) -> FloatRows:
        """Return what NextN blocks read of the batch's token i, whether or not it asked for a row: a view.

        float32 of the model's `n_embd_out` numbers.
        """
        self._require_fresh()
        if not 0 <= token < self._n_states:
            raise OptionError(f"the state of token {token}, of an evaluation that gave {self._n_states} states")
        return self._context._nextn_view(self._n_states)[token]  # type: ignore[no-any-return]

    def _require_fresh(self) -> None:
        if self._generation != self._context.generation:
            raise StaleViewError("these rows were overwritten by a later evaluation: copy what must be kept")

    def _index_of(self, row: int) -> int:
        self._require_fresh()
        if not 0 <= row < self.count:
            raise OptionError(f"row {row} of an evaluation that gave {self.count} rows")
        return row if self._indices is None else int(self._indices[row])


class Context:
    """Evaluation state over one model: KV memory and output buffers. Close it before the model.

    `observer` is called with the inputs of matrices during every evaluation. `native_seconds` adds up the time
    spent inside llama.cpp's evaluation (decode and synchronize), an observer's included.
    """

    _evaluates_nextn = False

    def __init__(
        self, model: Model, options: ContextOptions | None = None, *, observer: InputObserver | None = None
    ) -> None:
        self._handle: Any = None
        self._native = llama()
        self.model = model
        self.options = options or ContextOptions()
        self._observer = observer  # llama.cpp keeps its callback's pointer
        self._check_model()
        if self.options.layer_inputs:
            check_layer_inputs(model, self.options.layer_inputs)
        self._handle = self._create()
        model.adopt()
        self.n_ctx = int(self._native.llama_n_ctx(self._handle))
        self.n_batch = int(self._native.llama_n_batch(self._handle))
        self.n_outputs = max(self.options.n_outputs, self.options.n_sequences)
        self.memory = Memory(
            self._native,
            self._native.llama_get_memory(self._handle),
            n_sequences=self.options.n_sequences,
            can_branch=self._can_branch,
            unified=True,
            n_rollback=self._n_rollback,
        )
        self.generation = 0
        self.native_seconds = 0.0
        self._n_vocab = model.vocabulary.size
        self._n_embd = model.n_embd
        self._layer_inputs: LayerInputs | None = None
        if self.options.layer_inputs:
            self._layer_inputs = LayerInputs(self._handle, self.options.layer_inputs, self._n_embd)
        self._n_embd_out = model.n_embd_out
        self._views: dict[str, tuple[int, FloatRows]] = {}
        self._buffers = {
            name: native_function(name, ctypes.c_void_p, ctypes.c_void_p)
            for name in ("llama_get_logits", "llama_get_embeddings")
        }
        if self.options.nextn_states:
            self._buffers[_NEXTN] = nextn_rows()
            show_nextn_states(self._handle, only_rows=self._evaluates_nextn)

    def _check_model(self) -> None:
        """Raise `UnsupportedModelError` for a model that llama.cpp would assert on, or make nothing of."""
        model = self.model
        if not model.can_generate:
            raise UnsupportedModelError(
                f"{model.path} ({model.architecture}) is not a left-to-right language model: "
                "it cannot be used to generate text"
            )
        model.require_weights()
        if self.options.rope.stretches and not model.has_rope:
            raise UnsupportedModelError(
                f"{model.path} ({model.architecture}) has no rotary positions: rope scaling cannot lengthen its context"
            )
        if model.nextn.alone and not self._evaluates_nextn:
            raise UnsupportedModelError(
                f"{model.path} holds NextN blocks without the model they belong to: it can only draft, as mtp(FILE)"
            )

    @property
    def _can_branch(self) -> bool:
        return self.model.can_branch

    @property
    def _n_rollback(self) -> int:
        # A recurrent state is one sequence's: trees are not for it.
        return self.options.n_rollback if self.model.can_roll_back and self.options.n_sequences == 1 else 0

    def _count_states(self, batch: Batch) -> int:
        return batch.n_outputs if self._evaluates_nextn else batch.n_tokens

    def _parameters(self) -> Any:  # noqa: ANN401 - a ctypes structure
        """Return what llama.cpp is asked for."""
        options = self.options
        params = self._native.llama_context_default_params()
        threads = options.n_threads or available_cores()
        params.n_ctx = options.n_ctx or options.size_for(self.model)
        params.n_batch = options.n_batch
        params.n_ubatch = min(options.n_ubatch, options.n_batch)
        params.n_seq_max = options.n_sequences
        # llama.cpp reserves a first output row for every sequence, whatever is asked for.
        params.n_outputs_max = max(options.n_outputs, options.n_sequences)
        params.n_threads = threads
        params.n_threads_batch = options.n_threads_batch or threads
        params.embeddings = options.hidden_states
        params.flash_attn_type = _FLASH_ATTENTION[options.flash_attention]
        params.type_k = _CACHE_TYPES[options.cache_type_k]
        params.type_v = _CACHE_TYPES[options.cache_type_v]
        options.rope.apply(params)
        params.kv_unified = True  # sequences share prefixes: a tree is many sequences over one prefix
        params.swa_full = True  # a rolling window could not be rolled back after a rejection
        params.no_perf = True
        params.n_rs_seq = self._n_rollback
        if self._observer is not None:
            params.cb_eval = self._observer.callback
        return params

    def _create(self) -> Any:  # noqa: ANN401 - a ctypes pointer
        params = self._parameters()
        last_native_errors()
        handle = self._native.llama_init_from_model(self.model.handle, params)
        if not handle:
            reason = last_native_errors() or "no memory"
            if "alloc" not in reason and "memory" not in reason.lower():
                raise OptionError(f"llama.cpp refuses these context options for {self.model.path}: {reason}")
            raise OutOfMemoryError(
                f"no context of {params.n_ctx} tokens for {self.model.path}: {reason}. Lower the context size (-c)"
            )
        return handle

    @property
    def handle(self) -> Any:  # noqa: ANN401 - a ctypes pointer
        """The native pointer; raises `ClosedError` after `close()`."""
        if self._handle is None:
            raise ClosedError("the context is closed")
        return self._handle

    def close(self) -> None:
        """Free the native memory; calling it again does nothing. Views become stale."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            self.generation += 1
            self._views.clear()
            self.memory.close()
            self._native.llama_free(handle)
            self.model.release()

    def __enter__(self) -> Context:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self.close()

    # -- evaluation --------------------------------------------------------------------------------------

    def decode(self, batch: Batch) -> Rows:
        """Evaluate a batch and return its output rows.

        Raises a `DecodeError` named after llama.cpp's return code; the batch's positions have then been
        dropped again from every sequence it named, so that a good batch may follow.
        """
        handle = self.handle
        self._check_batch(batch)
        self.generation += 1
        started = time.perf_counter()
        code = self._native.llama_decode(handle, batch.struct)
        # On CUDA the call above only enqueues: the time belongs to the evaluation all the same.
        self._native.llama_synchronize(handle)
        self.native_seconds += time.perf_counter() - started
        if code != 0:
            self._drop_failed(batch)
            raise decode_error(code, batch.n_tokens)
        self.memory.note_evaluation(batch.n_tokens)
        return Rows(self, self.generation, batch)

    def _check_batch(self, batch: Batch) -> None:
        """Refuse what llama.cpp would answer with an assertion, which ends the process."""
        n = batch.n_tokens
        if n < 1:
            raise OptionError("an empty batch cannot be evaluated")
        if n > self.n_batch:
            raise OptionError(f"{n} tokens in one evaluation of a context for {self.n_batch} (n_batch)")
        n_outputs = n if self.options.hidden_states else batch.n_outputs
        if n_outputs > self.n_outputs:
            raise OptionError(f"{n_outputs} output rows asked of a context for {self.n_outputs} (n_outputs)")
        if batch.first_position < 0:
            raise OptionError(f"position {batch.first_position} in a batch is negative")
        if batch.token_bounds[0] < 0 or batch.token_bounds[1] >= self._n_vocab:
            raise OptionError(f"a token of the batch is outside the vocabulary of {self._n_vocab} words")
        if batch.id_bounds[0] < 0 or batch.id_bounds[1] >= self.options.n_sequences:
            raise OptionError(f"a sequence id of the batch is outside 0 to {self.options.n_sequences - 1}")

    def _drop_failed(self, batch: Batch) -> None:
        # llama.cpp cleans up under each token's first sequence id only (llama_context::decode).
        counts = batch.id_counts[: batch.n_tokens]
        ids = batch.ids[: int(counts.sum())]
        positions = np.repeat(batch.positions[: batch.n_tokens], counts)
        for sequence in np.unique(ids):
            start = int(positions[ids == sequence].min())
            if self._can_branch:
                self.memory.truncate(start, sequence=int(sequence))
            else:
                self.memory.clear()

    # -- rows --------------------------------------------------------------------------------------------

    def _logits_view(self, count: int) -> FloatRows:
        return self._view("llama_get_logits", count, self._n_vocab)

    def _hidden_view(self, count: int) -> FloatRows:
        if not self.options.hidden_states:
            raise OptionError("this context was made without hidden states (ContextOptions.hidden_states)")
        return self._view("llama_get_embeddings", count, self._n_embd)

    def _layer_view(self, layer: int, count: int) -> FloatRows:
        if self._layer_inputs is None:
            raise OptionError("this context was made without layer inputs (ContextOptions.layer_inputs)")
        return self._layer_inputs.rows(layer, count)

    def _nextn_view(self, count: int) -> FloatRows:
        if not self.options.nextn_states:
            raise OptionError("this context was made without NextN states (ContextOptions.nextn_states)")
        return self._view(_NEXTN, count, self._n_embd_out)

    def _view(self, name: str, count: int, width: int) -> FloatRows:
        address: int | None = self._buffers[name](self.handle)
        if not address:
            raise OptionError("this evaluation gave no rows: no token of the batch asked for output")
        known = self._views.get(name)
        # The buffer only moves when it grows, so the array over it is made once and reused.
        if known is None or known[0] != address or len(known[1]) < count:
            flat = (ctypes.c_float * (count * width)).from_address(address)
            known = (address, np.ctypeslib.as_array(flat).reshape(count, width))
            self._views[name] = known
        return known[1]

    # -- state -------------------------------------------------------------------------------------------

    def save_state(self, sequence: int = 0) -> bytes:
        """Return the cached state of one sequence; it loads into any context of the same model."""
        self.memory._check_sequence(sequence)
        size = int(self._native.llama_state_seq_get_size(self.handle, sequence))
        buffer = (ctypes.c_uint8 * size)()
        written = int(self._native.llama_state_seq_get_data(self.handle, buffer, size, sequence))
        if written == 0:
            raise OutOfMemoryError("llama.cpp could not write the state of the sequence")
        return bytes(memoryview(buffer)[:written])

    def restore_state(self, state: bytes, sequence: int = 0) -> None:
        """Replace one sequence's cache by a saved state; on failure the sequence is left empty."""
        self.memory._check_sequence(sequence)
        self.generation += 1
        self.memory.truncate(0, sequence=sequence)
        buffer = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
        read = int(self._native.llama_state_seq_set_data(self.handle, buffer, len(state), sequence))
        if read == 0:
            self.memory.truncate(0, sequence=sequence)
            raise OptionError(
                "the state does not fit this context: it was saved from another model or a larger context"
            )
