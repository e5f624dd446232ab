"""A head's file with a draft vocabulary: the tokens that it drafts, counted on texts (FR-Spec).

If a vocabulary is large, the output matrix is most of a head's operations. EAGLE-1's files
list the tokens (`draft_tokens`), and the runtime takes their rows of the target's matrix. Those of
EAGLE-3 and block drafters have a map (`d2t`) and the rows themselves, as llama.cpp has it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import OptionError, PairError, UnsupportedModelError
from specrun.bindings.gguf import TensorInfo
from specrun.convert.gguf import GGUFSource, PlannedTensor
from specrun.runtime.drafters.eagle import DRAFT_TOKENS, VOCABULARY_MAP

_OUTPUT, _EMBEDDING = "output.weight", "token_embd.weight"
_MAPPED = ("eagle3", "dflash")
_BY_TOKEN = (_OUTPUT, "markov_w2.weight")
"""Matrices of which a row belongs to a token that is drafted."""
_WHY_NOT = {
    "medusa": "Medusa's heads each have an output matrix of their own",
    "hydra": "Hydra's heads each have an output matrix of their own",
    "pass": "look-ahead positions are read by the target's own output matrix",
    "space": "look-ahead positions are read by the target's own output matrix",
}
_FEWEST = 16


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """Tokens by their frequency, the most frequent first, of `n_tokens` in all."""

    tokens: npt.NDArray[np.int64]
    n_tokens: int

    @staticmethod
    def counted(
        texts: Sequence[Sequence[int]], n_tokens: int, most: int, always: Sequence[int] = ()
    ) -> DraftVocabulary:
        """Return the `most` frequent tokens of texts, and those of `always`.

        Ties go to lower ids, by which vocabularies of byte pairs count how frequent tokens are.
        """
        if not _FEWEST <= most < n_tokens:
            problem = f"a draft vocabulary of {most} tokens"
            raise OptionError(
                f"{problem}: give {_FEWEST} to {n_tokens - 1}, as there are {n_tokens}"
            )
        said = np.concatenate([np.asarray(text, np.int64) for text in texts])
        counts = np.bincount(said, minlength=n_tokens)
        counts[list(always)] = np.iinfo(np.int64).max  # an answer's end is drafted, too
        return DraftVocabulary(np.argsort(-counts, kind="stable")[:most], n_tokens)

    def coverage(self, texts: Sequence[Sequence[int]]) -> float:
        """Return the share of texts' tokens that can be drafted."""
        said = np.concatenate([np.asarray(text, np.int64) for text in texts])
        return float(np.isin(said, self.tokens).mean())


def limit_vocabulary(
    head: str | os.PathLike[str],
    target: str | os.PathLike[str],
    vocabulary: DraftVocabulary,
    output: str | os.PathLike[str],
    *,
    force: bool = False,
) -> int:
    """Write a head that drafts the tokens of a vocabulary alone; return the bytes of its file.

    Rows of its output matrix, or of the target's, stay as they are, bit by bit. Raises
    UnsupportedModelError for a kind of head that has no such graph or has a vocabulary already,
    PairError for another target, and as `write_gguf`.
    """
    source = GGUFSource(head)
    kind = source.header.architecture
    if kind not in ("eagle", *_MAPPED):
        no_graph = "only EAGLE's heads and block drafters have graphs with a draft vocabulary"
        raise UnsupportedModelError(f"{source.path} is a {kind}: {_WHY_NOT.get(kind, no_graph)}")
    there = next((name for name in (DRAFT_TOKENS, VOCABULARY_MAP) if name in source.tensors), None)
    if there is not None:
        raise UnsupportedModelError(f"{source.path} has a draft vocabulary already ({there})")
    tokens = vocabulary.tokens
    planned = list(map(source.unchanged, source.header.tensors))
    if kind == "eagle":
        added = [_ids(DRAFT_TOKENS, tokens)]
    else:
        tokens = np.sort(tokens)
        by_token = [source.tensors[name] for name in _BY_TOKEN if name in source.tensors]
        planned = [each for each in planned if each.name not in _BY_TOKEN]
        added = [_rows(source, tensor, tensor.name, tokens) for tensor in by_token]
        if _OUTPUT not in source.tensors:
            added.append(_borrowed(source, Path(target), vocabulary, tokens))
        added.append(_ids(VOCABULARY_MAP, tokens))
    return source.write_changed(output, source.metadata(), [*planned, *added], force=force)


def _ids(name: str, tokens: npt.NDArray[np.int64]) -> PlannedTensor:
    return PlannedTensor(name, tokens.shape, "I64", lambda: tokens)


def _borrowed(
    head: GGUFSource, target: Path, vocabulary: DraftVocabulary, tokens: npt.NDArray[np.int64]
) -> PlannedTensor:
    """Return the output matrix that the head has read so far: its embeddings or the target's."""
    source, names = head, [_EMBEDDING]
    if _EMBEDDING not in head.tensors or head.header.architecture == "eagle3":
        source, names = GGUFSource(target), [_OUTPUT, _EMBEDDING]
    name = next((name for name in names if name in source.tensors), _EMBEDDING)
    if name not in source.tensors:
        raise source.unsupported(f"has no {name}")
    tensor = source.tensors[name]
    if tensor.shape[1] < vocabulary.n_tokens:
        rows = f"{source.path} has {tensor.shape[1]} rows in {name}"
        raise PairError(f"{rows}, and the vocabulary has {vocabulary.n_tokens} tokens")
    return _rows(source, tensor, _OUTPUT, tokens)


def _rows(
    source: GGUFSource, tensor: TensorInfo, name: str, tokens: npt.NDArray[np.int64]
) -> PlannedTensor:
    shape = len(tokens), tensor.shape[0]
    return PlannedTensor(name, shape, tensor.type_name, lambda: source.stored(tensor)[tokens])
