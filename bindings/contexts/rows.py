"""Output rows of an evaluation (logits, hidden states, layer inputs) as arrays without copies.

Backend sampling leaves only the k best logits of each row."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from specrun.bindings.contexts.batch import Batch
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.direct_calls import direct_call
from specrun.bindings.errors import ClosedError, OptionError, StaleViewError, UnsupportedModelError
from specrun.bindings.functions import call
from specrun.bindings.library import (
    NativeHandle,
    cpp_names,
    exported_function,
    llama,
    native_function,
)
from specrun.bindings.models.nextn import nextn_rows

if TYPE_CHECKING:
    from specrun.bindings.models.model import Model

# == Inputs of a model's layers, for EAGLE-3, which reads early layers =============================
#
# There is no C interface for this, only two C++ functions that libllama exports under mangled
# names. A graph gives its layers' inputs only if its architecture was prepared for it. A request to
# any other ends the process, so the architecture is compared with a list first.


_NAMES = """
    gemma4 gpt-oss hunyuan-dense lfm2 lfm2moe llama mimo2 minimax-m2 muse-glimmer nanbeige
    nemotron_h nemotron_h_moe qwen3 qwen35 qwen35moe qwen3moe
"""
LAYER_INPUT_ARCHITECTURES = frozenset(_NAMES.split())
"""Architectures whose graphs hand out layer inputs in llama-cpp-python 0.3.36's llama.cpp.

Recurrent and hybrid ones are left out if their state cannot take drafts back.
"""

# Those of which the last layer's output is shown, too, as the input of a layer behind it.
_WITH_OUTPUT = frozenset({"mimo2", "nemotron_h", "nemotron_h_moe"})

_OF_LAYER = "llama_context *", "uint32_t"
_SET = cpp_names("llama_set_embeddings_layer_inp", "void", *_OF_LAYER, "bool")
_GET = cpp_names("llama_get_embeddings_layer_inp", "float *", *_OF_LAYER)


def layer_inputs(model: Model) -> int:
    """Return how many layers have inputs that llama.cpp shows, of a model that has any."""
    return model.n_layer + (model.architecture in _WITH_OUTPUT)


def check_layer_inputs(model: Model, layers: Sequence[int]) -> None:
    """Raise UnsupportedModelError for a model without layer inputs, OptionError for no layer.

    Layers count from 0; the input of layer 0 are the token embeddings.
    """
    if model.architecture not in LAYER_INPUT_ARCHITECTURES:
        problem = f"llama.cpp does not hand out layer inputs of {model.architecture} models"
        works = ", ".join(sorted(LAYER_INPUT_ARCHITECTURES))
        reads = f"which this drafter reads; it does for {works}"
        raise UnsupportedModelError(f"{model.path}: {problem}, {reads}")
    last = layer_inputs(model) - 1
    for layer in layers:
        if not 0 <= layer <= last:
            there = f"{model.path} has layers 0 to {last}"
            raise OptionError(f"{there}, and the input of layer {layer} is asked for")
    _setter(), _layer_input_rows()


def _show_layer_inputs(context: Any, layers: Iterable[int]) -> None:  # noqa: ANN401 - a ctypes pointer
    """Let a context keep the inputs of `layers` in every evaluation from now on, for all tokens.

    A row belongs to each token of a batch in order, whatever its output flag is.
    """
    enable = _setter()
    for layer in sorted(set(layers)):
        enable(context, layer, True)


def _layer_input_rows() -> Any:  # noqa: ANN401 - a ctypes function
    """Return the function that gives the address of a context's inputs of a layer."""
    return exported_function(_GET, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32)


def _setter() -> Any:  # noqa: ANN401 - a ctypes function
    return exported_function(_SET, None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_bool)


# == Rows ==========================================================================================


FloatRows = npt.NDArray[np.float32]
IdRows = npt.NDArray[np.int32]
_LOGITS, _HIDDEN, _NEXTN = "llama_get_logits", "llama_get_embeddings", "llama_get_embeddings_nextn"
_KINDS = {_HIDDEN: ("hidden states", "hidden_states"), _NEXTN: ("NextN states", "nextn_states")}
_NEVER_READ = -1, -1, np.empty((0, 0), np.float32)  # no generation, no address
_CANDIDATES = "llama_get_sampled_candidates_ith", "llama_get_sampled_logits_ith"


class Candidates(NamedTuple):
    """The k best tokens of a row, in no order, and their logits, both [k]; of equals any are in."""

    tokens: IdRows
    logits: FloatRows


