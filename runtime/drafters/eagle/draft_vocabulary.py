"""The tokens that an EAGLE head may draft: those said most often (FR-Spec, Zhao et al. 2025).

A depth of a draft multiplies the head's state by the target's output matrix, which for a large
vocabulary and a small target is most of what drafting costs. With the rows of frequent tokens alone
it costs a fraction. Other tokens are never drafted, which is exact: their draft probability is 0,
and the target itself says them.

A file of an EAGLE-1 head may name them, the most frequent first: `draft_tokens`, I64 (n). An
EAGLE-3 head has a vocabulary of its own, `d2t`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import MalformedFileError, OptionError, PairError
from specrun.bindings.ggml.weights import read_numbers
from specrun.bindings.models.model import Model
from specrun.runtime.heads import HeadFile

DRAFT_TOKENS = "draft_tokens"
FEWEST = 16
ALL = 0
"""As a number of draft tokens: all of the target's."""

Ids = npt.NDArray[np.int32]


def draft_vocabulary(file: HeadFile, target: Model, most: int | None = None) -> Ids | None:
    """Return the ids, rising, of the tokens that a head drafts; None where these are all.

    They are those that its file names, or with `most` the first of them, which are the most
    frequent. Of a file that names none they are the tokens with the lowest ids, by which
    vocabularies of byte pairs count how frequent they are, and those that end a text. Raises
    OptionError for fewer than 16 tokens or more than the file names, PairError and
    MalformedFileError for a list that is none.
    """
    size = target.vocabulary.size
    if most is not None and most != ALL and most < FEWEST:
        raise OptionError(f"draft_tokens is {most}: give at least {FEWEST}, or all")
    if most == ALL or (most is None and DRAFT_TOKENS not in file):
        return None
    if DRAFT_TOKENS not in file:
        ends = [end for end in target.vocabulary.end_of_generation if end >= (most or size)]
        ids = np.array([*range(min(most or size, size)), *ends], np.int64)
        return None if len(ids) >= size else np.sort(ids).astype(np.int32)
    named = _named(file, target)
    if most is not None and most > len(named):
        problem = f"draft_tokens is {most}, and {file.path} names {len(named)}"
        raise OptionError(f"{problem}: give at most so many, or all")
    return np.sort(named[:most])


def checked_ids(ids: npt.NDArray[np.int64], file: HeadFile, target: Model, name: str) -> Ids:
    """Return the target's tokens that the tensor `name` of a file lists; each may be there once."""
    outside = ids[(ids < 0) | (ids >= target.vocabulary.size)]
    if len(outside):
        raise PairError(
            f"{file.path} cannot draft for {target.path}: its {name} names token "
            f"{outside[0]}, and the target has {target.vocabulary.size}"
        )
    # A token named twice would keep only one of its logits in `PairHead.target_rows`.
    tokens, counts = np.unique(ids, return_counts=True)
    if len(tokens) != len(ids):
        twice = tokens[counts > 1][0]
        raise MalformedFileError(
            f"{file.path} has token {twice} twice in its {name}: convert it again"
        )
    return ids.astype(np.int32)


def _named(file: HeadFile, target: Model) -> Ids:
    shape, kind = file.shape(DRAFT_TOKENS), file.type_name(DRAFT_TOKENS)
    if len(shape) != 1 or kind != "I64" or shape[0] < FEWEST:
        raise MalformedFileError(
            f"{file.path} has {DRAFT_TOKENS} of {kind} {list(shape)}, not a list of at least "
            f"{FEWEST} in I64: convert it again"
        )
    ids = read_numbers(file.path, DRAFT_TOKENS, np.int64)
    return checked_ids(ids, file, target, "list of draft tokens (draft_tokens)")
