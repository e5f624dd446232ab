"""GGUF files of heads: what they are, and whether they were made for this target.

A head's `general.architecture` is `medusa`, `hydra`, `eagle`, or llama.cpp's own `eagle3`; below
that name stand its sizes, such as `medusa.embedding_length`. `specrun.target.vocabulary_sha256`
names the tokens of the target it was made for.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specrun.bindings.errors import MalformedFileError, PairError, UnsupportedModelError
from specrun.bindings.gguf import ArrayValue, GGUFHeader, read_header
from specrun.bindings.models.model import Model
from specrun.bindings.models.model_checks import check_types
from specrun.bindings.models.trial import require_tried_head

TARGET_VOCABULARY = "specrun.target.vocabulary_sha256"

_TOKENS = "tokenizer.ggml.tokens"
# Control and padding tokens that others renamed; llama.cpp lets as many be missing.
_MAX_DIFFERENT_TOKENS = 128


class HeadFile:
    """The header of a head's file, read by name; every fault names the file and key or tensor."""

    def __init__(self, path: str | os.PathLike[str], kind: str) -> None:
        self.path = os.fspath(path)
        self.kind = kind
        self.header: GGUFHeader = read_header(path)
        if self.header.architecture != kind:
            raise UnsupportedModelError(
                f"{self.path} is a file of architecture {self.header.architecture}, and "
                f"{kind}(...) needs {kind} heads"
            )
        check_types(Path(path), self.header.tensors)
        self._tensors = {tensor.name: tensor for tensor in self.header.tensors}

    def __contains__(self, tensor: str) -> bool:
        return tensor in self._tensors

    def size(self, name: str, most: int = 1 << 24, *, default: int | None = None) -> int:
        """Return the positive whole number `<kind>.<name>`, or `default` where it is absent."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
            raise self._fault(name, value)
        return value

    def number(self, name: str, default: float) -> float:
        """Return the positive number `<kind>.<name>`, or `default` where it is absent."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value < 1e12:
            raise self._fault(name, value)
        return float(value)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Return the truth value `<kind>.<name>`, `default` where it is absent."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self._fault(name, value)
        return value

    def numbers(self, name: str) -> list[float] | None:
        """Return the list `<kind>.<name>`, None where it is absent."""
        value = self._value(name)
        if value is None:
            return None
        items: list[Any] = list(value) if isinstance(value, ArrayValue) else [None]
        if not all(isinstance(item, int | float) for item in items):
            raise MalformedFileError(
                f"{self.path} has no list of numbers as {self.kind}.{name}: convert the head again"
            )
        return [float(item) for item in items]

    def _value(self, name: str, default: object = None) -> Any:  # noqa: ANN401 - whatever it holds
        return self.header.metadata.get(f"{self.kind}.{name}", default)

    def _fault(self, name: str, value: object) -> MalformedFileError:
        return MalformedFileError(
            f"{self.path} has {value!r} as {self.kind}.{name}: convert the head again"
        )

    def require(self, tensor: str, shape: Sequence[int]) -> str:
        """Return the name of a tensor that must be there with this shape (ggml's order)."""
        given = self.shape(tensor)
        # GGUF leaves out trailing dimensions of 1.
        if given + (1,) * (4 - len(given)) != tuple(shape) + (1,) * (4 - len(shape)):
            raise MalformedFileError(
                f"{self.path} has {tensor} of shape {list(given)}, and its metadata ask for "
                f"{list(shape)}"
            )
        return tensor

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Return the shape of a tensor that must be there, in ggml's order."""
        if tensor not in self._tensors:
            raise MalformedFileError(f"{self.path} has no tensor {tensor}: the head is incomplete")
        return tuple(self._tensors[tensor].shape)

    def type_name(self, tensor: str) -> str:
        """Return the type of a tensor that is there."""
        return self._tensors[tensor].type_name

    def check_target(self, target: Model, *, hidden_key: str = "embedding_length") -> None:
        """Raise PairError, with both values, unless size and vocabulary are those of the target.

        A head that was not seen before is then tried with it in another process.
        `<kind>.<hidden_key>` is the size of the hidden states of the target that the head reads.
        """
        hidden, tokens = self.size(hidden_key), self.header.metadata.get(_TOKENS)
        vocab_size = len(tokens) if isinstance(tokens, ArrayValue) else self.size("vocab_size")
        pair = f"{self.path} cannot draft for {target.path}"
        if hidden != target.n_embd:
            raise PairError(
                f"{pair}: it reads hidden states of {hidden} numbers, and the target's have "
                f"{target.n_embd}"
            )
        if vocab_size != target.vocabulary.size:
            raise PairError(
                f"{pair}: it predicts {vocab_size} tokens, and the target has "
                f"{target.vocabulary.size}"
            )
        made_for = self.header.metadata.get(TARGET_VOCABULARY)
        ours = target.vocabulary.fingerprint.hex()
        if isinstance(made_for, str) and made_for != ours:
            raise PairError(
                f"{pair}: it was made for another vocabulary ({made_for[:12]}..., the target's "
                f"is {ours[:12]}...)"
            )
        if made_for is None:
            self._check_tokens(target, pair)
        require_tried_head(Path(self.path), self.header, target.path, target.header)

    def _check_tokens(self, target: Model, pair: str) -> None:
        """Compare the tokens themselves: llama.cpp's converter writes them, and no fingerprint."""
        ours, theirs = self.header.metadata.get(_TOKENS), target.header.metadata.get(_TOKENS)
        if not isinstance(ours, ArrayValue) or not isinstance(theirs, ArrayValue) or ours == theirs:
            return
        if ours.element_type != "string" or theirs.element_type != "string":
            return  # what is no list of tokens llama.cpp has refused in the target
        n = min(len(ours), len(theirs))
        different = [token for token in range(n) if ours.bytes_at(token) != theirs.bytes_at(token)]
        if len(different) > _MAX_DIFFERENT_TOKENS:
            first = different[0]
            raise PairError(
                f"{pair}: {len(different)} of its tokens are others, the first one token {first}, "
                f"{ours[first]!r} for the head and {theirs[first]!r} for the target"
            )
