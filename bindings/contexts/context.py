"""Contexts (llama_context): of a model, of its NextN blocks, and for text embeddings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from specrun.bindings.contexts.batch import Batch
from specrun.bindings.contexts.context_options import CACHE_TYPES, FLASH_ATTENTION, ContextOptions
from specrun.bindings.contexts.memory import Checkpoints, Memory
from specrun.bindings.contexts.rows import BackendSamplers, OutputBuffers, Rows, check_layer_inputs
from specrun.bindings.direct_calls import step_function
from specrun.bindings.errors import (
    ClosedError,
    ContextFullError,
    OptionError,
    OutOfMemoryError,
    UnsupportedModelError,
    decode_error,
)
from specrun.bindings.library import NativeHandle, last_native_errors, llama
from specrun.bindings.machine.patience import PATIENCE
from specrun.bindings.machine.workers import freed_while_there
from specrun.bindings.models.nextn import (
    NEXTN_ARCHITECTURES,
    SEVERAL_BLOCKS,
    select_nextn_block,
    show_nextn_states,
)
from specrun.bindings.threads import FORK, available_cores

if TYPE_CHECKING:
    from specrun.bindings.contexts.input_observer import InputObserver
    from specrun.bindings.models.model import Model

# == Contexts of a model ===========================================================================

# Architectures whose graphs read a target's context.
_DRAFTERS = {"gemma4-assistant": "mtp(FILE)", "dflash": "dflash(FILE)"}


# Architectures whose graphs end with the hidden states if these are requested.
_STATES_WITHOUT_LOGITS = frozenset({"lfm2", "lfm2moe"})


class Context:
    """Evaluation state over one model: KV memory and output buffers. Close it before the model.

    `observer` is called with the inputs of matrices during every evaluation. `native_seconds` is
    the time spent inside llama.cpp's evaluation (decode and synchronize), an observer's included.
    """

    _evaluates_nextn = False

    def __init__(
        self,
        model: Model,
        options: ContextOptions | None = None,
        *,
        observer: InputObserver | None = None,
    ) -> None:
        FORK.check()
        self._handle: Any = None
        self._native = llama()
        self.model = model
        self.options = options or ContextOptions()
        self._observer = observer
        self._check_model()
        if self.options.layer_inputs:
            check_layer_inputs(model, self.options.layer_inputs)
        self._samplers = BackendSamplers(self.options.n_sequences)
        self._handle = self._create()
        try:
            self._set_up(model)
        except BaseException:  # also an interrupt: the model could not be closed before it
            self._handle = None
            memory = getattr(self, "memory", None)
            if memory is not None:
                memory.close()
            raise

    def _set_up(self, model: Model) -> None:
        """Read the facts of the native context, and make its parts."""
        model.adopt(self)
        self.n_ctx = int(self._native.llama_n_ctx(self._handle))
        threads = self._native.llama_n_threads, self._native.llama_n_threads_batch
        # Whether its threads are at work is noted once, with the first evaluation.
        self._n_threads = max(count(self._handle) for count in threads)
        self._has_threads_to_note = self._is_threaded = self._n_threads > 1
        self.n_batch = int(self._native.llama_n_batch(self._handle))
        self.n_outputs = self._n_outputs
        self.memory = Memory(
            self._native,
            NativeHandle(self._native.llama_get_memory(self._handle), None, self._handle),
            n_sequences=self.options.n_sequences,
            can_branch=self._can_branch,
            unified=not self.options.apart,
            n_rollback=self._n_rollback,
            checkpoints=self._checkpoints(),
            spare=self.options.n_sequences if self._has_spare else None,
        )
        self.native_seconds = 0.0
        # A device's work is only enqueued by the call that evaluates; processors are done by then.
        self.waits_for_device = bool(model.placed.offload)
        # Called while a device computes: it must not call llama.cpp.
        self.while_computing: Callable[[], None] | None = None
        self._n_vocab = model.vocabulary.size
        self._has_hidden_states = self.options.hidden_states
        self._buffers = OutputBuffers(self._handle, model, self.options)
        if self.options.nextn_states:
            show_nextn_states(self._handle, only_rows=self._evaluates_nextn)

    def _check_model(self) -> None:
        """Raise `UnsupportedModelError` for a model that llama.cpp would assert on."""
        model = self.model
        name = f"{model.path} ({model.architecture})"
        if not model.can_generate:
            problem = f"{name} is not a left-to-right language model"
            raise UnsupportedModelError(f"{problem}: it cannot be used to generate text")
        model.require_weights()
        no_logits = model.architecture in _STATES_WITHOUT_LOGITS and model.pooling is None
        if self.options.hidden_states and no_logits:
            problem = f"{name}: llama.cpp computes no logits of it beside its final hidden states"
            reason = "which Medusa's, Hydra's and EAGLE's heads read"
            raise UnsupportedModelError(f"{problem}, {reason}: take draft(small.gguf) or jacobi")
        if self.options.rope.stretches and not model.has_rope:
            problem = f"{name} has no rotary positions"
            raise UnsupportedModelError(f"{problem}: rope scaling cannot lengthen its context")
        self.options.rope.check(model.rope_scaling_kind, model.rope_factor)
        if model.architecture in _DRAFTERS:
            only = f"it can only draft for a target, as {_DRAFTERS[model.architecture]}"
            raise UnsupportedModelError(f"{name} is no model of its own: {only}")
        if model.nextn.alone and not self._evaluates_nextn:
            problem = f"{model.path} holds NextN blocks without the model they belong to"
            raise UnsupportedModelError(f"{problem}: it can only draft, as mtp(FILE)")

    @property
    def _can_branch(self) -> bool:
        return self.model.can_branch

    @property
    def _n_rollback(self) -> int:
        return self.options.n_rollback if self.model.can_roll_back else 0

    @property
    def _has_spare(self) -> bool:
        """Whether a sequence more holds an earlier state of the only one (`Memory.hold`)."""
        options, can_drop = self.options, self._can_branch or self.model.can_roll_back
        return bool(options.n_rollback) and options.n_sequences == 1 and not can_drop

    @property
    def _n_outputs(self) -> int:
        """The most rows; after a return to a held state accepted tokens are evaluated again."""
        again = self.options.n_rollback if self._has_spare else 0
        # llama.cpp reserves a first output row for every sequence, whatever the parameters are.
        return max(self.options.n_outputs + again, self.options.n_sequences + self._has_spare)

    def _checkpoints(self) -> Checkpoints | None:
        """Return the room for checkpoints of recurrent states, if there is any."""
        budget = self.options.checkpoint_memory
        return None if self._can_branch or not budget else Checkpoints(self._handle, budget)

    @property
    def _lent(self) -> tuple[Any, ...]:
        """The native memory of other contexts that it reads."""
        return ()

    def _parameters(self) -> Any:  # noqa: ANN401 - a ctypes structure
        """Return the parameters for llama.cpp."""
        options = self.options
        params = self._native.llama_context_default_params()
        threads = options.n_threads or available_cores()
        params.n_ctx = options.n_ctx or options.size_for(self.model)
        params.n_batch = options.n_batch
        params.n_ubatch = min(options.n_ubatch, options.n_batch)
        params.n_seq_max = options.n_sequences + self._has_spare
        params.n_outputs_max = self._n_outputs
        # Samplers (`cut_rows`) are to take all of them, though every node is sequence 0's.
        params.n_outputs_max_per_seq = params.n_outputs_max
        params.n_threads = threads
        params.n_threads_batch = options.n_threads_batch or threads
        params.embeddings = options.hidden_states
        if self.model.pooling is not None:
            params.pooling_type = 0  # none: states are read token by token
        params.flash_attn_type = FLASH_ATTENTION[options.flash_attention]
        params.type_k = CACHE_TYPES[options.cache_type_k]
        params.type_v = CACHE_TYPES[options.cache_type_v]
        params.offload_kqv = options.offload_kv
        options.rope.apply(params)
        # Sequences share prefixes: a tree is many sequences over one prefix.
        params.kv_unified = not options.apart
        # A rolling window of keys and values could not be rolled back after a rejection.
        params.swa_full = True
        params.no_perf = True
        params.n_rs_seq = self._n_rollback
        if self._observer is not None:
            params.cb_eval = self._observer.callback
        return params

    def _create(self) -> Any:  # noqa: ANN401 - a ctypes pointer
        params = self._parameters()
        # llama.cpp keeps the tokens that may be taken back, and one, together in a part of a batch
        # that must hold more; it asserts so when it evaluates.
        part, least = min(params.n_ctx, params.n_ubatch), params.n_rs_seq + 2
        if params.n_rs_seq and part < least:
            problem = f"{params.n_rs_seq} tokens of {self.model.path} are to be taken back at once"
            advice = (
                f"raise the tokens of one computation (-ub, -b, -c) from {part} to {least} or more"
            )
            raise OptionError(f"{problem}: {advice}")
        last_native_errors()
        model = self.model.handle
        handle = self._native.llama_init_from_model(model, params)
        if not handle:
            reason = last_native_errors() or "no memory"
            if "alloc" not in reason and "memory" not in reason.lower():
                problem = f"llama.cpp refuses these context options for {self.model.path}"
                raise OptionError(f"{problem}: {reason}")
            problem = f"no context of {params.n_ctx} tokens for {self.model.path}: {reason}"
            raise OutOfMemoryError(f"{problem}. Lower the context size (-c)")
        # llama.cpp keeps the observer's callback, and pointers to samplers.
        kept = model, self._observer, self._samplers.chains, *self._lent
        free = freed_while_there(self._native.llama_free, self.model.placed.workers)
        owned = NativeHandle(handle, free, *kept)
        if self.model.adapters:
            from specrun.bindings.models.model import set_loras

            set_loras(owned, self.model.adapters)
        return owned

    @property
    def handle(self) -> Any:  # noqa: ANN401 - a ctypes pointer
        """The native pointer; raises `ClosedError` after `close()`."""
        handle = self._handle  # read once: another thread may close it
        if handle is None:
            raise ClosedError("the context is closed")
        return handle

    @property
    def is_open(self) -> bool:
        """Whether it has not been closed."""
        return self._handle is not None

    def close(self) -> None:
        """Free the native memory, once no call is in it and no view refers to it.

        Calling it again does nothing. Rows become stale.
        """
        self._handle = None
        self.memory.close()
        self._buffers.close()

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- evaluation --------------------------------------------------------------------------------

    def cut_rows(self, k: int | None) -> bool:
        """Give only the k best logits of every row from the next evaluation on; None: whole rows.

        `Rows.candidates` then has them, until a batch comes that has another layout: its rows
        are whole, and those after it. Returns False, and gives whole rows, if llama.cpp cannot
        sample on the device.
        """
        return self._samplers.cut_to(self.handle, k)

    def decode(self, batch: Batch) -> Rows:
        """Evaluate a batch and return its output rows.

        Raises a `DecodeError` named after llama.cpp's return code; the batch's positions have then
        been dropped again from every sequence it named, so that a good batch may follow.
        """
        handle = self._handle  # read once: another thread may close it
        if handle is None:
            return self.handle  # type: ignore[no-any-return]  # raises
        low, high = batch.token_bounds
        # Batches of one shape differ in tokens and positions only.
        if (
            batch.checked_by is not self
            or low < 0
            or high >= self._n_vocab
            or batch.first_position < 0
        ):
            self._check_batch(batch)
        if FORK.lost:
            FORK.check()
        if self._has_threads_to_note:
            FORK.note_work()
            self._has_threads_to_note = False
        if PATIENCE.is_unwatched and self._is_threaded:
            PATIENCE.watch(self._n_threads)
        native, memory, struct = self._native, self.memory, batch.struct
        buffers, samplers, takes_back = self._buffers, self._samplers, memory.n_rollback
        buffers.generation += 1  # all rows are stale
        if samplers.in_force is not None or samplers.is_half_done:
            samplers.before_evaluation(handle, batch)
        buffers.n_candidates = samplers.in_force
        if takes_back:
            memory.note_evaluation({})  # until it succeeds there is nothing to take back
        started = perf_counter()
        code = native.llama_decode(handle, struct)
        if self.waits_for_device:  # the time belongs to the evaluation all the same
            try:
                if self.while_computing is not None and code == 0:
                    self.while_computing()
            finally:
                native.llama_synchronize(handle)
        self.native_seconds += perf_counter() - started
        if code != 0:
            self._drop_failed(batch)
            raise decode_error(code, batch.n_tokens)
        if takes_back:
            memory.note_evaluation(batch.tokens_by_sequence())
        n_states = batch.n_outputs if self._evaluates_nextn else batch.n_tokens
        # With hidden states llama.cpp gives a row for every token, whatever the flags are.
        return Rows(buffers, batch, n_states, every_token=self._has_hidden_states)

    @property
    def graphs_reused(self) -> int:
        """How many evaluations so far had the shape of the one before; 0 once it is closed."""
        handle = self._handle  # read once: another thread may close it
        return 0 if handle is None else int(self._native.llama_perf_context(handle).n_reused)

    @property
    def can_repeat(self) -> bool:
        """Whether an evaluation need not pass by `decode`: no samplers, no recurrent state."""
        samplers = self._samplers
        is_plain = samplers.in_force is None and not samplers.is_half_done
        # A stand-in for the library evaluates itself.
        return is_plain and not self.memory.n_rollback and self._native is llama()

    def stepper(self, batch: Batch) -> Callable[[int, int], npt.NDArray[np.float32]] | None:
        """Return a call that evaluates a batch of one token again, with a token and its position.

        It returns the row of logits, a view that dies with the next evaluation. The batch names one
        sequence, and the token is of the vocabulary. None if an evaluation must pass by `decode`
        (`can_repeat`), or nothing was compiled. Raises as `decode` does.
        """
        waits = self.waits_for_device
        call = step_function(batch.address, batch.n_bytes, synchronizes=waits)
        if call is None or not self.can_repeat:
            return None
        if batch.checked_by is not self:
            self._check_batch(batch)
        if self._has_threads_to_note:
            FORK.note_work()
            self._has_threads_to_note = False
        buffers, is_threaded = self._buffers, self._is_threaded

        def step(token: int, position: int) -> npt.NDArray[np.float32]:
            handle = self._handle or self.handle  # read once: another thread may close it
            if FORK.lost:
                FORK.check()
            if PATIENCE.is_unwatched and is_threaded:
                PATIENCE.watch(self._n_threads)
            buffers.generation += 1
            code, seconds, address = call(handle, token, position)
            self.native_seconds += seconds
            if code != 0:
                self._drop_failed(batch)
                raise decode_error(code, 1)
            _, known, rows = buffers.whole_rows
            return rows[0] if known == address else buffers.logits(1)[0]

        return step

    def _check_batch(self, batch: Batch) -> None:
        """Refuse batches for which an assertion of llama.cpp would end the process."""
        n, n_ids = batch.n_tokens, self.options.n_sequences
        n_outputs = n if self.options.hidden_states else batch.n_outputs
        if n < 1:
            problem = "an empty batch cannot be evaluated"
        elif n > self.n_batch:
            problem = f"{n} tokens in one evaluation of a context for {self.n_batch} (n_batch)"
        elif n_outputs > self.n_outputs:
            problem = f"{n_outputs} output rows asked of a context for {self.n_outputs} (n_outputs)"
        elif batch.first_position < 0:
            problem = f"position {batch.first_position} in a batch is negative"
        elif batch.token_bounds[0] < 0 or batch.token_bounds[1] >= self._n_vocab:
            problem = f"a token of the batch is outside the vocabulary of {self._n_vocab} tokens"
        elif batch.id_bounds[0] < 0 or batch.id_bounds[1] >= n_ids:
            problem = f"a sequence id of the batch is outside 0 to {n_ids - 1}"
        else:
            batch.checked_by = self
            return
        raise OptionError(problem)

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


# == Contexts over NextN blocks: each token comes with the hidden state before it ==================


_MTP = 1  # llama_context_type


class StateBatch(Batch):
    """A batch with hidden states in addition to the tokens: `states`, float32 [capacity, width]."""

    def __init__(self, capacity: int, width: int, max_ids_per_token: int = 1) -> None:
        super().__init__(capacity, max_ids_per_token)
        self.states: npt.NDArray[np.float32] = np.zeros((capacity, width), np.float32)
        self._point(embd=self.states)


class MtpContext(Context):
    """Evaluates a model's NextN blocks, with keys and values of their own, and not its trunk.

    Token x_i at position i comes with the state that its context's `Rows.nextn_state` gave for
    position i - 1. The rows are logits for position i + 1, and a state in the place of the trunk's
    to go on with. All tokens of a batch give rows, or none: for a part, llama.cpp would return
    other tokens' states for some architectures.

    Raises `UnsupportedModelError` if the model has no NextN blocks, was loaded without them, or
    is of an architecture that llama.cpp cannot draft for.
    """

    _evaluates_nextn = True

    def __init__(self, model: Model, options: ContextOptions) -> None:
        super().__init__(model, dataclasses.replace(options, nextn_states=True))
        self.n_blocks = model.nextn.count
        self._block = 0

    def _check_model(self) -> None:
        super()._check_model()
        check_nextn(self.model)

    @property
    def _can_branch(self) -> bool:
        return True  # a NextN block attends to all positions, whatever the trunk does

    @property
    def _n_rollback(self) -> int:
        return 0

    def _parameters(self) -> Any:  # noqa: ANN401 - a ctypes structure
        params = super()._parameters()
        params.ctx_type = _MTP
        return params

    def select(self, block: int) -> None:
        """Let the next evaluations use another block."""
        if not 0 <= block < self.n_blocks:
            raise OptionError(f"NextN block {block} of a model that has {self.n_blocks}")
        if block != self._block:
            select_nextn_block(self.handle, block)
            self._block = block

    def decode(self, batch: Batch) -> Rows:
        """Evaluate a batch with hidden states; see `Context.decode`."""
        if not isinstance(batch, StateBatch) or batch.states.shape[1] != self.model.n_embd_out:
            width = self.model.n_embd_out
            raise OptionError(f"NextN blocks read hidden states of {width} numbers beside tokens")
        asking = f"{batch.n_outputs} of {batch.n_tokens} tokens"
        if batch.n_outputs not in (0, batch.n_tokens):
            raise OptionError(f"{asking} need rows: all must, or none")
        return super().decode(batch)


def can_draft_nextn(model: Model) -> bool:
    """Whether llama.cpp can draft with the NextN blocks of this model, as it is loaded."""
    try:
        check_nextn(model)
    except UnsupportedModelError:
        return False
    return True


def check_nextn(model: Model) -> None:
    """Raise `UnsupportedModelError` unless llama.cpp can draft with this model's NextN blocks."""
    works = ", ".join(NEXTN_ARCHITECTURES)
    kind, count = model.architecture, model.nextn.count
    if not count:
        reason = "many GGUFs are made without them, and only some architectures have any"
        problem = f"has no NextN blocks: {reason} ({works})"
    elif kind not in NEXTN_ARCHITECTURES:
        can = f"llama.cpp can draft with the NextN blocks of these only: {works}"
        problem = f"is a {kind} model, and {can}"
    elif count > 1 and kind not in SEVERAL_BLOCKS:
        problem = f"has {count} NextN blocks, and llama.cpp evaluates one block of {kind}"
    elif not model.has_loaded_nextn:
        reason = "only the target is loaded with them (load_nextn), for drafts of its own"
        problem = f"was loaded without its NextN blocks: {reason}"
    else:
        return
    raise UnsupportedModelError(f"{model.path} {problem}")


