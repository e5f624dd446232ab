"""Embedding inputs: a batch given as embeddings, so that some of them need be no token's.

llama.cpp takes a batch of tokens or a batch of embeddings (llama_batch.token or .embd), not both.
So if one position of an evaluation has an embedding of its own, all are given as embeddings, and
those of real tokens are looked up here, in the model's own matrix and by ggml's own dequantization:
layers are given the same numbers as from a batch of tokens, to the bit.

Only architectures whose graphs read a token by its embedding alone can be fed so. Others read the
ids again further on (Gemma 3n, Gemma 4), or have inputs wider than an embedding.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from specrun.bindings.contexts.batch import Batch
from specrun.bindings.errors import ClosedError, OptionError, UnsupportedModelError
from specrun.bindings.ggml.device import ComputeDevice
from specrun.bindings.ggml.graph import Graph, GraphBuilder
from specrun.bindings.ggml.tensor import I32
from specrun.bindings.ggml.weights import TargetTensors, device_for_heads
from specrun.bindings.models.model import Model

FloatRows = npt.NDArray[np.float32]

_PLAIN = "llama mistral3 qwen2 qwen2moe qwen3 qwen3moe phi3 smollm3 olmo2 gemma gemma2 gpt-oss"
_SCALES_TOKENS = frozenset({"gemma3"})  # by the root of the width, and embeddings not at all
EMBEDDING_INPUT_ARCHITECTURES = frozenset(_PLAIN.split()) | _SCALES_TOKENS
"""Architectures that compute the same of a token and of its embedding in this llama.cpp."""

_CACHED = 4096  # rows of tokens seen lately
_AT_ONCE = 16


def check_embedding_inputs(model: Model) -> None:
    """Raise UnsupportedModelError for a model that cannot be given embeddings for tokens."""
    if model.architecture not in EMBEDDING_INPUT_ARCHITECTURES:
        works = ", ".join(sorted(EMBEDDING_INPUT_ARCHITECTURES))
        problem = f"look-ahead positions of {model.architecture} models cannot be evaluated"
        reason = "llama.cpp reads more of their tokens than embeddings"
        raise UnsupportedModelError(f"{model.path}: {problem} ({reason}); those of {works} can")


class EmbeddingInputs:
    """Embeddings of a model's tokens, and behind them `extra` ones [n, h] of positions' own.

    Token ids from `n_vocab` on name the extra rows in turn. Close it before the model.
    """

    def __init__(self, model: Model, extra: FloatRows, *, n_threads: int = 0) -> None:
        check_embedding_inputs(model)
        if extra.ndim != 2 or extra.shape[1] != model.n_embd:
            shape = f"embeddings of shape {list(extra.shape)}"
            raise OptionError(f"{shape} for a model whose tokens have {model.n_embd} numbers each")
        self.n_vocab = model.vocabulary.size
        scaled = model.architecture in _SCALES_TOKENS
        self._factor = np.float32(math.sqrt(model.n_embd)) if scaled else None
        self._extra = self._as_input(np.ascontiguousarray(extra, np.float32))
        self._known: OrderedDict[int, FloatRows] = OrderedDict()
        self._graph: Graph | None = None
        self._device = ComputeDevice(device_for_heads(model), n_threads=n_threads)
        self._tensors = TargetTensors(model, self._device)
        try:
            self._graph = self._build()
        except BaseException:
            self.close()
            raise

    def _build(self) -> Graph:
        builder = GraphBuilder(self._device, max_operations=4)
        try:
            tokens = builder.input("tokens", I32, _AT_ONCE)
            builder.output("rows", builder.get_rows(self._tensors.embedding(), tokens))
            return builder.build()
        finally:
            builder.close()

    @property
    def n_extra(self) -> int:
        """The number of rows in addition to the tokens'."""
        return len(self._extra)

    def takes(self, tokens: Sequence[int]) -> bool:
        """Whether some of the tokens are none: then all have to be given as embeddings."""
        return max(tokens) >= self.n_vocab

    def rows(self, tokens: Sequence[int]) -> FloatRows:
        """Return the model's inputs for these tokens, [n, h].

        Raises `OptionError` for an id that names neither a token nor an extra row.
        """
        if min(tokens) < 0 or max(tokens) >= self.n_vocab + self.n_extra:
            known = f"{self.n_vocab} tokens and {self.n_extra} look-ahead positions"
            raise OptionError(f"an id of the batch names none of the {known}")
        self._look_up({token for token in tokens if token < self.n_vocab})
        found = np.stack(
            [
                self._known[token] if token < self.n_vocab else self._extra[token - self.n_vocab]
                for token in tokens
            ]
        )
        while len(self._known) > _CACHED:
            self._known.popitem(last=False)
        return found

    def _look_up(self, tokens: set[int]) -> None:
        """Look up the rows of these tokens, the most recent at the end."""
        missing = sorted(token for token in tokens if token not in self._known)
        for token in tokens.difference(missing):
            self._known.move_to_end(token)
        if missing and self._graph is None:
            raise ClosedError("the embeddings are closed")
        for start in range(0, len(missing), _AT_ONCE):
            assert self._graph is not None
            piece = missing[start : start + _AT_ONCE]
            filled = np.array([*piece, *[piece[0]] * (_AT_ONCE - len(piece))], np.int32)
            rows = self._graph.run({"tokens": filled})["rows"].astype(np.float32, copy=False)
            rows = self._as_input(rows)
            self._known.update(zip(piece, rows, strict=False))

    def _as_input(self, rows: FloatRows) -> FloatRows:
        return rows if self._factor is None else rows * self._factor

    def close(self) -> None:
        """Free graph and matrices; again does nothing."""
        if self._graph is not None:
            self._graph.close()
            self._graph = None
        self._tensors.close()
        self._device.close()


class EmbeddingBatch(Batch):
    """A batch of up to `capacity` embeddings of `width` numbers in the place of tokens.

    It is filled as any batch, with any tokens of the vocabulary, and then given embeddings.
    """

    def __init__(self, capacity: int, max_ids_per_token: int, width: int) -> None:
        super().__init__(capacity, max_ids_per_token)
        self.embeddings = np.zeros((capacity, width), np.float32)
        # One of the two pointers is null: llama.cpp recognises them by that.
        self.struct.token = None
        self._point(embd=self.embeddings)

    def give(self, rows: FloatRows) -> None:
        """Write the embeddings [n, width] of the n tokens that it was filled with."""
        if rows.shape != (self.n_tokens, self.embeddings.shape[1]):
            raise OptionError(
                f"embeddings of shape {list(rows.shape)} in a batch of {self.n_tokens} by "
                f"{self.embeddings.shape[1]}"
            )
        self.embeddings[: self.n_tokens] = rows