class OutputBuffers:
    """The output buffers of one context; close them before it.

    `generation` counts the events that may overwrite or move them. If `n_candidates` is a
    number, only so many logits of each row reach the host.
    """

    n_candidates: int | None = None

    def __init__(self, handle: NativeHandle, model: Model, options: ContextOptions) -> None:
        self.generation = 0
        self._handle: NativeHandle | None = handle
        self._options = options
        self._n_vocab = model.vocabulary.size
        # The widths of rows, by function or layer.
        self._widths: dict[str | int, int] = {_LOGITS: self._n_vocab}
        if options.hidden_states:
            self._widths[_HIDDEN] = model.n_embd
        if options.nextn_states:
            self._widths[_NEXTN] = model.n_embd_out
        self._widths |= dict.fromkeys(options.layer_inputs, model.n_embd)
        # By function, or layer: the generation that they were read in, their address, and a view.
        self._views: dict[str | int, tuple[int, int | None, FloatRows]] = {}
        self._fresh_candidates: tuple[int, tuple[IdRows, FloatRows]] | None = None
        # The generation of the rows of logits that were read last, their address, and views.
        self.whole_rows: tuple[int, int, list[FloatRows]] = (-1, 0, [])
        self._states: tuple[int, int | None, list[FloatRows]] = (-1, None, [])  # hidden ones, alike
        self._addresses: dict[str, Any] = {
            **{name: direct_call(name) for name in (_LOGITS, _HIDDEN)},
            **{name: call(name) for name in _CANDIDATES},
        }
        self._count = call("llama_get_sampled_candidates_count_ith")
        if options.nextn_states:
            self._addresses[_NEXTN] = nextn_rows()
        if options.layer_inputs:
            _show_layer_inputs(handle, options.layer_inputs)
            self._layer_address = _layer_input_rows()

    def logits(self, count: int) -> list[FloatRows]:
        """Return the first `count` rows of logits, or more, each a view [n_vocab]."""
        generation, (known, address, rows) = self.generation, self.whole_rows
        if known == generation and len(rows) >= count:
            return rows
        # The buffer only moves when it grows, so views are made once and are good for all rounds.
        found = self._addresses[_LOGITS](self._handle or self._open())
        if found != address or len(rows) < count:
            rows = list(self.rows_of(_LOGITS, count))
            address = self._addresses[_LOGITS](self._open())  # a signal may close it on any line
        self.whole_rows = generation, address, rows
        return rows

    def hidden_states(self, count: int) -> list[FloatRows]:
        """Return the first `count` final hidden states, or more, each a view [1, n_embd]."""
        generation, (known, address, states) = self.generation, self._states
        if known == generation and len(states) >= count:
            return states
        found = self._addresses[_HIDDEN](self._handle or self._open())
        if found != address or len(states) < count:
            states = list(self.rows_of(_HIDDEN, count)[:, None])
        self._states = generation, found, states
        return states

    def candidates(self, count: int, k: int) -> tuple[IdRows, FloatRows] | None:
        """Return tokens and logits of all `count` rows, [count, k]; None if there are not k each.

        Devices without top-k give whole rows: `uncut` has them.
        """
        fresh = self._fresh_candidates
        if fresh is None or fresh[0] != self.generation:
            handle = self._open()
            if any(self._count(handle, row) != k for row in (-count, -1)):
                return None
            # They lie as far apart as whole rows do.
            tokens, logits = (self._sampled(handle, name, count)[:, :k] for name in _CANDIDATES)
            fresh = self._fresh_candidates = self.generation, (tokens.view(np.int32), logits)
        return fresh[1]

    def uncut(self, count: int) -> FloatRows:
        """Return the rows that samplers left whole, [count, n_vocab]."""
        return self._sampled(self._open(), _CANDIDATES[1], count)

    def _sampled(self, handle: NativeHandle, name: str, count: int) -> FloatRows:
        _, address, rows = self._views.get(name, _NEVER_READ)
        # Of negative numbers the last row is -1.
        found = self._addresses[name](handle, -count)
        if found != address or len(rows) < count:
            rows = self._over(found, count, self._n_vocab)
            self._views[name] = self.generation, found, rows
        return rows

    def close(self) -> None:
        """Make all rows stale, for good."""
        self._handle = None
        self.generation += 1
        self._views, self.whole_rows, self._states = {}, (-1, 0, []), (-1, None, [])

    def require_fresh(self, generation: int) -> None:
        """Raise `StaleViewError` for rows of an earlier generation, `ClosedError` after `close`."""
        if generation != self.generation:
            self._open()
            problem = (
                "these rows were overwritten by a later evaluation: copy rows that must be kept"
            )
            raise StaleViewError(problem)

    def _open(self) -> NativeHandle:
        handle = self._handle  # read once: another thread may close it
        if handle is None:
            raise ClosedError("the context is closed")
        return handle

    def rows_of(self, source: str | int, count: int) -> FloatRows:
        """Return the first `count` rows, or more, of a function's name or a layer.

        Raises `OptionError` for outputs that the context was made without.
        """
        generation = self.generation
        known, address, rows = self._views.get(source, _NEVER_READ)
        if known == generation and len(rows) >= count:
            return rows
        if source not in self._widths:
            self._refuse(source)
        handle = self._handle or self._open()
        found: int | None
        if isinstance(source, int):
            found = self._layer_address(handle, source)
        else:
            found = self._addresses[source](handle)
        if found != address or len(rows) < count:
            rows = self._over(found, count, self._widths[source])
        self._views[source] = generation, found, rows
        return rows

    def _refuse(self, source: str | int) -> NoReturn:
        if isinstance(source, int) and self._options.layer_inputs:
            rows, option = f"the inputs of layer {source}", "layer_inputs"
        elif isinstance(source, int):
            rows, option = "layer inputs", "layer_inputs"
        else:
            rows, option = _KINDS[source]
        raise OptionError(f"this context was made without {rows} (ContextOptions.{option})")

    def _over(self, address: int | None, count: int, width: int) -> FloatRows:
        """Return an array of `count` rows over a buffer of 32-bit numbers."""
        if not address:
            problem = "this evaluation gave no rows: no token of the batch asked for output"
            raise OptionError(problem)
        flat: Any = (ctypes.c_float * (count * width)).from_address(address)
        flat.keeps = self._open()  # as long as there is a view, its memory is not freed
        return np.ctypeslib.as_array(flat).reshape(count, width)