# == Text embeddings: the final states of a text's tokens, pooled to one vector of length 1 ========
#
# For models that were trained for it: their file names the pooling of states, others lack it.


Vector = npt.NDArray[np.float32]
_MOST_ROWS = 512


class TextEmbedder:
    """Makes embeddings with a model that others may use meanwhile; for one thread at a time.

    Raises `UnsupportedModelError` for a model that makes none. It has a context of its own: close
    it before the model, or use it as a context manager.
    """

    def __init__(self, model: Model, options: ContextOptions) -> None:
        pooling = model.pooling
        if pooling is None:
            raise UnsupportedModelError(f"{model.path.name} writes texts and makes no embeddings")
        self.pooling = pooling
        rows = min(_MOST_ROWS, options.n_batch)
        own = dataclasses.replace(options, n_batch=rows, n_outputs=rows, hidden_states=True)
        self._context = Context(model, own)
        self._batch = Batch(self._context.n_batch, 1)
        self._width = model.n_embd

    def embed(self, tokens: Sequence[int]) -> Vector:
        """Return the embedding of a text, float32 of shape [n_embd] and length 1."""
        if not tokens:
            raise OptionError("the text is empty: an embedding needs a token at least")
        if len(tokens) > self._context.n_ctx:
            has = f"the text has {len(tokens)} tokens and the context {self._context.n_ctx}"
            raise ContextFullError(f"{has}: shorten it, or raise -c")
        pooled = self._pooled(tokens)
        length = float(np.linalg.norm(pooled))
        return (pooled / length if length > 0.0 else pooled).astype(np.float32)

    def _pooled(self, tokens: Sequence[int]) -> npt.NDArray[np.float64]:
        """Return the pooled states of a text."""
        self._context.memory.clear()
        pooled = np.zeros(self._width)
        for start in range(0, len(tokens), self._batch.capacity):
            piece = tokens[start : start + self._batch.capacity]
            self._batch.fill_chain(piece, start, [0], len(piece))
            rows = self._context.decode(self._batch)
            states = rows.hidden_states(range(len(piece))).astype(np.float64)
            if self.pooling == "mean":
                pooled = pooled + states.sum(axis=0) / len(tokens)
                continue
            pooled = states[0 if self.pooling == "first" else -1]
            if self.pooling == "first":
                break
        return pooled

    def close(self) -> None:
        """Free the context."""
        self._context.close()

    def __enter__(self) -> TextEmbedder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
