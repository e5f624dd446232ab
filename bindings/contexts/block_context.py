"""Contexts of block drafters (DFlash, DFlash2, DSpark): a whole block of tokens in one evaluation.

llama.cpp has their graphs (src/models/dflash.cpp), under the architecture `dflash`. A batch of
features, the target's tapped states, writes keys and values and returns nothing. A batch of tokens,
the last one and masks, is a block: it attends to these cells and to itself, in both directions. Its
rows are logits, and the states that come with them: DSpark's confidences or DFlash2's candidates.

A drafter without embeddings or an output matrix reads the target's, through another context
(`ctx_other`), of which llama.cpp takes nothing but the model. So that context need not be the one
that a conversation is evaluated in: a `Lender` is the smallest there is, and serves all of them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import AS_TRAINED, ContextOptions
from specrun.bindings.contexts.embedding_inputs import EmbeddingBatch, FloatRows
from specrun.bindings.errors import OptionError, UnsupportedModelError
from specrun.bindings.functions import call
from specrun.bindings.ggml.weights import device_of_tensor
from specrun.bindings.gguf import ArrayValue
from specrun.bindings.models.model import Model

BLOCK_ARCHITECTURE = "dflash"
FEATURES_AT_ONCE = 64
"""Positions whose features are put into cells by one evaluation."""

_SECTIONS = 4  # positions of a token in M-RoPE: time, height, width, and a spare one
_OWN = ("token_embd.weight", "output.weight")


class Lender(Context):
    """A context that lends its model's embeddings and output matrix, and evaluates nothing.

    Its cells are the fewest that llama.cpp makes, in this machine's memory.
    """

    def __init__(self, target: Model) -> None:
        least = ContextOptions(n_ctx=1, n_batch=1, n_ubatch=1, n_threads=1, offload_kv=False)
        super().__init__(target, least)


def needs_lender(model: Model) -> bool:
    """Whether a block drafter has no embeddings or no output matrix of its own."""
    names = {tensor.name for tensor in model.header.tensors}
    # Embeddings serve as the output matrix, too, unless the drafter has one.
    return _OWN[0] not in names


def block_options(options: ContextOptions, n_tokens: int) -> ContextOptions:
    """Return the options of a context for blocks of so many tokens, by those of the target's."""
    at_once = max(FEATURES_AT_ONCE, n_tokens)
    return dataclasses.replace(
        options,
        n_ctx=options.n_ctx + n_tokens,
        n_batch=at_once,
        n_ubatch=at_once,
        n_sequences=1,
        n_outputs=n_tokens,
        hidden_states=False,
        layer_inputs=(),
        n_rollback=0,
        rope=AS_TRAINED,
    )


class FeatureBatch(EmbeddingBatch):
    """A batch of up to `capacity` positions with features of `width` numbers in place of tokens."""

    def __init__(self, capacity: int, width: int, *, sections: bool) -> None:
        super().__init__(capacity, 1, width)
        self._sections = np.zeros(_SECTIONS * capacity, np.int32) if sections else None
        if self._sections is not None:
            self._point(pos=self._sections)

    def give(self, rows: FloatRows) -> None:
        """Write the features of the positions that it was filled with."""
        super().give(rows)
        if self._sections is not None:
            # The text's own position in all sections but the spare one, section by section.
            n = self.n_tokens
            self._sections[: 3 * n] = np.tile(self.positions[:n], 3)
            self._sections[3 * n : 4 * n] = 0


class BlockContext(Context):
    """Evaluates a block drafter: features of the target into cells, and blocks of tokens.

    A block is one evaluation as a whole, of at most `block_size` tokens for each sequence, and so
    is a batch of features of at most `n_batch`. `lender` is needed if `needs_lender`. `causal`:
    tokens of a block see only those before them.

    Raises `UnsupportedModelError` for a model of another architecture.
    """

    def __init__(
        self, model: Model, options: ContextOptions, lender: Context | None, *, causal: bool
    ) -> None:
        self._lender = lender
        super().__init__(model, dataclasses.replace(options, nextn_states=True))
        call("llama_set_causal_attn")(self.handle, causal)

    def _check_model(self) -> None:
        if self.model.architecture != BLOCK_ARCHITECTURE:
            kind = f"a {self.model.architecture} model, and no {BLOCK_ARCHITECTURE} drafter"
            raise UnsupportedModelError(f"{self.model.path} is {kind}")
        self.model.require_weights()
        if self._lender is None and needs_lender(self.model):
            raise OptionError(f"{self.model.path} reads the embeddings of a target: lend them")
        if self._lender is not None:
            self._check_devices(self._lender.model)

    def _check_devices(self, target: Model) -> None:
        """Raise `OptionError` if a matrix of the target lies where the drafter does not compute."""
        own = {device.handle for device in self.model.placed.offload}
        for name in _OWN:
            place = device_of_tensor(target, name)
            if place and place not in own:
                names = [each.name for each in target.placed.offload if each.handle == place]
                reads = f"{self.model.path} reads {name} of the target, which lies on {names[0]}"
                advice = "compute drafts there, too (-devd, -ngld)"
                raise OptionError(f"{reads}, and it is computed elsewhere: {advice}")

    def _parameters(self) -> Any:  # noqa: ANN401 - a ctypes structure
        params = super()._parameters()
        # llama.cpp asserts that tokens that see each other in both directions are evaluated at
        # once.
        params.n_ubatch = params.n_batch
        if self._lender is not None:
            params.ctx_other = self._lender.handle
        return params

    def feature_batch(self, width: int) -> FeatureBatch:
        """Return a batch for features of this width."""
        sections = self.model.header.metadata.get(f"{BLOCK_ARCHITECTURE}.rope.dimension_sections")
        turns = isinstance(sections, ArrayValue) and any(sections)
        return FeatureBatch(FEATURES_AT_ONCE, width, sections=turns)
