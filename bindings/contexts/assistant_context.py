"""Contexts of Gemma 4's assistants: a few layers that read the target's own keys and values.

llama.cpp has their graph (src/models/gemma4-assistant.cpp). An assistant has no cells: its layers
attend to those of the target's last two layers, one with a window and one without. A token comes
with the target's state before it, or with the assistant's own in its place, and the rows are logits
and a state to go on with. All tokens of a draft stand at the position behind the cached text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from specrun.bindings.contexts.context import Context, StateBatch
from specrun.bindings.contexts.embedding_inputs import FloatRows
from specrun.bindings.contexts.rows import Rows
from specrun.bindings.errors import OptionError, UnsupportedModelError
from specrun.bindings.ggml.weights import device_of_tensor
from specrun.bindings.models.model import Model

ASSISTANT_ARCHITECTURE = "gemma4-assistant"
ASSISTED_ARCHITECTURE = "gemma4"
"""The architecture of the targets that assistants are made for."""

_EMBEDDINGS = "token_embd.weight"


class AssistantContext(Context):
    """Evaluates an assistant over the cache of its target's context, up to `n_tokens` at once.

    `n_sequences` are the sequences of the target's whose texts are drafted for. llama.cpp empties
    the cache that both then have, so the target must hold nothing yet. The target's native memory
    is freed after this context's, whichever is closed first.

    Raises `UnsupportedModelError` for a model of another architecture, `OptionError` if the cache
    holds a text.
    """

    _evaluates_nextn = True

    def __init__(
        self, model: Model, target: Context, *, n_tokens: int = 1, n_sequences: int = 1
    ) -> None:
        self.target = target
        for sequence in range(target.options.n_sequences):
            if target.memory.last_position(sequence) >= 0:
                problem = f"{model.path} shares the target's cache, which holds a text already"
                raise OptionError(f"{problem}: open a new runtime for it")
        options = dataclasses.replace(
            target.options,
            n_ctx=target.n_ctx,
            n_batch=max(n_tokens, n_sequences),
            n_ubatch=max(n_tokens, n_sequences),
            n_sequences=n_sequences,
            n_outputs=n_tokens,
            hidden_states=False,
            layer_inputs=(),
            nextn_states=True,
            n_rollback=0,
        )
        super().__init__(model, options)
        self._batch = StateBatch(self.n_batch, model.n_embd_out)

    def _check_model(self) -> None:
        kinds = (ASSISTANT_ARCHITECTURE, ASSISTED_ARCHITECTURE)
        if (self.model.architecture, self.target.model.architecture) != kinds:
            found = f"{self.model.path} is of {self.model.architecture}"
            given = f"its target of {self.target.model.architecture}"
            raise UnsupportedModelError(f"{found}, {given}: it needs {' and '.join(kinds)}")
        self.model.require_weights()
        place = device_of_tensor(self.target.model, _EMBEDDINGS)
        own = {device.handle for device in self.model.placed.offload}
        if place and place not in own:
            reads = f"{self.model.path} reads {_EMBEDDINGS} of the target, which lies on a device"
            raise OptionError(f"{reads}: compute drafts there, too (-devd, -ngld)")

    def _parameters(self) -> Any:  # noqa: ANN401 - a ctypes structure
        params = super()._parameters()
        params.ctx_other = self.target.handle
        return params

    @property
    def _lent(self) -> tuple[Any, ...]:
        return (self.target.handle,)

    def next_position(self, sequence: int) -> int:
        """Return the position behind a text that the target has cached."""
        return self.target.memory.last_position(sequence) + 1

    def evaluate(self, tokens: Sequence[int], states: FloatRows, sequences: Sequence[int]) -> Rows:
        """Evaluate tokens with their states [n, width] behind the texts of these sequences.

        No token sees another. The target must have a free cell for each, which stays free.
        """
        n, batch = len(tokens), self._batch
        positions = {sequence: self.next_position(sequence) for sequence in set(sequences)}
        batch.fill(tokens, [*map(positions.__getitem__, sequences)], [1] * n, sequences, [1] * n)
        batch.states[:n] = states
        return self.decode(batch)
