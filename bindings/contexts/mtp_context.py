"""A context over the NextN blocks of a model: each token comes with the hidden state before it."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from specrun.bindings.contexts.batch import Batch
from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.contexts.rows import Rows
from specrun.bindings.errors import OptionError, UnsupportedModelError
from specrun.bindings.models.model import Model
from specrun.bindings.models.nextn import NEXTN_ARCHITECTURES, SEVERAL_BLOCKS, select_nextn_block

_MTP = 1  # llama_context_type


class StateBatch(Batch):
    """A batch with hidden states beside the tokens: `states`, float32 [capacity, width]."""

    def __init__(self, capacity: int, width: int) -> None:
        super().__init__(capacity, 1)
        self.states: npt.NDArray[np.float32] = np.zeros((capacity, width), np.float32)
        kind = dict(self.struct._fields_)["embd"]
        self.struct.embd = ctypes.cast(self.states.ctypes.data, kind)


class MtpContext(Context):
    """Evaluates a model's NextN blocks, with keys and values of their own, and not its trunk.

    Token x_i at position i comes with the state that its context's `Rows.nextn_state` gave for
    position i - 1. The rows are logits for position i + 1, and a state in the place of the trunk's
    for going on. All tokens of a batch ask for rows, or none: of a part, llama.cpp would hand out
    other tokens' states for some architectures.

    Raises `UnsupportedModelError` where the model has no NextN blocks, was loaded without them, or
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
            raise OptionError(f"{asking} ask for rows: all must, or none")
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