class Rows:
    """The output rows of one evaluation, valid until the next one on the same context.

    Row i belongs to the i-th token of the batch with an output flag. Reading a row after the
    context has evaluated again raises `StaleViewError`: llama.cpp reuses, and may move, the memory.
    `every_token`: llama.cpp gave a row for every token, whatever the flags were; `n_states` is the
    number of tokens with NextN states. If `Context.cut_rows` is in force, rows have candidates in
    the place of logits.
    """

    __slots__ = (
        *("_are_plain", "_buffers", "_generation", "_indices", "_n_candidates"),
        *("_n_states", "_n_tokens", "_native_count", "count"),
    )

    def __init__(
        self, buffers: OutputBuffers, batch: Batch, n_states: int, *, every_token: bool
    ) -> None:
        count, n_tokens, n_candidates = batch.n_outputs, batch.n_tokens, buffers.n_candidates
        self._buffers, self._generation = buffers, buffers.generation
        self._n_candidates, self._n_states, self._n_tokens = n_candidates, n_states, n_tokens
        self.count = self._native_count = count
        self._indices: npt.NDArray[np.intp] | None = None
        # Whether row i lies at place i, whole.
        self._are_plain = n_candidates is None
        if every_token and count < n_tokens:
            self._are_plain = False
            self._native_count = n_tokens
            self._indices = np.flatnonzero(batch.outputs[:n_tokens])

    def logits(self, row: int) -> FloatRows:
        """Return the logits of one row, float32 of shape [n_vocab], a view."""
        buffers = self._buffers
        if self._are_plain and 0 <= row < self.count and self._generation == buffers.generation:
            # Views are the buffers' to keep: closed ones are freed with the last one in use.
            generation, _, known = buffers.whole_rows
            if generation != self._generation or row >= len(known):
                known = buffers.logits(self._native_count)
            return known[row]
        index = self._index_of(row)
        if self._n_candidates is not None:
            if self.candidates(row) is not None:
                kept = f"the {self._n_candidates} best logits"
                raise OptionError(f"only {kept} of each row were copied (Context.cut_rows)")
            return self._buffers.uncut(self._native_count)[index]  # type: ignore[no-any-return]
        return self._buffers.logits(self._native_count)[index]

    def first(self, count: int) -> list[FloatRows]:
        """Return the logits of the first `count` rows, as `logits` does one by one."""
        if self._are_plain and count <= self.count and self._generation == self._buffers.generation:
            return self._buffers.logits(self._native_count)[:count]
        return [self.logits(row) for row in range(count)]

    def candidates(self, row: int) -> Candidates | None:
        """Return the best tokens of one row, views; None if its logits are whole."""
        index = self._index_of(row)
        if self._n_candidates is None:
            return None
        found = self._buffers.candidates(self._native_count, self._n_candidates)
        return None if found is None else Candidates(found[0][index], found[1][index])

    def hidden_states(self, wanted: Sequence[int]) -> FloatRows:
        """Return the final normed hidden states of rows, a copy, float32 [n, n_embd]."""
        buffers = self._buffers
        is_fresh = self._indices is None and self._generation == buffers.generation
        if is_fresh and len(wanted) == 1 and 0 <= wanted[0] < self.count:  # the usual request
            return buffers.hidden_states(self._native_count)[wanted[0]].copy()
        places = [self._index_of(row) for row in wanted]
        states = buffers.hidden_states(self._native_count)
        return np.concatenate([states[place] for place in places])

    def layer_input(self, token: int, layer: int) -> FloatRows:
        """Return the input of a layer at one token of the batch, float32 of shape [n_embd], a view.

        Every token has one, whatever its output flag was.
        """
        self._buffers.require_fresh(self._generation)
        if not 0 <= token < self._n_tokens:
            raise OptionError(f"token {token} of an evaluation of {self._n_tokens} tokens")
        return self._buffers.rows_of(layer, self._n_tokens)[token]  # type: ignore[no-any-return]

    def nextn_state(self, token: int) -> FloatRows:
        """Return the input of NextN blocks for a token, row or not: a float32 view [n_embd_out]."""
        self._buffers.require_fresh(self._generation)
        if not 0 <= token < self._n_states:
            given = f"an evaluation that gave {self._n_states} states"
            raise OptionError(f"the state of token {token}, of {given}")
        return self._buffers.rows_of(_NEXTN, self._n_states)[token]  # type: ignore[no-any-return]

    def _index_of(self, row: int) -> int:
        if self._generation != self._buffers.generation:
            self._buffers.require_fresh(self._generation)
        if not 0 <= row < self.count:
            raise OptionError(f"row {row} of an evaluation that gave {self.count} rows")
        return row if self._indices is None else int(self._indices[row])


