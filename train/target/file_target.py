"""A GGUF target that llama.cpp computes: its sizes, hidden states and matrices."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specrun.bindings.contexts.batch import Batch
from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import MalformedFileError, PairError, UnsupportedModelError
from specrun.bindings.gguf import GGUFHeader, read_header
from specrun.bindings.models.model import Model
from specrun.convert.gguf import GGUFSource, require_whole
from specrun.runtime.language import method_of_head
from specrun.train.data.corpus import TokenBatch
from specrun.train.data.tokens import TargetTokenizer
from specrun.train.target.hf_model import TargetMatrices
from specrun.train.target.shape import ModelShape
from specrun.train.target.states import Features

# == States and matrices ===========================================================================
#
# A target that is too large for torch teaches quantized: states are computed once, by the runtime's
# own bindings, and the head learns the states that it reads when it drafts for that very file.


_OUTPUT, _OUTPUT_BIAS, _EMBEDDING = "output.weight", "output.bias", "token_embd.weight"
_PROBE_TOKENS = 8
_ROUNDING = 0.1  # of the length of all logits
_PROBE = "The quick brown fox jumps over 13 lazy dogs.\n\tdef f(x):  # Zwölf Boxkämpfer, 東京"


def teacher_matrices(
    path: Path, device: torch.device, dtype: torch.dtype = torch.float32
) -> TargetMatrices:
    """Return a file's matrices, dequantized, tied ones as one; raises as `check_teacher`."""
    source = GGUFSource(path)
    check_logits(path, source.header)
    cap = source.header.metadata.get(f"{source.header.architecture}.final_logit_softcapping")
    softcap = float(cap) if isinstance(cap, int | float) and cap > 0 else None
    embedding = _matrix(source, _EMBEDDING).to(device, dtype)
    output = _matrix(source, _OUTPUT).to(device, dtype) if _OUTPUT in source.tensors else embedding
    return TargetMatrices(embedding, output, softcap)


def _matrix(source: GGUFSource, name: str) -> Tensor:
    info = source.tensors.get(name)
    if info is None:
        raise MalformedFileError(f"{source.path} has no tensor {name}: it is no target")
    return torch.from_numpy(source.numbers(info))


def check_teacher(path: Path, tokenizer: TargetTokenizer, shape: ModelShape) -> None:
    """Raise PairError unless a GGUF file has the folder's vocabulary and sizes; reads no weights.

    Raises UnsupportedModelError if its logits are not its output matrix (and a soft cap) times
    its states.
    """
    header = read_header(path)
    check_logits(path, header)
    pair = f"{path} is not {tokenizer.path} in GGUF"
    width, layers = (_size(header, path, key) for key in ("embedding_length", "block_count"))
    nextn = header.metadata.get(f"{header.architecture}.nextn_predict_layers")
    if isinstance(nextn, int):  # blocks behind the layers, left out of a folder's num_hidden_layers
        layers -= nextn
    if width != shape.hidden:
        raise PairError(f"{pair}: its states have {width} numbers, and the folder's {shape.hidden}")
    if layers != shape.n_layers:
        raise PairError(f"{pair}: it has {layers} layers, and the folder {shape.n_layers}")
    with Model(path, vocab_only=True) as model:
        check_teacher_vocabulary(model, tokenizer, shape.vocab_size)


def check_logits(path: Path, header: GGUFHeader) -> None:
    """Raise UnsupportedModelError if by a header logits are more than their matrix."""
    scale = header.metadata.get(f"{header.architecture}.logit_scale", 1.0)
    changed = f"multiplies or divides its logits by {scale}" if scale != 1.0 else None
    if any(tensor.name == _OUTPUT_BIAS for tensor in header.tensors):
        changed = f"adds {_OUTPUT_BIAS} to its logits"
    if changed is not None:
        raise UnsupportedModelError(
            f"{path} is a {header.architecture} model that {changed}, which training cannot "
            "do: use a target of another family"
        )


def _size(header: GGUFHeader, path: Path, key: str) -> int:
    value = header.metadata.get(f"{header.architecture}.{key}")
    if not isinstance(value, int):
        raise MalformedFileError(f"{path} has no {header.architecture}.{key}: it is no target")
    return value


def check_teacher_vocabulary(model: Model, tokenizer: TargetTokenizer, vocab_size: int) -> None:
    """Raise PairError unless the GGUF file and the folder have the same vocabulary."""
    pair = f"{model.path} is not {tokenizer.path} in GGUF"
    if model.vocabulary.size != vocab_size:
        n_tokens = model.vocabulary.size
        raise PairError(f"{pair}: it has {n_tokens} tokens, and the folder {vocab_size}")
    theirs, ours = model.vocabulary.tokenize(_PROBE), tokenizer.tokenize(_PROBE)
    if theirs != ours:
        here, there = next(
            both for both in zip_longest(theirs, ours, fillvalue="none") if both[0] != both[1]
        )
        raise PairError(f"{pair}: the same text is token {here} here and {there} there")


