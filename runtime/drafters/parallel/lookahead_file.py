"""Files of look-ahead embeddings: PaSS's, one a position, or the embedding of SPACE's mask token.

Architecture `pass` or `space`; tensor `<kind>.embedding.weight` (h, rows) in F32; metadata
`<kind>.embedding_length`, `.vocab_size` and `.position_count`, how many positions were trained. The
rows are `position_count`, or 1 that serves every position.
"""

from __future__ import annotations

import os
from contextlib import closing

import numpy as np

from specrun.bindings.contexts.embedding_inputs import EmbeddingInputs, check_embedding_inputs
from specrun.bindings.errors import MalformedFileError
from specrun.bindings.ggml.device import ComputeDevice
from specrun.bindings.ggml.weights import load_tensors
from specrun.bindings.models.model import Model
from specrun.runtime.heads import HeadFile

MOST_POSITIONS = 64


class LookaheadFile:
    """The embeddings of a file, as inputs of its target. Close it before the target.

    Raises PairError for those of another target, UnsupportedModelError for a target that cannot be
    given embeddings, MalformedFileError.
    """

    def __init__(
        self, path: str | os.PathLike[str], kind: str, target: Model, *, n_threads: int = 0
    ) -> None:
        file = HeadFile(path, kind)
        check_embedding_inputs(target)
        file.check_target(target)
        self.path, self.n_params = file.path, file.header.n_parameters
        self.n_positions = file.size("position_count", MOST_POSITIONS)
        name = f"{kind}.embedding.weight"
        rows = file.shape(name)[-1]
        file.require(name, (target.n_embd, rows))
        if rows not in (1, self.n_positions):
            counts = f"{rows} embeddings for {self.n_positions} look-ahead positions"
            raise MalformedFileError(f"{self.path} has {counts}: convert it again")
        if file.type_name(name) != "F32":
            stored = f"{name} as {file.type_name(name)}"
            raise MalformedFileError(f"{self.path} has {stored}, which must be F32: convert again")
        with (
            closing(ComputeDevice(n_threads=1)) as device,
            closing(load_tensors(path, device, [name])) as store,
        ):
            numbers = store.read(name, np.float32).astype(np.float32, copy=False)
        embeddings = numbers.reshape(rows, target.n_embd)
        self._is_shared = rows == 1
        self.inputs = EmbeddingInputs(target, embeddings, n_threads=n_threads)

    def tokens(self, count: int) -> tuple[int, ...]:
        """Return what stands for the first `count` positions in a tree: ids past the vocabulary."""
        first = self.inputs.n_vocab
        return tuple(first if self._is_shared else first + index for index in range(count))

    def close(self) -> None:
        """Free what looks embeddings up; again does nothing."""
        self.inputs.close()