# == Backend sampling (llama_set_sampler): top-k inside a context's graph, row by row ==============
#
# Only the k best logits of a row and their tokens are then copied from the device, not the row.
#
# llama.cpp keeps the plan of a graph's memory for the next one of as many nodes. If rows belong to
# other sequences than before, that plan lets the candidates of one row overwrite another's
# (measured: in 2 of 500 evaluations of changing trees, in none of those that came after a new
# reservation). So samplers serve evaluations of one layout: before any other they are removed.


class BackendSamplers:
    """The top-k samplers of a context, one for each of its sequences.

    `in_force` is the k that rows are cut to, None for whole rows: again if an evaluation differs
    from the first with them in tokens, sequence ids or rows. llama.cpp keeps pointers to the
    samplers: `chains` are to be freed after the context. `is_half_done` after an interrupt.
    """

    def __init__(self, n_sequences: int) -> None:
        self.chains: list[NativeHandle] = []
        self.in_force: int | None = None
        self._n_sequences = n_sequences
        self._layout: tuple[bytes, ...] | None = None  # of the first evaluation with them
        self.is_half_done = False
        self._set = call("llama_set_sampler")

    def cut_to(self, context: NativeHandle, k: int | None) -> bool:
        """Cut rows to their k best logits from the next evaluation on; None: give them whole.

        Returns False, and leaves them whole, if llama.cpp cannot: with tensors split over
        devices. The graph is reserved anew with the next evaluation.
        """
        self._repair(context)
        self._layout = None
        if k is None and self.in_force is None:
            return True
        self.is_half_done = True
        # A chain serves one sequence, once: llama.cpp asserts that it is not attached again.
        chains = [] if k is None else [_top_k(k) for _ in range(self._n_sequences)]
        self.chains += chains  # those that go are freed when none of them is attached any more
        for each in enumerate(chains):
            if not self._set(context, *each):
                self._repair(context)
                return False
        if k is None:
            self._detach(context)
        self.chains[:] = chains
        self.in_force = k
        self.is_half_done = False
        return True

    def before_evaluation(self, context: NativeHandle, batch: Batch) -> None:
        """Take the samplers off if the batch is laid out unlike the first that they served."""
        self._repair(context)
        if self.in_force is None:
            return
        layout = batch.layout()
        if self._layout is None:
            self._layout = layout
        elif self._layout != layout:
            self.cut_to(context, None)

    def _repair(self, context: NativeHandle) -> None:
        """Give whole rows again, if an interrupt came while samplers were attached."""
        if self.is_half_done:
            self._detach(context)
            self.in_force = None
            self.chains.clear()
            self.is_half_done = False

    def _detach(self, context: NativeHandle) -> None:
        for sequence in range(self._n_sequences):
            self._set(context, sequence, None)


def _top_k(k: int) -> NativeHandle:
    """Return a chain of one sampler, which is freed with it."""
    params: Any = llama().llama_sampler_chain_default_params()
    kind: Any = type(params)
    make = native_function("llama_sampler_chain_init", ctypes.c_void_p, kind)
    chain = NativeHandle(make(params), call("llama_sampler_free"))
    call("llama_sampler_chain_add")(chain, call("llama_sampler_init_top_k")(k))
    return chain