def check_matrices(matrices: TargetMatrices, states: Tensor, logits: Tensor, path: Path) -> None:
    """Raise UnsupportedModelError unless the matrices make these `logits` [n, vocab] of `states`.

    Everything that heads learn rests on that. llama.cpp rounds the inputs of quantized weights, by
    about one in a hundred.
    """
    ours = matrices.logits(states.to(matrices.output.device)).cpu()
    if ours.shape == logits.shape:
        known = logits.isfinite() & ours.isfinite()
        if float((ours - logits)[known].norm()) <= _ROUNDING * float(logits[known].norm()):
            return
    raise UnsupportedModelError(
        f"{path} changes its logits after its output matrix (by a factor or a bias), which "
        "training does not know how to do: use a target of another family"
    )


class TeacherFeatures:
    """States of single sequences, as llama.cpp computes them. Owns native memory: close it.

    Raises UnsupportedModelError if `taps` are requested of an architecture that does not hand out
    its layers' inputs.
    """

    def __init__(
        self, model: Model, longest: int, taps: tuple[int, ...] = (), *, n_threads: int = 0
    ) -> None:
        self.taps = taps
        self._model = model
        size = -(-longest // 256) * 256
        rows = min(512, size)
        options = ContextOptions(
            n_ctx=size,
            n_batch=rows,
            n_outputs=rows,
            n_threads=n_threads,
            n_threads_batch=n_threads,
            hidden_states=True,
            layer_inputs=tuple(dict.fromkeys(taps)),
        )
        self._context = Context(model, options)
        self._batch = Batch(self._context.n_batch, 1)

    def features(self, batch: TokenBatch) -> Features:
        """Return the states of a batch of sequences, one after the other."""
        width = self._model.n_embd
        found = torch.zeros(*batch.ids.shape, width * (1 + len(self.taps)))
        for row, (ids, valid) in enumerate(zip(batch.ids, batch.valid, strict=True)):
            states = self._states(ids[valid].tolist())
            found[row, : len(states)] = torch.from_numpy(states)
        found = found.to(batch.ids.device)
        return Features(found[..., :width], found[..., width:] if self.taps else None)

    def _states(self, tokens: list[int]) -> npt.NDArray[np.float32]:
        """Return the final states of a sequence, and the inputs of the tapped layers."""
        context, width = self._context, self._model.n_embd
        context.memory.clear()
        found = np.empty((len(tokens), width * (1 + len(self.taps))), np.float32)
        for start in range(0, len(tokens), self._batch.capacity):
            piece = tokens[start : start + self._batch.capacity]
            self._batch.fill_chain(piece, start, [0], len(piece))
            rows = context.decode(self._batch)
            found[start : start + len(piece), :width] = rows.hidden_states(range(len(piece)))
            for row in range(len(piece)):
                for place, tap in enumerate(self.taps, 1):
                    columns = slice(place * width, (place + 1) * width)
                    found[start + row, columns] = rows.layer_input(row, tap)
        return found

    def probe(self) -> tuple[Tensor, Tensor]:
        """Return states [n, h] and logits [n, vocab] of tokens spread over the vocabulary."""
        context, count = self._context, min(_PROBE_TOKENS, self._batch.capacity)
        tokens = np.linspace(0, self._model.vocabulary.size - 1, count).astype(int).tolist()
        context.memory.clear()
        self._batch.fill_chain(tokens, 0, [0], count)
        rows = context.decode(self._batch)
        states = rows.hidden_states(range(count))
        logits = np.stack([rows.logits(row) for row in range(count)])
        return torch.from_numpy(states), torch.from_numpy(logits)

    def close(self) -> None:
        """Free the context."""
        self._context.close()


# == Whether heads can be made for the file ========================================================


def check_file_target(path: Path) -> None:
    """Raise UnsupportedModelError unless heads can be trained for the model in a GGUF file.

    Raises FileMissingError and MalformedFileError for other files. Reads no weights.
    """
    header = read_header(path)
    if method_of_head(header.architecture) is not None:
        raise UnsupportedModelError(
            f"{path} is itself a head ({header.architecture}): give the target that is to be "
            "drafted for"
        )
    require_whole(path, header)
    check_logits(path, header)
    with Model(path, vocab_only=True) as model:
        if not model.can_generate:
            raise UnsupportedModelError(
                f"{path} is no left-to-right decoder ({header.architecture}): nothing drafts for it"
            )
