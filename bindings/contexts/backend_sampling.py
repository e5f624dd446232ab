"""Backend sampling (llama_set_sampler): top-k inside a context's graph, row by row.

Only the k best logits of a row and their tokens are then copied from the device, not the row.

llama.cpp keeps the plan of a graph's memory for the next one of as many nodes. Where rows belong to
other sequences than before, that plan lets the candidates of one row overwrite another's (measured:
in 2 of 500 evaluations of changing trees, in none of those that came after a new reservation). So
samplers serve evaluations of one layout: before any other they are taken off.
"""

from __future__ import annotations

import ctypes
from typing import Any

from specrun.bindings.contexts.batch import Batch
from specrun.bindings.library import NativeHandle, llama, native_function

_pointer = ctypes.c_void_p


class BackendSamplers:
    """The top-k samplers of a context, one for each of its sequences.

    `in_force` is the k that rows are cut to, None for whole rows: again where an evaluation differs
    from the first with them in tokens, sequence ids or rows. llama.cpp keeps pointers to the
    samplers: `chains` are to be freed after the context. `is_half_done` after an interrupt.
    """

    def __init__(self, n_sequences: int) -> None:
        self.chains: list[NativeHandle] = []
        self.in_force: int | None = None
        self._n_sequences = n_sequences
        self._layout: tuple[bytes, ...] | None = None  # of the first evaluation with them
        self.is_half_done = False
        self._set = native_function(
            "llama_set_sampler", ctypes.c_bool, _pointer, ctypes.c_int32, _pointer
        )

    def cut_to(self, context: NativeHandle, k: int | None) -> bool:
        """Cut rows to their k best logits from the next evaluation on; None: give them whole.

        Returns False, and leaves them whole, where llama.cpp cannot: with tensors split over
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
    native = llama()
    free = native_function("llama_sampler_free", None, _pointer)
    params: Any = native.llama_sampler_chain_default_params()
    kind: Any = type(params)
    make = native_function("llama_sampler_chain_init", _pointer, kind)
    chain = NativeHandle(make(params), free)
    best = native_function("llama_sampler_init_top_k", _pointer, ctypes.c_int32)(k)
    native_function("llama_sampler_chain_add", None, _pointer, _pointer)(chain, best)
    return chain
